"""What the scheduler half remembers of each request: its chain, its account, how far it is saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ucm_core.coordinator.accounts import TokenAccount
from ucm_core.coordinator.attempts import Attempt
from ucm_core.spec.keys import PrefixChain
from ucm_vllm.request_identity import RequestIdentities

MAX_LOAD_TRIES = 2
"""Asynchronous loads in a row that may fail: vLLM asks again after each, which must not go on for ever."""


class RequestRecord:
    """One request from its arrival to its end; it begins anew whenever vLLM asks for it from token 0."""

    def __init__(self, request: Any, chain: PrefixChain | None, *, use: int = 0) -> None:
        self.request = request
        """``vllm.v1.request.Request``."""
        self.attempt = Attempt(request.request_id, use)
        """Names this use of the request's id in the ledger of leases."""
        self.chain = chain
        """None: not cacheable."""
        self.local_tokens = 0
        """What vLLM held itself when it last began."""
        self.load_tries = 0
        """Asynchronous loads begun since the last one that succeeded."""
        self.loading = False
        """An asynchronous load is under way."""
        self.trusted = True
        """False: something below this request's blocks may be wrong, so nothing of it is saved."""
        self.common_tokens: int | None = None
        """Where an earlier prompt could not be served either; None: not looked for yet."""
        self.saves_failed = 0
        """Times that a worker did not carry out saves of it."""
        self.cursors: dict[str, int] = {}
        """Per row, blocks ``[0, cursor)`` are stored, planned or cannot be saved since it last began."""
        self.account = TokenAccount(0, 0)
        """Where its tokens come from, since it last began."""
        self.admitted = False
        """vLLM has taken it up; until then asking again changes no account."""
        self.retrying = False
        """An asynchronous load failed: when vLLM asks again the account goes on."""
        self.stands_back = False
        """An asynchronous load failed, and vLLM has not been told to serve others first."""
        self.rewritten = False
        """Tokens were taken back, so blocks that were saved may be written again."""
        self._load_pages: Sequence[int] = ()
        self._begin_tokens: int | None = None

    @property
    def may_load(self) -> bool:
        """False when its loads keep failing, and where vLLM would discard the answer."""
        return self.load_tries < MAX_LOAD_TRIES and not self.request.skip_reading_prefix_cache

    def begin_anew(self, local_tokens: int) -> None:
        """VLLM asks from token 0: it holds ``[0, local_tokens)`` and nothing else of this request."""
        self.local_tokens = local_tokens
        self.loading = False
        self.trusted = True
        self.cursors.clear()
        if not self.retrying:
            self.close_account()
        self._begin_tokens = local_tokens
        prompt = self.request.num_tokens
        self.account = replace(self.account, prompt_tokens=prompt, local_tokens=min(local_tokens, prompt))

    def begin_load(self, *, asynchronous: bool) -> None:
        """A load is planned; a synchronous one ends with its step, whatever becomes of it."""
        self.loading = asynchronous
        self.load_tries += asynchronous

    def end_load(self) -> None:
        """The asynchronous load came, or there was none."""
        if self.loading:
            self.load_tries = 0
        self.loading = False

    def admit(self, external_tokens: int, pages: Sequence[int]) -> None:
        """VLLM counts on ``external_tokens``; ``pages`` are the engine blocks of its first group."""
        self.account = self.account.promised(external_tokens)
        self.admitted, self.retrying, self.stands_back, self._load_pages = True, False, False, pages
        if external_tokens:
            self._begin_tokens = self.local_tokens + external_tokens

    def begins_above(self, computed_tokens: int) -> bool:
        """Whether its first step finds more computed than vLLM held and we loaded: others loaded it."""
        begin, self._begin_tokens = self._begin_tokens, None
        return begin is not None and computed_tokens > begin

    def load_failed(self, broken: frozenset[int], *, page_tokens: int) -> None:
        """The load failed: an asynchronous one as a whole, another one from its first broken page on."""
        first = next((index for index, page in enumerate(self._load_pages) if page in broken), 0)
        kept = 0 if self.loading else first * page_tokens - self.local_tokens
        self.account = self.account.delivered(max(0, kept))
        self.retrying = self.stands_back = self.loading

    def stand_back(self) -> bool:
        """Whether vLLM asks for the first time since an asynchronous load failed."""
        stands_back, self.stands_back = self.stands_back, False
        return stands_back

    def close_account(self) -> None:
        """Count what vLLM took up, if it did, and begin a new account."""
        if self.admitted:
            self.account.count()
            self.account, self.admitted = TokenAccount(0, 0), False

    def chain_to(self, tokens: int) -> PrefixChain | None:
        """The chain, grown by all tokens known if it ends before the last whole grain of ``tokens``."""
        chain, known = self.chain, self.request.all_token_ids
        if chain is None:
            return None
        if len(known) < chain.token_count:
            chain.truncate(len(known))
            self.cursors.clear()
            self.rewritten = True
        if tokens // chain.grain_tokens * chain.grain_tokens > chain.token_count:
            chain.extend(known[chain.token_count :])
        return chain


class RequestRecords:
    """The records of all requests that vLLM has not finished."""

    def __init__(self, identities: RequestIdentities, *, grain_tokens: int) -> None:
        self._identities = identities
        self._grain_tokens = grain_tokens
        self._records: dict[str, RequestRecord] = {}
        self._uses = itertools.count(1)
        self._distrusts_local = False

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of a request, None when it is not known (any more)."""
        return self._records.get(request_id)

    def begin(self, request: Any, local_tokens: int) -> RequestRecord:
        """The record of ``request`` when vLLM asks from token 0; repeating the call changes nothing."""
        record = self._records.get(request.request_id)
        if record is None or record.request is not request:
            self.finish(request.request_id)
            record = self._records[request.request_id] = RequestRecord(request, None, use=next(self._uses))
        if record.chain is None:
            record.chain = self._chain(request)
        record.begin_anew(local_tokens)
        record.trusted = not (self._distrusts_local and local_tokens)
        return record

    def distrust(self, *, local: bool) -> None:
        """Save nothing more of what runs now: its bytes stem from weights that are gone.

        ``local``: vLLM's own prefix cache still holds such bytes, so what borrows from it is not saved.
        """
        self._distrusts_local = local
        for record in self._records.values():
            record.trusted = False

    def take_rewritten(self) -> frozenset[str]:
        """Requests whose tokens were taken back since the last call."""
        taken = [record for record in self._records.values() if record.rewritten]
        for record in taken:
            record.rewritten = False
        return frozenset(record.request.request_id for record in taken)

    def finish(self, request_id: str) -> None:
        """Count and forget the request."""
        record = self._records.pop(request_id, None)
        if record is not None:
            record.close_account()

    def _chain(self, request: Any) -> PrefixChain | None:
        keys = self._identities.of(request)
        if keys is None:
            return None
        return PrefixChain(keys.identity, grain_tokens=self._grain_tokens, media=keys.media)
