"""The native core: checksums, strided copies and objects at rest (C++ sources in `native/`).

Every call that copies or does I/O releases the GIL.  Arrays are taken as they are, never converted: a
wrong dtype or a non-contiguous array is a TypeError, a wrong shape or value a ValueError.
Addresses are plain integers; the memory behind them must stay valid for the duration of the call.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def crc32c(buffer: Buffer, seed: int = 0, *, hardware: bool = True) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer; `seed` is the CRC of the bytes before it.

    `hardware` allows the processor's own instruction where it has one; the result is the same without.
    """

def gather(
    parts: NDArray[np.int64],
    pieces: NDArray[np.int64],
    payloads: NDArray[np.int64],
    *,
    payload_bytes: int = 0,
) -> None:
    """Copy engine memory into canonical payloads, for every piece and every part.

    `parts` is [P, 9]: base address, page stride, token stride, head stride, dim stride (bytes), heads,
    dim, item bytes, offset of the part in the payload.  `pieces` is [N, 5]: payload index, token in the
    block, page, token in the page, number of tokens.  `payloads` is [M] addresses.  Where `payload_bytes`
    is given, a copy that would pass the end of a payload is a ValueError before any byte moves.
    """

def scatter(
    parts: NDArray[np.int64],
    pieces: NDArray[np.int64],
    payloads: NDArray[np.int64],
    *,
    payload_bytes: int = 0,
) -> None:
    """Copy canonical payloads into engine memory: the inverse of `gather`, same arguments."""

def zero_padding(payloads: NDArray[np.int64], shards: int, shard_bytes: int, stride: int) -> None:
    """Zero the bytes [shard_bytes, stride) of each of the `shards` shards of each payload."""

