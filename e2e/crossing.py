"""vLLM and SGLang on one root: what each computes itself, and what it is served of what the other wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e import objects
from e2e.harness import Answer, Engine, Prompt
from e2e.misleading import mislead
from e2e.shared import Shared

ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Own:
    """What an engine makes of all prompts by itself, in batches of several shapes."""

    cold: tuple[Answer, ...]
    """Each alone, all of it computed."""
    warm: tuple[Answer, ...]
    """Each again, after what the engine's own cache has of it."""
    batch: tuple[Answer, ...]
    """All in one batch, all of it computed."""

    @property
    def spread(self) -> float:
        """The largest difference of a logit that the shape of a batch makes."""
        return max(difference for shape in (self.warm, self.batch) for difference in apart(shape, self.cold))


@dataclass(frozen=True, slots=True)
class Updated:
    """After SGLang took weights while it ran, those that it had."""

    before: Answer
    """SGLang, on a prompt that it saved before."""
    fresh: Answer
    """SGLang, on a prompt that it sees for the first time."""
    again: Answer
    """SGLang on that prompt again, from what it saved since."""
    vllm: Answer
    """vLLM on that prompt."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """What either engine computed on one root, and what it was served of what the other wrote."""

    sglang_wrote: tuple[Answer, ...]
    """SGLang, computing the first prompts."""
    vllm_wrote: tuple[Answer, ...]
    """vLLM, computing the other prompt meanwhile."""
    vllm_read: tuple[Answer, ...]
    """vLLM, on the first prompts."""
    sglang_read: tuple[Answer, ...]
    """SGLang, on the other prompt."""
    vllm: Own
    sglang: Own
    misled: dict[str, tuple[Answer, Answer]]
    """Per row what vLLM and SGLang make of the first prompt when that row's layers are in the wrong order."""
    sglang_pages: list[Path]
    """Objects of one prompt, written by SGLang."""
    vllm_pages: list[Path]
    """Objects of the same prompt, written by vLLM under another salt."""
    updated: Updated
    root: Path
    """Left as both left it."""


def cross(vllm: Engine, sglang: Engine, *, shared: Shared, root: Path, checkpoint: Path) -> Crossed:
    """Let both engines write and read on `root`, where both run `checkpoint`."""
    ours, theirs = (
        _stored(one, shared, root=root, salt=salt) for one, salt in ((sglang, "one"), (vllm, "two"))
    )
    written = objects.most(objects.objects(root))
    sglang.begin_generate(shared.first, max_tokens=ANSWER_TOKENS)
    vllm_wrote = _serve(vllm, shared.other)
    sglang_wrote = tuple(sglang.end_generate())
    objects.wait_whole(root, written + shared.pages(vllm_wrote + sglang_wrote), writer=sglang)
    return Crossed(
        sglang_wrote,
        vllm_wrote,
        vllm_read=_serve(vllm, shared.first),
        sglang_read=_serve(sglang, shared.other),
        vllm=_own(vllm, shared, "vllm"),
        sglang=_own(sglang, shared, "sglang"),
        misled=_mislead(vllm, sglang, shared=shared, root=root, checkpoint=checkpoint),
        sglang_pages=ours,
        vllm_pages=theirs,
        updated=_update(sglang, vllm, shared=shared, root=root, checkpoint=checkpoint),
        root=root,
    )


def _serve(engine: Engine, prompts: tuple[Prompt, ...]) -> tuple[Answer, ...]:
    """Serve each prompt with the engine's own caches emptied before it."""
    return tuple(engine.generate_apart(prompts, max_tokens=ANSWER_TOKENS))


def apart(answers: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """How far the log-probability of each step's likeliest token is from that of other answers, pair by pair.

    As long as both have the same tokens before it: what came after is another text. No logit differs less.
    """
    pairs = zip(answers, others, strict=True)
    return [abs(a - b) for one, other in pairs for a, b in zip(*_comparable(one, other), strict=True)]


def _comparable(one: Answer, other: Answer) -> tuple[tuple[float, ...], tuple[float, ...]]:
    alike = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)]
    steps = (*alike, False).index(False) + 1
    return one.logprobs[:steps], other.logprobs[:steps]


def _stored(engine: Engine, shared: Shared, *, root: Path, salt: str) -> list[Path]:
    """What `engine` stores of the first prompt under `salt`, and of nothing else."""
    before = objects.objects(root)
    answers = engine.generate(shared.salted(salt)[:1], max_tokens=1)
    found = objects.wait_whole(root, objects.most(before) + shared.pages(answers), writer=engine)
    return [path for path in found if path not in before]


def _own(engine: Engine, shared: Shared, salt: str) -> Own:
    """What `engine` makes of prompts that nobody else ever asks."""
    pairs = []
    for prompt in shared.salted(salt):
        engine.forget()
        pairs.append(engine.generate([prompt, prompt], max_tokens=ANSWER_TOKENS))
    cold, warm = zip(*pairs, strict=True)
    engine.forget()
    batch = engine.together(shared.salted(f"{salt} together"), max_tokens=ANSWER_TOKENS)
    return Own(cold, warm, tuple(batch))


def _mislead(
    vllm: Engine, sglang: Engine, *, shared: Shared, root: Path, checkpoint: Path
) -> dict[str, tuple[Answer, Answer]]:
    asked = {row: shared.salted(salt)[:1] for row, salt in mislead(root, checkpoint, shared).items()}
    return {row: (_serve(vllm, prompts)[0], _serve(sglang, prompts)[0]) for row, prompts in asked.items()}


def _update(sglang: Engine, vllm: Engine, *, shared: Shared, root: Path, checkpoint: Path) -> Updated:
    prompts, old = shared.salted("updated")[:1], objects.namespaces(root)
    sglang.forget()  # SGLang refuses to empty its caches, and so the update, while it stores something
    sglang.update_weights(checkpoint)
    before, fresh = _serve(sglang, shared.first[:1] + prompts)
    objects.wait_whole(root, shared.pages([before, fresh]), writer=sglang, but=old)
    (again,), (other,) = _serve(sglang, prompts), _serve(vllm, prompts)
    return Updated(before, fresh, again, other)
