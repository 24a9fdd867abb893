"""Conditions under which the cache must change no token.

A mode is how an engine is started, a condition what its requests go through. Requests come in waves: before
each wave the engine's own prefix cache is emptied, so that what was served before comes from UCM. Everything
is drawn from seeds: a wave is the same in every run, whatever the mode.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e import objects
from e2e.harness import Driven, Engine, Order, Outcome, Prompt
from e2e.models import MODELS, tokens

ANSWER_TOKENS = 12
ALPHABET = tuple(range(10, 16))
"""Answers consist of these tokens alone, so that they repeat themselves and drafts are sometimes right."""
WAVE = 6
"""Requests of a wave; the engine serves at most four at a time."""
DTYPES = {"gdn": "bfloat16"}
"""Of others float32: two ways to compute the same then differ far less than answers do. vLLM's kernels for
GDN on a CPU know only this one."""
UNSTEADY = ("gdn",)
"""In bfloat16 the engine's answers depend on how it cuts prompts into chunks and on preemption, without any
cache as well: no oracle. Such a model is served without either."""
RINGS = {"dense": "544KiB", "window": "640KiB", "mla": "2MiB", "mamba": "1MiB", "gdn": "4MiB"}
"""Room for a few objects of each row: much of what is loaded comes from files."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How an engine is started, beyond what all have in common."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of UCM."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of `vllm.LLM`."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """Blocks of the engine's pool by family, where it is tiny."""

    def settings_for(self, family: str) -> dict[str, Any]:
        """The settings of UCM for a family."""
        return {"ring_bytes": RINGS[family], **self.settings}

    def arguments_for(self, family: str) -> dict[str, Any]:
        """The arguments of `vllm.LLM` for a family."""
        model, pool = MODELS[family], self.pools.get(family)
        # What a family needs (mamba: chunks of 128 tokens) is kept.
        given = {
            **({} if family in UNSTEADY else self.arguments),
            **model.arguments,
            "dtype": DTYPES.get(family, "float32"),
            "max_model_len": 3 * block_of(family),
        }
        return given if pool is None else given | {"num_gpu_blocks_override": pool}


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "layerwise",
            arguments={"max_num_batched_tokens": 128},
            pools={"dense": 6, "window": 11, "mla": 41, "mamba": 16},
        ),
        Mode("whole", settings={"layerwise": False}),
        Mode("asynchronous", settings={"load_asynchronously": True}),
        Mode("drafts", arguments={"speculative_config": NGRAM, "enable_prefix_caching": False}),
    )
}
"""UCM's default, with prefills in chunks and a pool for about two requests, which forces preemption; whole
requests before the first layer and after the last; loads beside other requests; ngram drafts, by an engine
without a prefix cache of its own."""

SEVERAL_GROUPS = "loads of several groups of layers are always asynchronous and whole: nothing else to run"
NGRAM_STATES = "speculative decoding with states needs Triton in vLLM, and UCM refuses it"
UNSUPPORTED: Mapping[tuple[str, str], str] = {
    **{("asynchronous", family): SEVERAL_GROUPS for family in ("window", "mamba", "gdn")},
    **{("drafts", family): NGRAM_STATES for family in ("mamba", "gdn")},
}
"""(mode, family) -> why it is not run. In all modes vLLM on a CPU switches chunks and its own prefix cache
off for MLA, and runs Mamba2 in chunks alone."""

CASES = [(mode, family) for mode in MODES for family in MODELS if (mode, family) not in UNSUPPORTED]

CONDITIONS = ("mixed", "aborted", "damaged")
"""Requests come while others run; about half are aborted at some step besides; about half of all files are
damaged before each wave instead, so that what was promised does not load."""


@dataclass(frozen=True, slots=True)
class Played:
    """A condition that one engine went through."""

    pairs: tuple[tuple[Order, Outcome], ...]
    """All orders and what became of them."""
    waves: tuple[Driven, ...]
    held: Mapping[str, int]
    """What was still held in the end, by what it is."""
    counts: Mapping[str, float]
    """What the engine's counters of these names said in the end, since it started."""


FAILED = "ucm_objects_failed_total"
COUNTERS = (FAILED, "ucm_errors_total", "vllm:spec_decode_num_accepted_tokens")
ROUNDS = 10
"""How often the waves with damage may come until a load has met some."""


def block_of(family: str) -> int:
    """Tokens of an engine block, at least 128: prompts have up to two and a half."""
    return max(128, MODELS[family].engine_block_tokens)


def prompts_for(family: str, count: int) -> tuple[Prompt, ...]:
    """`count` prompts, each longer than an engine's block, which is what may be loaded of it.

    Three of a kind begin alike, two of a kind end just before an engine's block does.
    """
    block, draw = block_of(family), random.Random(family)
    edges = (2 * block - draw.randrange(1, ANSWER_TOKENS) for _ in range(count))
    others = (draw.randrange(block * 5 // 4, block * 5 // 2) for _ in range(count))
    lengths = [
        edge if number % 3 else other for number, (edge, other) in enumerate(zip(edges, others, strict=True))
    ]
    return tuple(
        Prompt(tokens(length, seed=100 + number // 3), alphabet=ALPHABET)
        for number, length in enumerate(lengths)
    )


def waves_of(prompts: tuple[Prompt, ...], condition: str, *, requests: int) -> list[tuple[Order, ...]]:
    """The waves of a condition: prompts in a drawn order, at drawn steps."""
    draw = random.Random(condition)
    orders = [draw.choice(prompts) for _ in range(requests)]
    waves = (orders[begin : begin + WAVE] for begin in range(0, requests, WAVE))
    return [tuple(_timed(wave, draw, aborts=condition == "aborted")) for wave in waves]


def _timed(prompts: list[Prompt], draw: random.Random, *, aborts: bool) -> Iterator[Order]:
    step = 0
    for prompt in prompts:
        abort = draw.randrange(ANSWER_TOKENS) if aborts and draw.random() < 0.6 else None
        yield Order(prompt, arrive=step, abort=abort)
        step += draw.randrange(4)


def damage(root: Path, draw: random.Random) -> None:
    """Hurt about half of all objects under `root`: a byte flips, the file or its payload is not whole."""
    for path in objects.objects(root):
        data = bytearray(path.read_bytes())
        if draw.random() < 0.5 or not data:  # an earlier wave may have left nothing of it
            continue
        match draw.randrange(3):
            case 0:
                data[draw.randrange(len(data))] ^= 0x10
            case 1:
                del data[draw.randrange(len(data)) :]
            case _:
                data[objects.HEADER_BYTES :] = data[: objects.HEADER_BYTES - 1 : -1]
        path.write_bytes(data)


def play(engine: Engine, waves: list[tuple[Order, ...]], *, damaged_root: Path | None = None) -> Played:
    """Serve all waves; under `damaged_root` files are damaged before each.

    What the ring holds is not read: while nobody met any damage, all come again, up to `ROUNDS` times.
    """
    draw, driven, rounds = random.Random("damage"), [], 0
    while rounds == 0 or (damaged_root is not None and rounds < ROUNDS and not engine.counter(FAILED)):
        for wave in waves:
            engine.forget()
            if damaged_root is not None:
                damage(damaged_root, draw)
            driven.append(engine.drive(wave, max_tokens=ANSWER_TOKENS, look=True))
        rounds += 1
    outcomes = [outcome for one in driven for outcome in one.outcomes]
    pairs = zip([order for wave in waves * rounds for order in wave], outcomes, strict=True)
    counts = {name: engine.counter(name) for name in COUNTERS}
    return Played(tuple(pairs), tuple(driven), engine.books(), counts)
