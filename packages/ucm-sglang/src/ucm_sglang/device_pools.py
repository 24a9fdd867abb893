"""SGLang's device pools, described as its host pools are, so that one code reads and checks both.

The tree keeps indices into them: a token's slot in ``kv``, in ``swa`` one of its own, a state's slot in
``mamba``. Slots of a page stand together and begin at a multiple of the page; the first page is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ucm_core.errors import SpecError
from ucm_sglang.refusals import refuse

__all__ = ["DeviceStates", "DeviceTokens", "device_pools"]

SIDE_STATES = ("mamba_ckpt_pool", "short_conv_pool", "ngram_pool")
"""What a request pool may keep of a state besides its Mamba pool, where it has it."""


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """A device pool of tokens: per layer a buffer ``[slot, head, element]``, of K and of V or of both."""

    kind: str
    """The name of its class."""
    page_size: int
    page_num: int
    layer_num: int
    start_layer: int
    kv_buffer: Any
    """All buffers; of a latent pool one per layer."""
    k_buffer: Any
    v_buffer: Any
    device_pool: Any
    layout: str = "layer_first"

    @classmethod
    def of(cls, pool: Any, page_tokens: int, *, start_layer: int) -> DeviceTokens:
        """Describe a pool whose tree has pages of ``page_tokens``."""
        k, v = getattr(pool, "k_buffer", None), getattr(pool, "v_buffer", ())
        buffers = getattr(pool, "kv_buffer", None) if k is None else [*k, *v]
        return cls(
            kind=type(pool).__name__,
            page_size=page_tokens,
            page_num=int(buffers[0].shape[0]) // page_tokens if buffers else 0,
            layer_num=int(pool.layer_num),
            start_layer=start_layer,
            kv_buffer=buffers,
            k_buffer=k,
            v_buffer=v,
            device_pool=pool,
        )


@dataclass(frozen=True, slots=True)
class DeviceStates:
    """A device pool of states: per part a buffer ``[layer, slot, *shape]``."""

    kind: str
    """The name of its class."""
    page_num: int
    num_mamba_layers: int
    conv_buffer: Any
    temporal_buffer: Any
    slot_state_buffers: Any
    """What else belongs to a state."""
    page_size: int = 1
    layout: str = "layer_first"

    @classmethod
    def of(cls, pool: Any) -> DeviceStates:
        """Describe a pool of states."""
        state = pool.mamba_cache
        return cls(
            kind=type(pool).__name__,
            page_num=int(state.temporal.shape[1]),
            num_mamba_layers=int(pool.num_mamba_layers),
            conv_buffer=list(state.conv),
            temporal_buffer=state.temporal,
            slot_state_buffers=[*pool._slot_siblings, *_replayed(state)],
        )

    @property
    def kv_buffer(self) -> Any:
        """All buffers."""
        return [self.temporal_buffer, *self.conv_buffer]


def device_pools(params: Any, *, states: bool) -> dict[str, Any]:
    """`DeviceTokens` of SGLang's ``CacheInitParams``, by pool name, and `DeviceStates` of its ``states``.

    SpecError for what the pools hold besides the model's table: draft layers, scales, side states.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    _refuse_drafts(params)
    page, first = int(params.page_size), int(getattr(kvcache, "start_layer", 0) or 0)
    inner = {"kv": getattr(kvcache, "full_kv_pool", kvcache), "swa": getattr(kvcache, "swa_kv_pool", None)}
    found: dict[str, Any] = {}
    for name, pool in inner.items():
        if pool is not None:
            _refuse_scales(name, pool)
            found[name] = DeviceTokens.of(pool, page, start_layer=first)
    if states:
        _refuse_side_states(params.req_to_token_pool)
        found["mamba"] = DeviceStates.of(params.req_to_token_pool.mamba_pool)
    return found


def _refuse_drafts(params: Any) -> None:
    for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"):
        drafts = getattr(params, name, ())
        refuse(
            drafts,
            SpecError(
                f"{len(drafts)} pools of a draft model ({name}): their rows need a namespace of their own,"
                " which ucm-sglang does not support yet; start SGLang without speculative decoding"
            ),
        )


def _refuse_scales(name: str, pool: Any) -> None:
    names = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    scales = [each for each in names if getattr(pool, each, None) is not None]
    refuse(
        scales,
        SpecError(f"pool {name!r} has scales beside its elements ({', '.join(scales)}): no row names them"),
    )


def _refuse_side_states(requests: Any) -> None:
    for name in SIDE_STATES:
        pool = getattr(requests, name, None)
        refuse(
            pool is not None and getattr(pool, "enabled", True),
            SpecError(f"pool 'mamba' has side states beside conv and ssm ({name}): not supported yet"),
        )


def _replayed(state: Any) -> list[str]:
    """Parts of a state that SGLang replays inputs from; none unless it is asked to."""
    names = [name for name in dir(state) if name.startswith("replayssm")]
    return [name for name in names if getattr(state, name) is not None]
