"""What both engines, vLLM and SGLang, are asked of which checkpoints, and how each of them cuts a prompt."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from e2e.harness import Answer, Prompt
from e2e.models import tokens


@dataclass(frozen=True, slots=True)
class Shared:
    """A model that both engines run on a CPU, how each of them cuts it, and what is asked of it.

    In float32 the seeds of its prompts are such that no step of their answers is a close call, which a test
    measures.
    """

    family: str
    seeds: tuple[int, int, int]
    block_tokens: int = 32
    """vLLM's block."""
    page_tokens: int = 16
    """SGLang's page, and the grain of both engines."""
    dtype: str = "float32"
    lengths: tuple[int, int, int] = (200, 330, 200)
    """Prompt tokens; SGLang takes 330 in two chunks."""
    onto: str | None = None
    """The pair that has left its root before, of which nothing may be served."""

    @property
    def name(self) -> str:
        """The family, and what is not as for the others."""
        return f"{self.family}-{self.block_tokens}-{self.page_tokens}-{self.dtype}"

    @property
    def first(self) -> tuple[Prompt, ...]:
        """Two prompts, which SGLang computes."""
        return self._prompts[:2]

    @property
    def other(self) -> tuple[Prompt, ...]:
        """A prompt that begins like neither, which vLLM computes."""
        return self._prompts[2:]

    @property
    def _prompts(self) -> tuple[Prompt, ...]:
        pairs = zip(self.lengths, self.seeds, strict=True)
        return tuple(Prompt(tokens(length, seed=seed)) for length, seed in pairs)

    def salted(self, salt: str) -> tuple[Prompt, ...]:
        """All its prompts under a salt."""
        return tuple(replace(prompt, salt=salt) for prompt in self._prompts)

    def served_sglang(self, answer: Answer) -> int:
        """Tokens of a prompt that is stored: whole pages, and never the last token."""
        return (answer.prompt_tokens - 1) // self.page_tokens * self.page_tokens

    def served_vllm(self, answer: Answer) -> int:
        """Tokens of a prompt that is stored: blocks of whole pages, and never the last token."""
        step = math.lcm(self.block_tokens, self.page_tokens)
        return (answer.prompt_tokens - 1) // step * step

    def saved_tokens(self, answer: Answer) -> int:
        """Tokens of a request in whole pages; the last of its answer is never computed."""
        computed = answer.prompt_tokens + len(answer.tokens) - 1
        return computed // self.page_tokens * self.page_tokens

    def pages(self, answers: Iterable[Answer]) -> int:
        """Pages that requests leave behind: objects of each row that keeps the whole prefix."""
        return sum(map(self.saved_tokens, answers)) // self.page_tokens


SEEDS = (6, 5, 1)
DENSE = Shared("dense", SEEDS)
"""What stories of SGLang alone are told with."""
SAME_PAGES = Shared("dense", SEEDS, 64, 64)
SHARED = {
    one.name: one
    for one in (
        DENSE,
        SAME_PAGES,
        Shared("dense", SEEDS, 128, 64, "bfloat16", onto=SAME_PAGES.name),
        # an object per token: only short prompts
        Shared("dense", SEEDS, 32, 1, "bfloat16", lengths=(50, 64, 50)),
        Shared("mla", (6, 3, 2), 16),
        Shared("sliding", (16, 8, 14)),
    )
}
"""Pairs of engines: vLLM's block, SGLang's page and the type of the computation, spread over each other."""
EXACT = [name for name, one in SHARED.items() if one.dtype == "float32"]
"""Where tokens are an oracle."""
ROUNDED = [name for name in SHARED if name not in EXACT]
"""Where a token may be a close call, and logits differ with the shape of a batch."""
