"""The engine's memory as the store sees it: where the bytes of a transfer lie, and what layers are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ucm_core.flow.copy import EngineBlocks
from ucm_core.ops import border, metrics
from ucm_core.spec.layout import EngineLayout
from ucm_core.spec.table import RowKind
from ucm_core.spec.units import UnitMap
from ucm_vllm.layout_from_engine import Backend, aliases, build_layouts
from ucm_vllm.metadata import RowTransfer
from ucm_vllm.spec_from_engine import EngineSpec, layer_number


class EngineMemory:
    """What `register` learnt: layouts, layer names, and the tensors, which it keeps alive."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._layouts: dict[tuple[str, int], EngineLayout] = {}
        self._tensors: Mapping[str, Any] = {}
        self._numbers: dict[str, int] = {}
        self.units = UnitMap(spec.table)
        """Which units to wait for before a layer and to save after it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose hooks vLLM calls: states have none."""
        rows = self._spec.table.snapshot_rows
        states = {name for row in rows for group in self._spec.rows[row.name] for name, _ in group.layers}
        return tuple(sorted({number for name, number in self._numbers.items() if name not in states}))

    @property
    def device(self) -> Any:
        """The ``torch.device`` of what vLLM registered."""
        first = next(iter(self._tensors.values()))
        return (first[0] if isinstance(first, list | tuple) else first).device

    def register(
        self, kv_caches: Mapping[str, Any], *, num_blocks: int, backend_of: Callable[[str], Backend]
    ) -> None:
        """Learn where vLLM keeps each layer; LayoutError, naming the layer, for what cannot be read."""
        rows = self._spec.rows
        self._layouts = build_layouts(
            self._spec.table, rows, kv_caches=kv_caches, num_blocks=num_blocks, backend_of=backend_of
        )
        self._tensors = dict(kv_caches)  # addresses in the layouts stay valid as long as these live
        self._numbers = {name: layer_number(name) for name in kv_caches}
        follows = {
            self._numbers[alias]: self._numbers[owner] for alias, owner in aliases(rows, kv_caches).items()
        }
        self.units = UnitMap(self._spec.table, follows=follows)

    def layer(self, name: str) -> int | None:
        """The number of a layer; None, counted, for a name that vLLM never registered (or an empty one)."""
        number = self._numbers.get(name)
        if number is None:
            metrics.ERRORS.labels(where="layer_name").inc()
            border.complaints.say(
                "layer_name", f"layer {name!r} was never registered: nothing of it is cached"
            )
        return number

    def target(self, transfer: RowTransfer) -> EngineBlocks:
        """Where a load of it goes."""
        return self._blocks(transfer, None)

    def source(self, transfer: RowTransfer) -> EngineBlocks:
        """Where a save of it comes from, which must hold every token."""
        row = self._spec.table.row(transfer.row)
        return self._blocks(transfer, 1 if row.kind is RowKind.SNAPSHOT else row.block_tokens)

    def _blocks(self, transfer: RowTransfer, block_tokens: int | None) -> EngineBlocks:
        layouts = [self._layouts[transfer.row, group] for group, _ in transfer.pieces]
        return EngineBlocks(layouts, [pieces for _, pieces in transfer.pieces], block_tokens=block_tokens)
