"""Saves layer by layer in a real SGLang: its registry, requests, attention layers, device pools, linker.

Doubles: the scheduler's step and its batch, and a backend of attention that only writes keys and values.
"""

import import_doubles
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
import_doubles.install()

from array import array  # noqa: E402
from types import SimpleNamespace  # noqa: E402

from backend_world import GRAIN  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.managers.schedule_batch import Req  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from test_linker import DIM, HEADS, LAYERS, Linked  # noqa: E402

from ucm_core.errors import ConfigError  # noqa: E402
from ucm_sglang import step_hooks  # noqa: E402
from ucm_sglang.layer_saves import Outcome  # noqa: E402
from ucm_sglang.prefills import prefills_of  # noqa: E402
from ucm_sglang.weight_updates import is_hooked  # noqa: E402

PAGES = (3, 9, 4, 6)
TOKENS = [(7 * place) % 250 + 3 for place in range(3 * GRAIN + 5)]


def counted(outcome):
    return REGISTRY.get_sample_value("ucm_layer_saves_total", {"result": outcome.value}) or 0.0


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's classes, whose scheduler's step is a double; as before afterwards."""
    monkeypatch.setattr(Scheduler, "run_batch", lambda _scheduler, batch: batch.forward())
    monkeypatch.setattr(RadixAttention, "forward", RadixAttention.forward)
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1):
        yield
    HookRegistry.reset()


class WritingBackend:
    """Stands for a backend of attention: keys and values go to the pool, nothing is computed."""

    def __init__(self, pool):
        self._pool = pool

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_more):
        self._pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        return q


def request(**more):
    made = Req("r", "", array("q", TOKENS), SamplingParams(max_new_tokens=1), **more)
    made.refresh_fill_ids()
    made.extend_end = len(TOKENS)
    made.kv.req_pool_idx = 1
    return made


class Batch:
    """Stands for a ``ScheduleBatch`` of one request, over a real device pool."""

    def __init__(self, pool, asked, *, layers=range(LAYERS), mode=ForwardMode.EXTEND):
        self.reqs, self.forward_mode, self.spec_algorithm = [asked], mode, SpeculativeAlgorithm.NONE
        slots = (torch.tensor(PAGES)[:, None] * GRAIN + torch.arange(GRAIN)).reshape(-1)
        table = torch.zeros((2, len(slots)), dtype=torch.int32)
        table[1] = slots
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self._pool, self._layers, self._slots = pool, layers, slots[: len(TOKENS)]
        self.landed = lambda: None

    def forward(self):
        """Every layer has keys and values of its own."""
        batch = SimpleNamespace(
            forward_mode=self.forward_mode, out_cache_loc=self._slots, global_num_token_non_padded_cpu=None,
            input_ids=torch.tensor(TOKENS), positions=torch.arange(len(TOKENS)), mha_return_lse=False,
        )  # fmt: skip
        with forward_context(ForwardContext(WritingBackend(self._pool))):
            for layer in self._layers:
                noise = torch.Generator().manual_seed(layer)
                k, v = torch.randn((2, len(TOKENS), HEADS * DIM), generator=noise)
                attention = RadixAttention(HEADS, DIM, 1.0, HEADS, layer)
                assert attention(k, k, v, batch).shape == k.shape
        self.landed()
        return "result"


def run(world, asked=None, **more):
    return Scheduler.run_batch(SimpleNamespace(), Batch(world.kv, asked or request(), **more))


def hashes(**more):
    """By SGLang's own code."""
    key = RadixKey(array("q", TOKENS), **more)
    return get_storage_hash_str(key[: 3 * GRAIN] if more else TOKENS[: 3 * GRAIN], page_size=GRAIN)


@pytest.fixture
def world(tmp_path, sglang):
    world = Linked(tmp_path, layerwise=True)
    yield world
    world.linker.close()


def test_a_step_keeps_what_its_layers_wrote(world):
    before = counted(Outcome.SAVED)
    assert run(world) == "result"
    written = world.bytes(PAGES[:3])
    for buffer in world.buffers:
        buffer.zero_()
    assert world.lookup(hashes()) == [1, 2, 3]
    assert world.load(hashes(), (20, 21, 22))
    assert world.forward()
    assert all(map(torch.equal, world.bytes((20, 21, 22)), written))
    assert counted(Outcome.SAVED) == before + 1


