"""From tokens to keys: the prefix chain, its request identity, row seeds and object keys.

The chain is, byte for byte, SGLang's page hash::

    d_i = SHA-256(d_{i-1} || ids of grain i as little-endian u32)

with ``0xff || ids as little-endian u64`` for a grain that holds an id above 2^32 - 1, and with ``d_{-1}``
absent or the seed of the request identity. A grain that media items overlap has ``"ucm-media-v1" || u32le
count || (digest32 || u64le offset)*`` appended, where the offset is that of the grain's first token inside
the item (modulo 2^64, because an item may begin inside the grain).

Keys come from bytes with a defined encoding, nothing else: containers, processes and hash seeds have no
influence.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ucm_core.errors import IdentityError, SpecError, shown
from ucm_core.spec.encoding import digest_of
from ucm_core.spec.rows import is_count

__all__ = [
    "DIGEST_BYTES",
    "NAME_BYTES",
    "Keys",
    "LoraIdentity",
    "MediaItem",
    "PrefixChain",
    "RequestIdentity",
    "Tokens",
    "following",
    "object_keys",
    "row_seed",
]

DIGEST_BYTES = 32
NAME_BYTES = 16
"""Leading bytes of a key that are the object's name."""
_NARROW_MAX = 0xFFFF_FFFF
_SEED_TAG = b"sglang-cache-namespace-v1"
_MEDIA_TAG = b"ucm-media-v1"

Digests = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint8]
"""Object keys, ``uint8[n, 32]``."""
_NO_DIGESTS: Digests = np.empty((0, DIGEST_BYTES), np.uint8)


class SupportsNumpy(Protocol):
    """A tensor-like holder of token ids on the host, for example a torch CPU tensor."""

    def numpy(self) -> npt.NDArray[Any]:
        """Return the ids as an array."""
        ...


Tokens = Sequence[int] | npt.NDArray[np.integer[Any]] | SupportsNumpy
"""Token ids in any container: list, tuple, bytes (an id each), array, numpy, tensor with ``numpy()``, any
sequence of ints."""


