"""A Mamba2 hybrid on one root: a real vLLM computes it, SGLang's real pools are given it and keep it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from e2e.harness import Answer, Prompt
from e2e.hicache import engine_arguments, linker, ucm
from e2e.models import GRAIN_TOKENS, MODELS
from e2e.pools import Floats, Pools, Values
from e2e.runs import Runs, serve_apart

FAMILY = "mamba"
MODEL = MODELS[FAMILY]

SEAMS: Mapping[str, Callable[..., dict[str, Any]]] = {"host cache": ucm, "linker": linker}
"""Where UCM stands in SGLang -> its arguments for that."""


@dataclass(frozen=True, slots=True)
class Types:
    """How SGLang keeps the checkpoint; unless it says otherwise, as vLLM does here."""

    conv: str = "float32"
    """Type of convolutions, which SGLang reads from its environment."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `sglang.Engine`."""


OWN = "as vLLM keeps them"
OTHER = "convolutions of another type"
TYPES = {
    OWN: Types(),
    OTHER: Types("bfloat16"),
    "states of another type": Types(changes={"mamba_ssm_dtype": "bfloat16"}),
    "other heads of states": Types(
        changes={"json_model_override_args": '{"mamba_n_heads": 16, "mamba_d_head": 16}'}
    ),
    "computed in another type": Types(changes={"dtype": "bfloat16"}),
}
"""How states are kept; other heads make states of as many bytes."""

ALTERED: Mapping[str, Callable[[Floats], Floats]] = {
    "conv": lambda convolutions: np.flip(convolutions, axis=0),
    "ssm": lambda states: -9 * states,
    "k": lambda keys: np.flip(keys, axis=1),
}
"""What is kept altered, each under a salt of its own: layers reversed, other signs, tokens reversed."""
ROUNDED = "rounded"
"""The salt under which convolutions are kept in another type."""


OWN_SALT = "computed"
"""The salt under which vLLM computes everything by itself."""


@dataclass(frozen=True, slots=True)
class CrossedStates:
    """What SGLang's pools were given of what vLLM kept, and vLLM of what they kept on a root of their own."""

    given: dict[str, tuple[Values, ...]]
    """Place -> what came of each prompt."""
    restorable: dict[str, int]
    """How states are kept -> how many tokens of the first prompt could have been loaded."""
    rounded_restorable: int
    """How many tokens of it, kept with convolutions of another type, those could load who keep them so."""
    own: tuple[Answer, ...]
    """vLLM on each prompt, all of it computed."""
    read: tuple[Answer, ...]
    """vLLM on each prompt, of which one was kept behind a host cache, one by a linker."""
    altered: dict[str, Answer]
    """vLLM on the first prompt, of which something was kept altered."""
    rounded: Answer
    """vLLM on the first prompt, whose convolutions were kept in another type."""


def prompts(runs: Runs) -> tuple[Prompt, ...]:
    """Beginnings of what vLLM saved: all up to its deepest state, and one token, which the state decides."""
    first = runs.prompts(FAMILY).first
    return tuple(Prompt(one.tokens[: MODEL.served_again(len(one.tokens)) + 1]) for one in first)


def cross_states(runs: Runs, pools: Pools) -> CrossedStates:
    """Give the pools what vLLM saved, and vLLM what the pools had then and kept."""
    asked, first = prompts(runs), prompts(runs)[0]
    theirs = Side(runs, pools, runs.root_copy(FAMILY, "given"))
    ours = Side(runs, pools, runs.empty_root("kept"))
    with pools:
        restorable = {how: theirs.restorable(first, types) for how, types in TYPES.items()}
        given = {seam: theirs.load(asked, seam) for seam in SEAMS}
        ours.keep(asked, given["linker"])
        rounded_restorable = ours.restorable(replace(first, salt=ROUNDED), TYPES[OTHER])
    with runs.engine("kept", FAMILY, ours.root) as engine:
        read = serve_apart(engine, asked)
        *wrong, rounded = serve_apart(
            engine, tuple(replace(first, salt=salt) for salt in (*ALTERED, ROUNDED))
        )
        own = serve_apart(engine, tuple(replace(one, salt=OWN_SALT) for one in asked))
    return CrossedStates(
        given,
        restorable,
        rounded_restorable,
        own=own,
        read=read,
        altered=dict(zip(ALTERED, wrong, strict=True)),
        rounded=rounded,
    )


@dataclass(frozen=True, slots=True)
class Side:
    """SGLang's side of a root."""

    runs: Runs
    pools: Pools
    root: Path

    def attach(self, seam: str, types: Types = Types()) -> None:
        """Empty pools and an empty tree, with UCM at one of the places."""
        checkpoint = self.runs.checkpoint(FAMILY)
        behind = SEAMS[seam](self.root) | dict(types.changes)
        arguments = engine_arguments(checkpoint, page_size=GRAIN_TOKENS, **behind)
        self.pools.attach(arguments, conv_dtype=types.conv)

    def restorable(self, prompt: Prompt, types: Types) -> int:
        """Of a prompt, with pools of such types."""
        self.attach("linker", types)
        return self.pools.restorable(prompt)

    def load(self, prompts: tuple[Prompt, ...], seam: str) -> tuple[Values, ...]:
        """What comes of each prompt."""
        self.attach(seam)
        return tuple(self.pools.load(prompt, self._file) for prompt in prompts)

    def keep(self, prompts: tuple[Prompt, ...], values: tuple[Values, ...]) -> None:
        """Keep a prompt at each place; then the first altered, and with other convolutions."""
        for seam, prompt, right in zip(SEAMS, prompts, values, strict=True):
            self.attach(seam)
            self.pools.save(prompt, right, self._file)
        for name, alter in ALTERED.items():
            wrong = values[0] | {name: alter(values[0][name])}
            self.pools.save(replace(prompts[0], salt=name), wrong, self._file)
        self.attach("host cache", TYPES[OTHER])
        self.pools.save(replace(prompts[0], salt=ROUNDED), values[0], self._file)

    @property
    def _file(self) -> Path:
        return self.runs.directory / "pools.safetensors"
