"""SGLang's plugin of UCM: whoever caches learns that the weights in the engine's memory have changed.

SGLang never tells a storage backend. So hooks stand around everything that changes weights in a scheduler
process, and behind its flush: what was computed before a change must be found by nobody, and what SGLang's
own tree still holds of it (an update need not flush) must not be stored under the new weights.

======================  ===========================================================================
state                   left by
======================  ===========================================================================
current                 an update: to stale; to current again if the tree was flushed with it
stale                   a flush that succeeds, outside of a session of updates: to current
======================  ===========================================================================
"""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ucm_core.ops import border

UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
Callback = Callable[[bool], None]


class WeightUpdates:
    """What happened to the weights of this process, and who wants to know; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[object, Callback] = {}
        self._in_session = False
        self._stale = False
        self._overtaken = False
        self._flushed_at: int | None = None

    @property
    def overtaken(self) -> bool:
        """Whether the weights may be others than the checkpoint's."""
        return self._overtaken

    @property
    def stale(self) -> bool:
        """Whether SGLang's tree may hold what weights before the last change computed."""
        return self._stale

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call ``callback(tree_is_current)`` from now on; returns what ends that, any number of times."""
        ours = object()
        with self._lock:
            self._callbacks[ours] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._callbacks.pop(ours, None)

        return unsubscribe

    def session_begins(self) -> None:
        """From now on weights may change at any moment."""
        with self._lock:
            self._in_session = True
        self.changed(forwards=None)

    def session_ends(self, *, forwards: int | None) -> None:
        """Weights have changed, and stay as they are; ``forwards`` as for `changed`."""
        with self._lock:
            self._in_session = False
        self.changed(forwards=forwards)

    def changed(self, *, forwards: int | None) -> None:
        """Weights may have changed; ``forwards`` steps were computed so far (None: unknown).

        The tree is current if none was since the last flush, and no session of updates is open.
        """
        with self._lock:
            was_stale = self._stale
            self._stale = self._in_session or not self._is_flushed(forwards)
            self._overtaken = True
            tell = not (was_stale and self._stale)  # whoever was told that it is stale does nothing meanwhile
        if tell:
            self._tell()

    def _is_flushed(self, forwards: int | None) -> bool:
        return forwards is not None and forwards == self._flushed_at

    def flushed(self, *, forwards: int | None) -> None:
        """SGLang's tree is empty, after ``forwards`` steps: it is current unless a session is open."""
        with self._lock:
            self._flushed_at = forwards
            tell = self._stale and not self._in_session
            self._stale = self._stale and self._in_session
        if tell:
            self._tell()

    def _tell(self) -> None:
        with self._lock:
            callbacks, current = tuple(self._callbacks.values()), not self._stale
        for callback in callbacks:
            try:
                callback(current)
            except Exception as error:  # noqa: BLE001 (the border: one subscriber must not keep it from others)
                border.failed("weights_changed", error)


updates = WeightUpdates()
"""Of this process: SGLang's scheduler and its backends live in one."""


def plugin() -> None:
    """Entry point of ``sglang.srt.plugins``: registers the hooks, which SGLang applies to its classes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 (the engine)

    for name, hook in CHANGES.items():
        HookRegistry.register(f"{UPDATER}.{name}", hook, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", after_flush, HookType.AFTER)


def around_change(original: Callable[..., Any], updater: Any, *args: Any, **more: Any) -> Any:
    """Run a method that changes weights, then tell, also if it failed: it may have changed some."""
    try:
        return original(updater, *args, **more)
    finally:
        updates.changed(forwards=_forwards(updater.scheduler))


def around_begin(original: Callable[..., Any], updater: Any, *args: Any, **more: Any) -> Any:
    """Tell that a session of updates begins, then let it begin."""
    updates.session_begins()
    return original(updater, *args, **more)


def around_end(original: Callable[..., Any], updater: Any, *args: Any, **more: Any) -> Any:
    """Let a session of updates end, then tell."""
    try:
        return original(updater, *args, **more)
    finally:
        updates.session_ends(forwards=_forwards(updater.scheduler))


def around_resume(original: Callable[..., Any], updater: Any, *requests: Any) -> Any:
    """Memory comes back, which holds the weights unless the request names other parts only."""
    if any("weights" in (request.tags or "weights") for request in requests):
        return around_change(original, updater, *requests)
    return original(updater, *requests)


def after_flush(emptied: bool, scheduler: Any, *_args: Any, **_more: Any) -> None:
    """SGLang's tree was asked to flush; ``emptied`` says whether it did."""
    if emptied:
        updates.flushed(forwards=_forwards(scheduler))


def _forwards(scheduler: Any) -> int | None:
    """How many steps the scheduler has computed; None where it does not say."""
    return getattr(scheduler, "forward_ct", None)


CHANGES: Mapping[str, Callable[..., Any]] = {
    "update_weights_from_disk": around_change,
    "update_weights_from_distributed": around_change,
    "update_weights_from_tensor": around_change,
    "update_weights_from_ipc": around_change,
    "begin_weight_update": around_begin,
    "end_weight_update": around_end,
    "resume_memory_occupation": around_resume,
}
"""Methods of the updater after which weights may be others, and what stands around each."""


def installed() -> bool:
    """Whether this process' SGLang calls every hook."""
    return is_hooked(SCHEDULER, "flush_cache", hook=after_flush) and all(
        is_hooked(UPDATER, name, hook=hook) for name, hook in CHANGES.items()
    )


def is_hooked(owner: str, name: str, *, hook: Callable[..., Any]) -> bool:
    """Whether SGLang's registry has put ``hook`` on a method."""
    return hook in _hooks_of(getattr(pkgutil.resolve_name(owner), name, None))


def _hooks_of(method: Any) -> Iterator[Any]:
    """What SGLang's wrappers of a method hold, the outermost first."""
    while method is not None:
        yield from (cell.cell_contents for cell in method.__closure__ or ())
        method = getattr(method, "__wrapped__", None)


def subscribe(callback: Callback) -> Callable[[], None]:
    """`WeightUpdates.subscribe` of this process."""
    return updates.subscribe(callback)


def overtaken() -> bool:
    """`WeightUpdates.overtaken` of this process."""
    return updates.overtaken


def stale() -> bool:
    """`WeightUpdates.stale` of this process."""
    return updates.stale