@dataclass(frozen=True, slots=True)
class LoraIdentity:
    """An adapter by name and content, never by an engine's load-order number."""

    name: str
    """The name requests use; not empty."""
    digest: str | None
    """Hex digest of the adapter's content; None = unknown, which equals nothing."""

    def __post_init__(self) -> None:
        """Raise IdentityError for an empty name or a digest that is not hexadecimal."""
        if not self.name or not isinstance(self.name, str):
            raise IdentityError(
                f"a LoRA identity needs a name, got {self.name!r}; use lora=None for no adapter"
            )
        if self.digest is not None:
            object.__setattr__(self, "digest", _hexadecimal(self.digest).hex())


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What separates equal tokens of different requests; every field is optional and typed."""

    lora: LoraIdentity | None = None
    """The adapter; None = the base model."""
    cache_salt: str | None = None
    """The tenant; None = shared by all. Empty is refused."""
    extra_key: str | None = None
    """The caller's own separation; an empty one is a value of its own, as in SGLang."""

    def __post_init__(self) -> None:
        """Raise IdentityError for an empty salt, and for fields of another type."""
        if self.cache_salt == "":
            raise IdentityError("cache_salt is empty; give a value or None")
        if not isinstance(self.lora, LoraIdentity | None):
            raise IdentityError(f"lora is {self.lora!r}; give a LoraIdentity or None")
        for name, text in (("cache_salt", self.cache_salt), ("extra_key", self.extra_key)):
            if not isinstance(text, str | None):
                raise IdentityError(f"{name} is {text!r}; give text or None")

    @property
    def cacheable(self) -> bool:
        """False when the adapter's content is unknown: such a request is neither stored nor found."""
        return self.lora is None or self.lora.digest is not None

    @property
    def seed(self) -> bytes:
        """Predecessor of the first grain: empty for a plain request, else 32 bytes.

        Salted requests are seeded exactly as SGLang does; an adapter adds a typed part on top. Raises
        IdentityError when the adapter's content is unknown: two unknowns would have one seed.
        """
        if not self.cacheable:
            raise IdentityError("the adapter's content digest is unknown: this request is not cached")
        seed = b""
        if self.extra_key is not None or self.cache_salt is not None:
            seed = hashlib.sha256(_SEED_TAG + _part(self.extra_key) + _part(self.cache_salt)).digest()
        if self.lora is not None:
            return digest_of("ucm-lora-1", [seed, self.lora.name, self.lora.digest])
        return seed


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, clip or other content that stands behind the tokens ``[begin, end)``."""

    digest: bytes
    """32 bytes over the whole content."""
    begin: int
    """First token of the item in the request."""
    end: int
    """One past its last token."""

    def __post_init__(self) -> None:
        """Raise IdentityError for a short digest or an empty range."""
        if not isinstance(self.digest, bytes) or len(self.digest) != DIGEST_BYTES:
            raise IdentityError(f"a media digest has {DIGEST_BYTES} bytes, got {self.digest!r}")
        edges: tuple[object, ...] = (self.begin, self.end)
        if not all(isinstance(edge, Integral) for edge in edges) or not 0 <= self.begin < self.end:
            raise IdentityError(f"a media item covers tokens [begin, end), got [{self.begin}, {self.end})")
        # Of numpy, for example: offsets need whole numbers without an end.
        object.__setattr__(self, "begin", int(self.begin))
        object.__setattr__(self, "end", int(self.end))


class PrefixChain:
    """The running hash of one request over grains of ``grain_tokens`` tokens; appending never rehashes.

    Not thread-safe. It keeps the token ids (4 bytes each, 8 when one is larger), because a truncation may
    fall inside a grain.
    """

    def __init__(
        self, identity: RequestIdentity | None = None, *, grain_tokens: int, media: Iterable[MediaItem] = ()
    ) -> None:
        """Start an empty chain; IdentityError when the request must not be cached at all."""
        self.identity = RequestIdentity() if identity is None else identity
        if not isinstance(self.identity, RequestIdentity):
            raise IdentityError(f"identity is {identity!r}; give a RequestIdentity or None")
        if not is_count(grain_tokens):
            raise SpecError(f"grain_tokens is {shown(grain_tokens)}, must be at least 1")
        self.grain_tokens = grain_tokens
        self.media = tuple(sorted(media, key=lambda item: (item.begin, item.end, item.digest)))
        # Largest end up to each item: it only grows, so that the items of a range are found by bisection.
        self._media_ends = list(accumulate((item.end for item in self.media), max))
        self._ids: npt.NDArray[Any] = np.empty(0, np.dtype("<u4"))
        self._digests = _NO_DIGESTS
        self._keys: dict[bytes, tuple[Digests, int]] = {}  # row seed -> keys, how many of them are made
        self._token_count = 0
        self._seed = self.identity.seed

    @property
    def token_count(self) -> int:
        """Tokens seen so far, those of an unfinished grain included."""
        return self._token_count

    @property
    def hashed_tokens(self) -> int:
        """Tokens of whole grains: how far there are digests and keys."""
        return self._token_count - self._token_count % self.grain_tokens

    @property
    def digests(self) -> Digests:
        """One digest per whole grain, ``uint8[grains, 32]``, read-only; stays valid and unchanged."""
        view = self._digests[: self._token_count // self.grain_tokens]
        view.flags.writeable = False
        return view

    def extend(self, tokens: Tokens) -> None:
        """Append token ids; IdentityError (and no change) when one is negative or not an integer."""
        ids = _as_ids(tokens)
        end = self._token_count + len(ids)
        first, last = self._token_count // self.grain_tokens, end // self.grain_tokens
        self._write_ids(ids)
        self._digests = _with_capacity(self._digests, first, last)
        if last > first:
            self._hash_grains(first, last)
        self._token_count = end  # not before: who is interrupted above must not show what was not hashed

    def truncate(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; SpecError when there are fewer."""
        if not 0 <= tokens <= self._token_count:
            raise SpecError(f"cannot truncate a chain of {self._token_count} tokens to {shown(tokens)}")
        grains = tokens // self.grain_tokens
        if grains < self._token_count // self.grain_tokens:
            # Cut to size, so that growing allocates anew: views that were handed out must never change.
            self._digests = self._digests[:grains]
            self._keys.clear()
        self._token_count = tokens

    def block_digests(self, block_tokens: int) -> Digests:
        """Return the digest at the end of each whole block, ``uint8[blocks, 32]``, read-only."""
        if block_tokens < 1 or block_tokens % self.grain_tokens:
            raise SpecError(
                f"block_tokens {block_tokens} is no multiple of the chain's grain {self.grain_tokens}"
            )
        step = block_tokens // self.grain_tokens
        return self.digests[step - 1 :: step]

    def keys(self, row_seed: bytes) -> Digests:
        """Return a row's object key at the end of each whole grain, ``uint8[grains, 32]``, read-only.

        They are kept, so asking again costs only what was appended since: 32 bytes per grain and row.
        """
        keys, made = self._keys.get(row_seed, (_NO_DIGESTS, 0))
        count = self._token_count // self.grain_tokens
        if made < count:
            keys = _with_capacity(keys, made, count)
            keys[made:count] = object_keys(row_seed, self._digests[made:count])
            self._keys[row_seed] = keys, count
        view = keys[:count]
        view.flags.writeable = False
        return view

    def token_ids(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Return a copy of the token ids in ``[begin, end)``, unsigned; SpecError when there are fewer."""
        if not 0 <= begin <= end <= self._token_count:
            raise SpecError(f"tokens [{begin}, {end}) of a chain of {self._token_count} tokens")
        return self._ids[begin:end].copy()

    def digest_at(self, position: int) -> bytes:
        """Return the digest of everything before ``position``, a whole number of grains above 0."""
        grain, rest = divmod(position, self.grain_tokens)
        if rest or not 0 < grain <= len(self.digests):
            raise SpecError(
                f"position {position} has no digest: it must be a multiple of {self.grain_tokens} in "
                f"(0, {len(self.digests) * self.grain_tokens}]"
            )
        return bytes(self._digests[grain - 1])

    def _write_ids(self, ids: npt.NDArray[Any]) -> None:
        """Write ``ids`` behind the tokens, without counting them."""
        begin, end = self._token_count, self._token_count + len(ids)
        if ids.itemsize > self._ids.itemsize:
            self._ids = self._ids.astype(ids.dtype)
        self._ids = _with_capacity(self._ids, begin, end)
        self._ids[begin:end] = ids

    def _hash_grains(self, first: int, last: int) -> None:
        """Fill the digests of grains ``[first, last)``."""
        frames = self._media_frames(first, last)
        previous = self._digests[first - 1].tobytes() if first else self._seed
        digests: list[bytes] = []
        # The hot loop: a copy of an empty hash is cheaper than a new one, two updates than a joined page.
        fresh, keep = hashlib.sha256().copy, digests.append
        for index, ids in enumerate(self._grain_bytes(first, last), first):
            page = fresh()
            page.update(previous)
            page.update(ids)
            if index in frames:
                page.update(frames[index])
            previous = page.digest()
            keep(previous)
        hashed = np.frombuffer(b"".join(digests), np.uint8)
        self._digests[first:last] = hashed.reshape(-1, DIGEST_BYTES)

    def _grain_bytes(self, first: int, last: int) -> Iterator[memoryview | bytes]:
        """Return the ids of each grain of ``[first, last)`` in SGLang's spelling."""
        body = self._ids[first * self.grain_tokens : last * self.grain_tokens].view(np.uint8).data
        step = self.grain_tokens * self._ids.itemsize
        ends = range(step, len(body) + 1, step)
        grains = map(body.__getitem__, map(slice, range(0, len(body), step), ends))
        return map(_wide_body, grains) if self._ids.itemsize > 4 else grains

    def _media_frames(self, first: int, last: int) -> dict[int, bytes]:
        """Return what items append to each grain of ``[first, last)`` that they overlap."""
        grain = self.grain_tokens
        frames = defaultdict[int, list[bytes]](list)
        for item in self._items_in(first * grain, last * grain):
            for index in range(max(item.begin // grain, first), min(-(-item.end // grain), last)):
                offset = (index * grain - item.begin) % 2**64
                frames[index].append(item.digest + struct.pack("<Q", offset))
        return {
            index: _MEDIA_TAG + struct.pack("<I", len(parts)) + b"".join(parts)
            for index, parts in frames.items()
        }

    def _items_in(self, begin: int, end: int) -> Sequence[MediaItem]:
        """Return the items from the first to the last that overlap tokens ``[begin, end)``, in order."""
        after = bisect_left(self.media, end, key=lambda item: item.begin)
        return self.media[bisect_right(self._media_ends, begin) : after]


def row_seed(namespace_digest: bytes, row_name: str) -> bytes:
    """Return the 32-byte seed that keeps equal tokens of different rows and namespaces apart."""
    return digest_of("ucm-row-seed-1", [namespace_digest, row_name])


def object_keys(seed: bytes, digests: Digests) -> Digests:
    """Return ``seed XOR digest`` for each row of ``uint8[n, 32]``; the first `NAME_BYTES` name the object."""
    if len(seed) != DIGEST_BYTES or digests.ndim != 2 or digests.shape[1] != DIGEST_BYTES:
        raise SpecError(f"object keys need a {DIGEST_BYTES}-byte seed and digests [n, {DIGEST_BYTES}]")
    words = np.ascontiguousarray(digests).view(np.uint64)
    keys, seeds = np.empty_like(words), _repeated(seed)
    for begin in range(0, len(words), len(seeds)):  # piecewise: a row of four words at a time is slow
        piece = words[begin : begin + len(seeds)]
        np.bitwise_xor(piece, seeds[: len(piece)], out=keys[begin : begin + len(seeds)])
    return keys.view(np.uint8)


@lru_cache(maxsize=128)
def _repeated(seed: bytes) -> npt.NDArray[np.uint64]:
    """Return ``uint64[256, 4]``: the seed's words in every row; one per row of a namespace, 8 KiB each."""
    return np.tile(np.frombuffer(seed, np.uint64), (256, 1))


def _part(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    try:
        body = text.encode()
    except UnicodeEncodeError as error:
        raise IdentityError(f"{text!r} cannot be written as UTF-8") from error
    return b"\x01" + struct.pack("<Q", len(body)) + body


def _hexadecimal(digest: str) -> bytes:
    try:
        value = bytes.fromhex(digest)
    except (TypeError, ValueError) as error:
        raise IdentityError(f"digest {digest!r} is not hexadecimal") from error
    if len(value) < 16:
        raise IdentityError(f"digest {digest!r} has {len(value)} bytes, at least 16 are needed")
    return value


def _as_ids(tokens: Tokens) -> npt.NDArray[Any]:
    """Return ids as ``<u4`` (``<u8`` when one of them needs it), perhaps the caller's own memory."""
    ids = _as_array(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise IdentityError(f"token ids are one row of integers, got {ids.dtype} {ids.shape}")
    if not len(ids):
        return np.empty(0, np.dtype("<u4"))
    if ids.dtype.kind == "i" and (smallest := int(ids.min())) < 0:
        raise IdentityError(f"token id {smallest} is negative")
    return ids.astype("<u8" if int(ids.max()) > _NARROW_MAX else "<u4", copy=False)


def _as_array(tokens: Tokens) -> npt.NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, bytes | bytearray):  # a sequence of ids below 256, which array() would take as raw
        return np.frombuffer(bytes(tokens), np.uint8)
    try:
        if isinstance(tokens, array):
            return np.frombuffer(tokens, tokens.typecode) if len(tokens) else np.empty(0, np.uint32)
        convert = getattr(tokens, "numpy", None)
        return _from_sequence(tokens) if convert is None else np.asarray(convert())
    except (TypeError, ValueError, OverflowError) as error:
        raise IdentityError(
            f"token ids in a {type(tokens).__name__} are not a row of integers of 64 bits: {error}"
        ) from error


def _from_sequence(tokens: Any) -> npt.NDArray[Any]:
    # array() refuses floats and strings, which numpy would round or parse. "I" is the fast and usual case.
    if isinstance(tokens, AbstractSet | Mapping):
        raise TypeError("it has no order")
    if not len(tokens):
        return np.empty(0, np.uint32)
    for typecode in "Iq":
        with contextlib.suppress(OverflowError):
            return np.frombuffer(array(typecode, tokens), typecode)
    return np.frombuffer(array("Q", tokens), np.uint64)


def following(keys: Keys) -> Keys:
    """For each of ``keys``, which follow each other, the one before it, zeros first: ``uint8[n, 32]``."""
    return np.concatenate([np.zeros((1, 32), dtype=np.uint8), keys])[: len(keys)]


def _with_capacity(items: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    """Return an array of at least ``needed`` items that begins with the first ``used`` of ``items``."""
    if needed <= len(items):
        return items
    grown = np.empty((max(needed, 2 * len(items)), *items.shape[1:]), items.dtype)
    grown[:used] = items[:used]
    return grown


def _wide_body(body: memoryview) -> bytes:
    """Return one grain's bytes in SGLang's spelling, given its ids as u64."""
    ids = np.frombuffer(body, "<u8")
    if int(ids.max()) > _NARROW_MAX:
        return b"\xff" + ids.tobytes()
    return ids.astype("<u4").tobytes()
