"""What stands around SGLang's steps and behind its layers, without SGLang."""

import builtins
from types import SimpleNamespace

import pytest
from counted import errors

from ucm_core.errors import ConfigError
from ucm_sglang import step_hooks


class SavesDouble:
    """Stands for `LayerSaves`: what it is told, in order; raises at what it is asked to."""

    def __init__(self, raises=()):
        self.told, self._raises = [], raises

    def _tell(self, what, *about):
        self.told.append((what, *about))
        if what in self._raises:
            raise RuntimeError("the disk is gone")

    def begin(self, batch):
        self._tell("begin", batch)

    def layer_is_over(self, layer, forward):
        self._tell("layer", layer, forward)

    def end(self):
        self._tell("end")

    def failed(self):
        self._tell("failed")


def layer_of(number, *, kind="decoder", crosses=False):
    kind = SimpleNamespace(value=kind)
    return SimpleNamespace(layer_id=number, attn_type=kind, is_cross_attention=crosses)


@pytest.fixture
def saves(monkeypatch):
    saves = SavesDouble()
    monkeypatch.setattr(step_hooks, "_listeners", [saves])
    return saves


def step(saves, run=lambda *_args, **_more: "result"):
    return step_hooks.around_step(run, "scheduler", "batch", None)


def test_a_step_is_told_from_begin_to_end(saves):
    def run(scheduler, batch, proxies):
        saves.told.append((scheduler, batch, proxies))
        return "result"

    assert step(saves, run) == "result"
    assert saves.told == [("begin", "batch"), ("scheduler", "batch", None), ("end",)]


def test_a_step_that_raises_is_told_as_failed_and_raises(saves):
    with pytest.raises(ZeroDivisionError):
        step(saves, lambda *_: 1 / 0)
    assert saves.told == [("begin", "batch"), ("failed",), ("end",)]


@pytest.mark.parametrize("where", ["begin", "end"])
def test_what_raises_here_is_counted_and_the_step_goes_on(monkeypatch, where):
    saves, before = SavesDouble(raises=[where]), errors("layer_saves")
    monkeypatch.setattr(step_hooks, "_listeners", [saves])
    assert step(saves) == "result"
    assert ("failed",) in saves.told
    assert errors("layer_saves") == before + 1


def test_a_layer_is_told_with_the_forward_however_that_is_given(saves):
    assert step_hooks.after_attention("output", layer_of(3), "q", "k", "v", "forward", True) is None
    step_hooks.after_attention("output", layer_of(4), q="q", k="k", v="v", forward_batch="forward")
    assert saves.told == [("layer", 3, "forward"), ("layer", 4, "forward")]


def test_layers_that_look_ahead_or_elsewhere_are_not_told(saves):
    for layer in (layer_of(0, kind="encoder_only"), layer_of(1, crosses=True)):
        step_hooks.after_attention("output", layer, "q", "k", "v", "forward")
    assert saves.told == []


def test_a_layer_that_is_none_is_counted_and_goes_on(saves):
    before = errors("layer_saves")
    step_hooks.after_attention("output", "no layer", "q", "k", "v", "forward")
    assert (saves.told, errors("layer_saves")) == ([("failed",)], before + 1)


def test_nobody_is_told_where_nobody_listens(monkeypatch):
    monkeypatch.setattr(step_hooks, "_listeners", [])
    assert step(None) == "result"
    step_hooks.after_attention("output", "no layer")


def test_an_sglang_without_hooks_is_refused(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("sglang"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="layerwise_save needs SGLang's plugin hooks"):
        step_hooks.listen(SavesDouble())
    assert step_hooks._listeners == []
