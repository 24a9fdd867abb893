"""What of a request decides its keys besides tokens: salt, adapter, media. In doubt: not cacheable."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ucm_core.errors import UcmError
from ucm_core.ops import border
from ucm_core.spec.checkpoint import adapter_digest
from ucm_core.spec.keys import LoraIdentity, MediaItem, RequestIdentity

INLINE_ADAPTER_BYTES = 64 << 20
"""Adapters up to this size are digested while their first request waits (tens of milliseconds)."""

Signature = tuple[tuple[object, ...], ...]

_DISTRUSTED: Signature = (("distrusted",),)
"""Equals no signature of files."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM's own prefix cache tells adapters apart."""

    name: str
    """What requests call it."""
    path: str
    """Where its files lie."""


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """What seeds and interleaves the prefix chain of one request."""

    identity: RequestIdentity
    media: tuple[MediaItem, ...] = ()


class AdapterDigests:
    """Content digests of LoRA adapters, computed once per (name, path).

    vLLM reads an adapter's files once per number, at a time that it does not tell, and its own prefix cache
    knows adapters by name and path. So the files that were digested are taken as the files that the engine
    holds only while they stay untouched and the number stays theirs: after any change, and for adapters that
    are replaced in place, the digest is unknown for good, and unknown is not cacheable.
    """

    def __init__(self, inline_bytes: int = INLINE_ADAPTER_BYTES) -> None:
        self._inline_bytes = inline_bytes
        self._lock = threading.Lock()
        self._known: dict[Adapter, tuple[Signature, str | None]] = {}
        self._numbers: dict[int, Adapter] = {}
        self._threads: list[threading.Thread] = []

    def digest(self, adapter: Adapter, number: int) -> str | None:
        """The hex digest of the adapter's files, or None while it is not known (or never will be).

        ``number`` is vLLM's; the first adapter that bears it is the one that vLLM holds.
        """
        signature = _signature(adapter.path)
        with self._lock:
            first = self._numbers.setdefault(number, adapter)
            entry = self._known.get(adapter)
            if entry is None:
                self._known[adapter] = (signature, None)
        if first != adapter:
            for each in (first, adapter):
                self.distrust(each, f"number {number} also names {first.path!r} and {adapter.path!r}")
            return None
        if entry is None:
            return self._begin(adapter, signature)
        if entry[0] != signature:
            self.distrust(adapter, "its files changed after vLLM may have read them")
            return None
        return entry[1]

    def distrust(self, adapter: Adapter, why: str) -> None:
        """From now on the adapter's digest is unknown."""
        border.complaints.say("adapter", f"LoRA adapter {adapter.path!r} is not cached any more: {why}")
        with self._lock:
            self._known[adapter] = (_DISTRUSTED, None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for digests that are being computed."""
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def _begin(self, adapter: Adapter, signature: Signature) -> str | None:
        if not signature:
            border.complaints.say(
                "adapter",
                f"LoRA adapter {adapter.path!r} has no readable files: its requests are not cached",
            )
            return None
        if sum(int(str(entry[3])) for entry in signature) <= self._inline_bytes:
            return self._compute(adapter, signature)
        thread = threading.Thread(
            target=self._compute, args=(adapter, signature), name="ucm-adapter-digest", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return None

    def _compute(self, adapter: Adapter, signature: Signature) -> str | None:
        try:
            digest = adapter_digest(Path(adapter.path))
        except (UcmError, OSError) as error:
            border.failed("adapter_digest", error)
            return None
        if _signature(adapter.path) != signature:
            self.distrust(adapter, "its files changed while they were read")
            return None
        with self._lock:
            if self._known[adapter] != (signature, None):  # distrusted meanwhile
                return None
            self._known[adapter] = (signature, digest)
        return digest


class RequestIdentities:
    """Reads `RequestKeys` off vLLM requests."""

    def __init__(self, adapters: AdapterDigests | None = None) -> None:
        self._adapters = adapters or AdapterDigests()

    def of(self, request: Any) -> RequestKeys | None:
        """The keys of a ``vllm.v1.request.Request``, or None when it must not be cached.

        Not cacheable: prompts given as embeddings (their token ids are zeros), resumable (streaming) requests
        whose tokens may be replaced, adapters whose content is unknown, an empty salt.
        """
        if _has_embeddings(request) or getattr(request, "resumable", False) or request.cache_salt == "":
            return None
        lora = self._lora(request.lora_request)
        identity = RequestIdentity(lora=lora, cache_salt=request.cache_salt)
        if not identity.cacheable:
            return None
        return RequestKeys(identity, tuple(_media_item(feature) for feature in request.mm_features))

    def _lora(self, lora_request: Any) -> LoraIdentity | None:
        if lora_request is None:
            return None
        adapter, digest = Adapter(lora_request.lora_name, lora_request.lora_path), None
        if getattr(lora_request, "load_inplace", False):
            self._adapters.distrust(adapter, "it is replaced in place")
        else:
            digest = self._adapters.digest(adapter, lora_request.lora_int_id)
        return LoraIdentity(name=adapter.name, digest=digest)


def _has_embeddings(request: Any) -> bool:
    return (
        request.prompt_token_ids is None
        or getattr(request, "prompt_embeds", None) is not None
        or getattr(request, "prompt_is_token_ids", None) is not None
    )


def _media_item(feature: Any) -> MediaItem:
    """The identifier is vLLM's content hash (or the caller's own id), digested at full width."""
    begin = feature.mm_position.offset
    digest = hashlib.sha256(f"{feature.modality}\0{feature.identifier}".encode()).digest()
    return MediaItem(digest=digest, begin=begin, end=begin + feature.mm_position.length)


def _signature(path: str) -> Signature:
    """(name, device, inode, size, mtime, ctime) of each file in ``path``; () if there is none."""
    try:
        files = sorted(entry for entry in Path(path).iterdir() if entry.is_file())
        stats = [(entry.name, entry.stat()) for entry in files]
    except OSError:
        return ()
    return tuple((name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)