def test_a_salted_request_has_sglangs_own_names(world):
    run(world, request(cache_salt="tenant-a", extra_key="k"))
    assert world.lookup(hashes()) == []
    assert world.lookup(hashes(cache_salt="tenant-a", extra_key="k")) == [1, 2, 3]


def test_real_requests_say_all_that_is_asked(world):
    (plain,) = prefills_of(Batch(world.kv, request()))
    (adapted,) = prefills_of(Batch(world.kv, request(lora_id="a")))
    assert (plain.is_plain, adapted.is_plain) == (True, False)


def test_a_load_that_fails_in_the_step_keeps_nothing(world, monkeypatch):
    assert world.save(["ab" * 32], [30])
    before, batch = counted(Outcome.LOAD), Batch(world.kv, request())
    assert world.lookup(["ab" * 32], "other") == [1]
    assert world.load(["ab" * 32], [31], "other")
    index = world.linker.start_layer_wise_loading()
    monkeypatch.setattr(type(world.linker.layer_done_counter), "finish", lambda *_: 1 / 0)
    batch.landed = lambda: world.linker.finish_layer_wise_loading(index)  # as the scheduler's step does
    Scheduler.run_batch(SimpleNamespace(), batch)
    monkeypatch.undo()
    assert (counted(Outcome.LOAD), world.lookup(hashes())) == (before + 1, [])


@pytest.mark.parametrize(
    ("more", "outcome"),
    [({"layers": range(LAYERS - 1)}, Outcome.LAYERS), ({"mode": ForwardMode.MIXED}, Outcome.MODE)],
)
def test_a_step_that_is_not_whole_keeps_nothing(world, more, outcome):
    before = counted(outcome)
    assert run(world, **more) == "result"
    assert (counted(outcome), world.lookup(hashes())) == (before + 1, [])


def test_weights_that_change_make_what_was_kept_unknown(world):
    run(world)
    world.updates.change(False)
    assert world.lookup(hashes()) == []
    run(world)
    world.updates.change(True)
    assert world.lookup(hashes()) == []
    run(world)
    assert world.lookup(hashes()) == [1, 2, 3]


def test_a_linker_that_ended_is_told_nothing(world):
    world.linker.close()
    before = {outcome: counted(outcome) for outcome in Outcome}
    assert run(world) == "result"
    assert {outcome: counted(outcome) for outcome in Outcome} == before


def test_without_the_setting_nothing_is_hooked(tmp_path, sglang):
    plain = Linked(tmp_path)
    assert not any(is_hooked(owner, name, hook=hook) for owner, name, hook in step_hooks.HOOKS)
    run(plain)
    assert plain.lookup(hashes()) == []
    plain.linker.close()


def test_a_second_linker_hooks_nothing_twice(world, tmp_path):
    step = Scheduler.run_batch
    other = Linked(tmp_path / "other", layerwise=True)
    assert Scheduler.run_batch is step
    run(other)
    assert (other.lookup(hashes()), world.lookup(hashes())) == ([1, 2, 3], [])
    other.linker.close()


@pytest.mark.parametrize(("owner", "name"), [(Scheduler, "run_batch"), (RadixAttention, "forward")])
def test_an_sglang_without_a_hooked_name_is_refused_by_name(tmp_path, sglang, monkeypatch, owner, name):
    monkeypatch.setattr(owner, name, None)
    with pytest.raises(ConfigError, match=f"layerwise_save hooks .*{owner.__name__}.{name}, which"):
        Linked(tmp_path, layerwise=True)
    assert step_hooks._listeners == []


def test_hooks_that_another_plugin_came_before_are_refused(tmp_path, sglang):
    HookRegistry.register(f"{step_hooks.SCHEDULER}.run_batch", lambda *_: None, HookType.AFTER)
    HookRegistry.apply_hooks()
    with pytest.raises(ConfigError, match=r"did not hook .*run_batch"):
        Linked(tmp_path, layerwise=True)
