"""Test double of sgl_kernel, SGLang's compiled kernels: there is no build of them for CPUs to install.

It stands for kernels, not for the cache. Every name exists and raises when it is called, but for one
function that the plain path on a CPU needs. No `torch.ops.sgl_kernel` is registered, so SGLang finds no AMX
kernels and computes every layer in plain torch.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0+double"


class Missing:
    """A kernel that is not here; importing it is harmless, calling it is not."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: object, **named: object) -> None:
        raise NotImplementedError(f"the double of sgl_kernel has no {self.__name__}")

    def __getattr__(self, name: str) -> "Missing":
        return Missing(f"{self.__name__}.{_public(name)}")


class Double(ModuleType):
    """A module of sgl_kernel that holds nothing but missing kernels."""

    def __getattr__(self, name: str) -> Missing:
        return Missing(f"{self.__name__}.{_public(name)}")


class Submodules(Loader):
    """Finds and makes every submodule of sgl_kernel."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """What the import system asks: the spec of a submodule, None for any other module."""
        ours = name.startswith(f"{__name__}.")
        return ModuleSpec(name, Submodules(), is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty submodule."""
        return Double(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,
    req_to_token: Any,
    start_offset: Any,
    end_offset: Any,
    out_cache_loc: Any,
    pool_len: int,
) -> None:
    """Write the slots of new tokens into the table of slots: the next `end - start` of them per request."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Missing:
    return Missing(_public(name))


def _public(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name


sys.meta_path.append(Submodules())
