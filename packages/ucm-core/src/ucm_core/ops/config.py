"""The settings of a cache: typed, with defaults that work without a file, unknown keys refused.

Sizes are numbers of bytes or strings such as ``"10GB"`` (10^10) and ``"10GiB"`` (10 x 2^30).
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NoReturn, Self

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from ucm_core.errors import ConfigError, shown

Size = Annotated[ByteSize, Field(gt=0)]
SizeOrNone = Annotated[ByteSize, Field(ge=0)]
"""0 = the tier is not there."""

RingPolicy = Literal["clock", "fifo", "lru", "sieve"]
"""Which block of a ring goes when room is needed: `ucm_core.store.ring`."""

DEFAULT_DISK_BYTES = 100 * 10**9
MAX_GRAIN_TOKENS = 1 << 20
MAX_FILE_BYTES = 1 << 20
"""Of a configuration file; a larger one is refused before it is parsed."""


def default_root() -> Path:
    """``$XDG_CACHE_HOME/ucm``, by default ``~/.cache/ucm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ucm"


class RowRetention(BaseModel):
    """Which states of one row are kept; frozen. What the knobs do: `ucm_core.coordinator.retention`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    request_end: bool = True
    """Keep the states for the same prompt again and for its next turn."""
    second_sight: bool = True
    """Keep the state at a boundary that two prompts share and that could not be served."""
    interval_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Tokens between states kept besides; 0 = none; None = the row's own, or whatever the engine offers."""
    budget_bytes: Size | None = None
    """Bytes of states that one process keeps, the most valuable ones; None = no bound but the cache's."""
    half_life_s: Annotated[float, Field(gt=0, le=10**9)] = 3600.0
    """Time without use after which a state counts half."""