class ObjectFiles:
    """The objects of one row and segment below `directory`, "<3 hex>/<32 hex>.<segment>" by key. Thread-safe.

    `row_digest` is 32 bytes; `geometry` is (digest of 32 bytes, shards, stride). Keys are [n, 32], payloads
    addresses of shards x stride bytes each. `uring` moves the objects of one call through io_uring, many at
    once, where the kernel allows it (`probe_uring`); results are the same. `direct` asks for O_DIRECT and
    falls back to buffered where refused.
    """

    def __init__(
        self,
        directory: bytes,
        segment: bytes,
        row_digest: bytes,
        geometry: tuple[bytes, int, int],
        *,
        uring: bool = False,
    ) -> None: ...
    def read(
        self,
        keys: NDArray[np.uint8],
        payloads: NDArray[np.int64],
        *,
        direct: bool,
        not_before_ns: int = 0,
        shards: tuple[int, int] | None = None,
    ) -> NDArray[np.int32]:
        """Read and verify objects; [n, shards]: 0 OK, 1 MISS, 2 CORRUPT, 3 of another format, or -errno.

        With `shards` only [begin, end) of each; all that is said is said of those.

        Where a shard is CORRUPT the intact ones of its object are MISS; all other codes are those of a whole
        object. A payload has undefined content unless all its codes are OK. What was used last before
        `not_before_ns` (of the system's clock) is a MISS; 0: nothing is.
        """

    def write(
        self,
        keys: NDArray[np.uint8],
        payloads: NDArray[np.int64],
        temporary_names: list[bytes],
        *,
        direct: bool,
        sync: bool = False,
    ) -> NDArray[np.int32]:
        """Publish objects, also over what bears their names; 0 or the negated errno each.

        Each is written to its temporary (a plain file name, in the object's folder), renamed into place when
        every byte is down, and its temporary removed on any failure.  `sync` adds fdatasync and an fsync of
        the folders.
        """

    def stat(self, names: NDArray[np.uint8], *, not_before_ns: int = 0) -> NDArray[np.uint8]:
        """1 where a regular file (not a link) of exactly an object's size bears the name; one call each.

        `names` is [n, 16 or more]: keys, or the part of them that is in names.
        """

    def touch(self, names: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Set access and modification times to now; 1 where that was possible."""

def probe_direct(directory: bytes, temporary_name: bytes = ...) -> bool:
    """Whether an aligned O_DIRECT write and read go through in `directory`; leaves no file behind."""

def probe_uring() -> bool:
    """Whether this thread may use io_uring."""

RING_MAGIC: bytes
RING_VERSION: int
RING_PARTICIPANTS: int
RING_LIFECYCLE_BYTE: int

RING_MOVES: dict[tuple[str, str], str]
"""Who may move a slot from one state to another: OWNER, EXCLUSIVE (who holds the lock) or either.

The table that the C++ obeys; what is not in it is refused there. A slot begins EMPTY.
"""

def ring_bytes(slots: int, payload_bytes: int, shards: int = 1) -> int:
    """Size of the region of a ring.  ValueError unless `payload_bytes` is a positive multiple of 4096.

    All but the last `slots * payload_bytes` bytes must have memory when a `Ring` is made there.
    """

def ring_header(fd: int) -> tuple[int, int, int, bytes, int, int, int] | None:
    """Header version, slots, payload bytes, geometry digest, policy, TTL, shards; None = no ring."""

class Hold:
    def __init__(self, ring: Ring) -> None: ...
    def publish(self, places: NDArray[np.int64]) -> None: ...
    def abort(self, places: NDArray[np.int64], now_s: int) -> None: ...
    def move_to(self, other: Hold, places: NDArray[np.int64]) -> None: ...
    def let_go(self, now_s: int) -> None: ...

class Ring:
    """A participant of a ring: the calls of `ucm_core.store.ring.Ring`, which says what they mean.

    `fd` is a region of `ring_bytes(slots, payload_bytes)` bytes whose lifecycle lock is held; the object
    keeps a descriptor of its own.  With a digest the region is all zeros and gets its header here; with
    None the arguments are those of the header.  Keys are uint8[n, 32]; results are fresh arrays.
    """

    def __init__(
        self,
        fd: int,
        slots: int,
        payload_bytes: int,
        geometry_digest: bytes | None,
        policy: int = 0,
        ttl_s: int = 0,
        shards: int = 1,
    ) -> None: ...
    @property
    def fd(self) -> int:
        """Descriptor of the region, with the open file description that holds our locks; -1 when closed."""

    @property
    def slots(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def shards(self) -> int: ...
    @property
    def participant(self) -> int: ...
    @property
    def ttl_s(self) -> int:
        """Seconds of the region's header; 0 = nothing expires."""

    def lookup(self, keys: NDArray[np.uint8], now_s: int = 0) -> NDArray[np.uint8]:
        """`now_s`, here and below: seconds of the shared clock; 0 = nothing has expired."""

    def claim(
        self,
        keys: NDArray[np.uint8],
        parents: NDArray[np.uint8] | None = None,
        now_s: int = 0,
        whole: bool = False,
        demand: bool = False,
        hold: Hold | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint32]]:
        """Slots, outcomes and versions."""

    def pin(
        self, keys: NDArray[np.uint8], now_s: int = 0, hold: Hold | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint32]]:
        """Slots, outcomes and versions."""

    def scatter(
        self,
        keys: NDArray[np.uint8],
        strides: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
        now_s: int = 0,
    ) -> bool:
        """`strides` are parts and pieces as the functions `gather` and `scatter` take them."""

    def gather(
        self,
        keys: NDArray[np.uint8],
        parents: NDArray[np.uint8] | None,
        now_s: int,
        strides: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
        units: tuple[int, int],
        hold: Hold | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint32]]:
        """Slots, outcomes and versions; what is OWNER was filled and published."""

    def wait(
        self,
        slots: NDArray[np.int32],
        versions: NDArray[np.uint32],
        timeout_s: float,
        shard: int | None = None,
    ) -> NDArray[np.uint8]:
        """Outcomes, of one shard where one is named."""

    def publish(
        self, slots: NDArray[np.int32], versions: NDArray[np.uint32] | None = None
    ) -> NDArray[np.uint8]:
        """1 where done, 0 where refused."""

    def publish_shards(
        self, slots: NDArray[np.int32], versions: NDArray[np.uint32], begin: int, end: int
    ) -> NDArray[np.uint8]:
        """1 where done, 0 where refused."""

    def abort(
        self, slots: NDArray[np.int32], versions: NDArray[np.uint32] | None = None
    ) -> NDArray[np.uint8]:
        """1 where done, 0 where refused."""

    def release(self, slots: NDArray[np.int32], now_s: int = 0) -> NDArray[np.uint8]:
        """1 where done, 0 where no reference was held."""

    def touch(self, keys: NDArray[np.uint8], now_s: int, interval_s: int) -> NDArray[np.uint8]: ...
    def drop(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """1 where dropped."""

    def residents(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The keys one after the other, 32 bytes each, and 1 where anybody holds a reference."""

    def addresses(self, slots: NDArray[np.int32]) -> NDArray[np.int64]: ...
    def take_all(self) -> int:
        """Give every slot memory and map it here: 0 or an errno."""

    def ask_for_huge_pages(self) -> bool:
        """Ask for them for all payloads; False = the kernel knows none."""

    def statistics(self) -> dict[str, int]: ...
    def check_integrity(self) -> str:
        """The first contradiction in words, empty when there is none."""

    def leave(self) -> None:
        """Leave the ring for good, under the lifecycle lock; later calls raise ClosedError."""

    def close_descriptor(self) -> None:
        """Close `fd`: after `leave`, or in a forked child."""
