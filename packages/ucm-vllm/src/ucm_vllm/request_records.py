"""What the scheduler half remembers of each request: its chain, its attempt, how far it is saved."""

from __future__ import annotations

from typing import Any

from ucm_core.spec.keys import PrefixChain
from ucm_vllm.request_identity import RequestIdentities

MAX_LOAD_ATTEMPTS = 2
"""Asynchronous loads in a row that may fail: vLLM asks again after each, which must not go on for ever."""


class RequestRecord:
    """One request from its arrival to its end; an attempt begins whenever vLLM asks for it from token 0."""

    def __init__(self, request: Any, chain: PrefixChain | None) -> None:
        self.request = request
        """``vllm.v1.request.Request``."""
        self.chain = chain
        """None: not cacheable."""
        self.local_tokens = 0
        """What vLLM held itself when this attempt began."""
        self.load_attempts = 0
        """Asynchronous loads begun since the last one that succeeded."""
        self.loading = False
        """An asynchronous load is under way."""
        self.trusted = True
        """False: something below this request's blocks may be wrong, so nothing of it is saved."""
        self.cursors: dict[str, int] = {}
        """Per row, blocks ``[0, cursor)`` are stored, planned or cannot be saved in this attempt."""

    @property
    def may_load(self) -> bool:
        """False when its loads keep failing, and where vLLM would discard the answer."""
        return self.load_attempts < MAX_LOAD_ATTEMPTS and not self.request.skip_reading_prefix_cache

    def begin_attempt(self, local_tokens: int) -> None:
        """Begin anew: vLLM holds ``[0, local_tokens)`` and nothing else of this request."""
        self.local_tokens = local_tokens
        self.loading = False
        self.trusted = True
        self.cursors.clear()

    def begin_load(self, *, asynchronous: bool) -> None:
        """A load is planned; a synchronous one ends with its step, whatever becomes of it."""
        self.loading = asynchronous
        self.load_attempts += asynchronous

    def end_load(self) -> None:
        """The asynchronous load came, or there was none."""
        if self.loading:
            self.load_attempts = 0
        self.loading = False

    def chain_to(self, tokens: int) -> PrefixChain | None:
        """The chain, grown by all tokens known if it ends before the last whole grain of ``tokens``."""
        chain, known = self.chain, self.request.all_token_ids
        if chain is None:
            return None
        if len(known) < chain.token_count:
            chain.truncate(len(known))
            self.cursors.clear()
        if tokens // chain.grain_tokens * chain.grain_tokens > chain.token_count:
            chain.extend(known[chain.token_count :])
        return chain


class RequestRecords:
    """The records of all requests that vLLM has not finished."""

    def __init__(self, identities: RequestIdentities, *, grain_tokens: int) -> None:
        self._identities = identities
        self._grain_tokens = grain_tokens
        self._records: dict[str, RequestRecord] = {}
        self._distrusts_local = False

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of a request, None when it is not known (any more)."""
        return self._records.get(request_id)

    def attempt(self, request: Any, local_tokens: int) -> RequestRecord:
        """The record of ``request`` at the beginning of an attempt; repeating the call changes nothing."""
        record = self._records.get(request.request_id)
        if record is None or record.request is not request:
            record = self._records[request.request_id] = RequestRecord(request, None)
        if record.chain is None:
            record.chain = self._chain(request)
        record.begin_attempt(local_tokens)
        record.trusted = not (self._distrusts_local and local_tokens)
        return record

    def distrust(self, *, local: bool) -> None:
        """Save nothing more of what runs now: its bytes stem from weights that are gone.

        ``local``: vLLM's own prefix cache still holds such bytes, so what borrows from it is not saved.
        """
        self._distrusts_local = local
        for record in self._records.values():
            record.trusted = False

    def finish(self, request_id: str) -> None:
        """Forget the request."""
        self._records.pop(request_id, None)

    def _chain(self, request: Any) -> PrefixChain | None:
        keys = self._identities.of(request)
        if keys is None:
            return None
        return PrefixChain(keys.identity, grain_tokens=self._grain_tokens, media=keys.media)
