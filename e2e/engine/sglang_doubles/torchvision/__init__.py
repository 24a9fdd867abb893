"""Test double of torchvision: enough of it for SGLang and transformers to import beside a CPU build of torch.

It stands for the image operations of multimodal models, which no story uses: every attribute that is not
here is a class that cannot be made. The real package would replace the CPU build of torch by a CUDA build.
"""

import sys
from enum import Enum
from types import ModuleType
from typing import Any

__version__ = "0.0.0+double"


class InterpolationMode(Enum):
    """The names of the modes; image processors have them as defaults."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class Double(ModuleType):
    """A module of torchvision that holds nothing but placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(f"{self.__name__}.{name}")


def _placeholder(name: str) -> type:
    def refuse(self: object, *arguments: object, **named: object) -> None:
        raise NotImplementedError(f"the double of torchvision has no {name}")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


def _install(name: str) -> ModuleType:
    module = Double(f"{__name__}.{name}")
    module.__path__ = []
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)
    return sys.modules.setdefault(module.__name__, module)


for _name in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _install(_name)
for _name in ("transforms", "transforms.functional", "transforms.v2.functional"):
    vars(sys.modules[f"{__name__}.{_name}"])["InterpolationMode"] = InterpolationMode