class CacheConfig(BaseModel):
    """Everything a user may set; frozen. Every bad value raises `ConfigError` with the key and the remedy.

    >>> CacheConfig(root="/tmp/cache", disk_bytes="2GiB").disk_bytes
    2147483648
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path = Field(default_factory=default_root)
    """Directory of the cache; made when missing."""
    ring_bytes: SizeOrNone | None = None
    """Shared memory of all rows of a namespace; None = 10 % of RAM, at most half of what is free; 0 = no
    ring: files are read and written directly."""
    ring_policy: RingPolicy = "clock"
    """Which block goes when a ring needs room."""
    ring_prefault: bool = False
    """Take a ring's memory when it is opened, instead of each slot's when it is first used."""
    ring_huge_pages: bool = False
    """Ask the kernel for huge pages under the rings."""
    ttl_s: Annotated[float, Field(gt=0, le=10**9)] | None = None
    """Time after its last use after which a block is absent; its file goes with the next pass of the
    collector, within minutes while anything is written. None = no end."""
    disk_bytes: SizeOrNone | None = None
    """Bound of all files under the root; None = 100 GB, at most half of what the disk could give; 0 = no
    files: what the ring evicts is gone, and all of it with the last process."""
    grain_tokens: Annotated[int, Field(gt=0, le=MAX_GRAIN_TOKENS)] = 64
    """Tokens per step of the prefix chain; part of the namespace."""
    block_tokens: Annotated[int, Field(gt=0)] | None = None
    """Tokens per block of the chain rows, a multiple of the grain; None = the grain. For adapters: a
    `Cache` takes them from its table."""
    io_threads: Annotated[int, Field(gt=0, le=64)] | None = None
    """Threads that read and write files, for all rows together; None = twice the cores, at most 4."""
    write_threads: Annotated[int, Field(gt=0, le=64)] | None = None
    """How many of them may write at a time; None = all but one, which is left for loads."""
    io_engine: Literal["threads", "uring"] = "threads"
    """How an I/O thread moves the files of one piece of work: one after the other, or (where the kernel
    allows io_uring) many at once."""
    prefetch_on_lookup: bool = False
    """Begin to read what a verdict promises and only files hold into the ring, before anybody loads it."""
    sync: bool = False
    """Flush every file to the device before it counts as stored (survives loss of power)."""
    weight_digest: Literal["full", "sampled"] = "full"
    """How weights are identified: by all bytes of all safetensors files, or (quick, less certain, in a
    namespace of its own) by 64 windows of 64 KiB of each. For adapters: a `Cache` is given its identity."""
    save_wait_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """Longest time that one save may wait for room in the ring before it keeps less."""
    load_wait_s: Annotated[float, Field(ge=0, le=600)] = 10.0
    """Longest time that one load waits for another reader of the same object before it reads by itself."""
    trace_dir: Path | None = None
    """Directory for traces of the layer pipeline, recorded while a file ``on`` lies in it; None = never."""
    retention: dict[str, RowRetention] = Field(default_factory=dict)
    """Which states are kept, by name of the row; ``"*"`` stands for all rows that are not named. For
    adapters: a `Cache` keeps what it is given."""

    layerwise: bool = True
    """Load and save layer by layer while the engine computes (a load only where the engine survives that it
    fails half-way). False: load before the first layer, save after the last. For adapters."""
    load_asynchronously: bool = False
    """Load whole requests while the engine computes others, also where it could be done layer by layer. For
    adapters."""

    def __init__(self, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def load(cls, source: CacheConfig | Mapping[str, object] | str | os.PathLike[str] | None = None) -> Self:
        """Settings from a YAML or JSON file, a mapping, or (None) the defaults; an instance as it is."""
        if isinstance(source, cls):
            return source
        if source is None:
            return cls()
        values = source if isinstance(source, Mapping) else _read(Path(os.fspath(source)))  # type: ignore[arg-type]
        return cls(**{str(key): value for key, value in values.items()})

    @field_validator("root", "trace_dir", mode="before")
    @classmethod
    def _directory_is_named(cls, value: object) -> object:
        if not isinstance(value, str | Path):
            return value
        try:
            named = bool(str(value).strip(". ")) and b"\0" not in os.fsencode(value)
            return Path(value).expanduser() if named else _refuse(value)
        except (RuntimeError, UnicodeEncodeError):  # no such user; half a character
            return _refuse(value)

    @model_validator(mode="after")
    def _blocks_are_grains(self) -> Self:
        if self.block_tokens is not None and self.block_tokens % self.grain_tokens:
            raise ValueError(
                f"block_tokens = {self.block_tokens} is not a multiple of grain_tokens = {self.grain_tokens};"
                f" use {-(-self.block_tokens // self.grain_tokens) * self.grain_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _something_keeps(self) -> Self:
        if self.ring_bytes == 0 and self.disk_bytes == 0:
            raise ValueError("ring_bytes = 0 and disk_bytes = 0 would keep nothing; leave one of them out")
        return self

    @model_validator(mode="after")
    def _writers_are_threads(self) -> Self:
        if self.write_threads is not None and self.write_threads > self.thread_count():
            raise ValueError(
                f"write_threads = {self.write_threads} is more than io_threads = {self.thread_count()};"
                f" use at most {self.thread_count()}"
            )
        return self

    def thread_count(self) -> int:
        """The number of I/O threads of one cache."""
        return self.io_threads or min(4, 2 * (os.cpu_count() or 1))

    def disk_limit_bytes(self, used_bytes: int = 0) -> int:
        """The capacity bound; ``used_bytes`` is what the cache holds already, which it could give up."""
        if self.disk_bytes is not None:
            return int(self.disk_bytes)
        return min(DEFAULT_DISK_BYTES, (_free_bytes(self.root) + used_bytes) // 2)


def _refuse(value: object) -> NoReturn:
    raise ValueError(f"{str(value)!r} does not name a directory; give a path such as ~/.cache/ucm")


def _free_bytes(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return 0


def _read(path: Path) -> Mapping[str, object]:
    try:
        values = yaml.safe_load(_text(path))
    except OSError as error:
        raise ConfigError(
            f"configuration file {path}: {error.strerror}; give a readable YAML or JSON file"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also text that is not UTF-8, bad dates
        raise ConfigError(f"configuration file {path} is neither YAML nor JSON: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"configuration file {path} holds a {type(values).__name__}; it must hold a mapping of settings"
        )
    return values


def _text(path: Path) -> str:
    with path.open("rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return data.decode("utf-8")


def _explain(error: ValidationError) -> str:
    return "; ".join(_explain_one(dict(detail)) for detail in error.errors())


def _explain_one(detail: dict[str, object]) -> str:
    location = detail["loc"]
    path = [str(part) for part in location] if isinstance(location, tuple) else []
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        known = list((CacheConfig if len(path) == 1 else RowRetention).model_fields)
        close = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"the settings are {', '.join(known)}"
        return f"unknown setting {key!r}; {hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if str(detail["type"]).startswith("byte_size"):
        message = "give a number of bytes, or text such as '10GB' or '10GiB'"
    return f"setting {key!r} = {shown(detail['input'])}: {message}" if key else message
