"""The native core: checksums, strided copies and objects at rest (C++ sources in `native/`).

Every call that copies or does I/O releases the GIL.  Arrays are taken as they are, never converted: a
wrong dtype or a non-contiguous array is a TypeError, a wrong shape or value a ValueError.
Addresses are plain integers; the memory behind them must stay valid for the duration of the call.
"""

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

def read_objects(
    directory: bytes,
    names: list[bytes],
    keys: NDArray[np.uint8],
    row_digest: bytes,
    geometry: tuple[bytes, int, int],
    payloads: NDArray[np.int64],
    direct: bool,
) -> NDArray[np.int32]:
    """Read and verify objects; one code each: 0 OK, 1 MISS, 2 CORRUPT, or the negated errno.

    `names` are "<folder>/<file>" below `directory`; `keys` is [n, 32]; `row_digest` is 32 bytes;
    `geometry` is (digest of 32 bytes, shards, stride).  A payload has shards x stride bytes and undefined
    content unless its code is OK.  `direct` asks for O_DIRECT and falls back to buffered where refused.
    """

def write_objects(
    directory: bytes,
    names: list[bytes],
    keys: NDArray[np.uint8],
    row_digest: bytes,
    geometry: tuple[bytes, int, int],
    payloads: NDArray[np.int64],
    direct: bool,
    temporary_names: list[bytes],
    sync: bool,
) -> NDArray[np.int32]:
    """Publish objects; 0 or the negated errno each.  Arguments as in `read_objects`.

    Each object is written to its temporary (a plain file name, in the object's folder), renamed into
    place when every byte is down, and its temporary removed on any failure.  `sync` adds fdatasync and
    an fsync of the folders.
    """

def stat_objects(directory: bytes, names: list[bytes], object_bytes: int) -> NDArray[np.uint8]:
    """1 where a regular file (not a link) of exactly `object_bytes` bytes bears the name."""

def touch_objects(directory: bytes, names: list[bytes]) -> NDArray[np.uint8]:
    """Set access and modification times to now; 1 where that was possible."""

def probe_direct(directory: bytes, temporary_name: bytes = ...) -> bool:
    """Whether an aligned O_DIRECT write and read go through in `directory`; leaves no file behind."""

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
    def lookup(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]: ...
    def claim(
        self, keys: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint32]]:
        """Slots, outcomes and versions."""

    def pin(self, keys: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.uint32]]:
        """Slots, outcomes and versions."""

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

    def release(self, slots: NDArray[np.int32]) -> NDArray[np.uint8]:
        """1 where done, 0 where no reference was held."""

    def touch(self, keys: NDArray[np.uint8], now_s: int, interval_s: int) -> NDArray[np.uint8]: ...
    def drop(self, keys: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """1 where dropped."""

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
