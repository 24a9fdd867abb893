"""Stand-ins that let a real SGLang be imported on a machine with no GPU; nothing in them can be called.

``sgl_kernel`` has no CPU build, and the CPU build of ``torchvision`` does not go with every CPU torch. With
their doubles SGLang's host pools can be made: their memory is plain, what moves it to a device is kernels.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, NoReturn

DOUBLED = ("sgl_kernel", "torchvision")


class NameDouble:
    """Any name of a doubled module; it has any attribute and cannot be called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> NameDouble:
        if name.startswith("__"):
            raise AttributeError(name)
        return NameDouble(f"{self.name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.name} is a double")


class ModuleDouble(ModuleType):
    """A module, and a package of such modules, that has any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NameDouble(f"{self.__name__}.{name}")


class DoubleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are doubled; asked after all others."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in DOUBLED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleDouble(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]


def install() -> None:
    """Make the doubled modules importable, where they are not."""
    if not any(isinstance(finder, DoubleFinder) for finder in sys.meta_path):
        sys.meta_path.append(DoubleFinder())
