"""The handle by which one process describes its device memory to another: 192 bytes, versioned, little-endian.

:data:`LAYOUT` defines the format. A handle comes from another process, which is untrusted. So :meth:`ShareHandle.parse`
checks every byte, and refuses a truncated, changed or invented handle with ``UsageError(MALFORMED)`` before a driver
gets any field.

The checksum is the first 16 bytes of SHA-256 instead of a CRC, for three reasons. The standard library has SHA-256 and
has no CRC32C. One in 2**128 damaged handles passes instead of one in 2**32. For 192 bytes the time does not matter. The
checksum detects damage, but it is not a signature: a process that can connect to the socket can also make a handle, and
gets the access that the driver grants to its user.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import uuid
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Self

from gdrkit.errors import Reason, UsageError
from gdrkit.host import ProcessIdentity
from gdrkit.units import HOST_PAGE_BYTES

__all__ = ["DESCRIPTORS_MAX", "LAYOUT", "SHARE_HANDLE_BYTES", "Field", "ShareHandle", "ShareKind"]

# SCM_MAX_FD: the largest number of descriptors in one message of a UNIX socket.
DESCRIPTORS_MAX = 253

_MAGIC = b"GDRSHARE"
_VERSION = 1
_DIGEST_BYTES = 16
_IPC_BYTES = 64
_UUID_BYTES = 16
_EMPTY_IPC_HANDLE = bytes(_IPC_BYTES)
# The driver's sizes have 64 bits, and no memory is larger than half of the address space.
_SIZE_MAX = (1 << 63) - 1
_ADDRESS_END = 1 << 64


class ShareKind(enum.IntEnum):
    """The method by which memory is shared with another process."""

    IPC = 1  # cuIpcGetMemHandle
    VMM = 2  # cuMemExportToShareableHandle, one descriptor per chunk
    DMABUF = 3  # cuMemGetHandleForAddressRange, one descriptor


class Field(NamedTuple):
    """One field of the format, at ``offset_bytes`` in the handle. ``code`` is its format string in :mod:`struct`.

    docs/sharing.md shows ``meaning`` in its table of the fields.
    """

    offset_bytes: int
    code: str
    name: str
    meaning: str


LAYOUT: tuple[Field, ...] = (
    Field(0, "8s", "magic", "`GDRSHARE`"),
    Field(8, "H", "version", "1"),
    Field(10, "H", "kind", "1 IPC, 2 VMM, 3 dma-buf"),
    Field(12, "I", "handle_bytes", "192"),
    Field(16, "Q", "allocation_bytes", "size of the allocation (IPC), of all chunks together (VMM) or of the dma-buf"),
    Field(24, "Q", "offset_bytes", "offset of the shared bytes in the allocation"),
    Field(32, "Q", "length_bytes", "number of the shared bytes, above 0; `offset + length <= allocation`"),
    Field(40, "Q", "address", "dma-buf: the owner's device address of the first shared byte (iova); else 0"),
    Field(48, "Q", "chunk_bytes", "VMM: size of a chunk, a multiple of 4096; else 0"),
    Field(56, "I", "descriptor_count", "number of chunks, 1 to 253 (VMM), 1 (dma-buf) or 0 (IPC)"),
    Field(60, "I", "reserved", "0"),
    Field(64, "16s", "device_uuid", "UUID of the device (cuDeviceGetUuid), not zero"),
    Field(80, "16s", "owner_boot_id", "boot id of the kernel that the owner runs on; zero: unknown"),
    Field(96, "I", "owner_process_id", "process id of the owner in its PID namespace, above 0"),
    Field(100, "I", "owner_namespace", "inode of that PID namespace; 0: unknown"),
    Field(104, "Q", "owner_started_ticks", "start time of the owner in clock ticks since the boot"),
    Field(112, "64s", "ipc", "IPC: the CUipcMemHandle of the allocation's base, not zero; else 0"),
    Field(176, "16s", "digest", "the first 16 bytes of the SHA-256 of bytes 0 to 175"),
)

_HANDLE_STRUCT = struct.Struct("<" + "".join(field.code for field in LAYOUT))
SHARE_HANDLE_BYTES = _HANDLE_STRUCT.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHandle:
    """A handle of shared memory. :data:`LAYOUT` describes its fields, with their units and limits.

    Raises
    ------
    UsageError
        MALFORMED: a field is out of its limits, or the fields contradict each other.
    """

    kind: ShareKind
    allocation_bytes: int
    offset_bytes: int
    length_bytes: int
    device_uuid: bytes
    owner: ProcessIdentity
    address: int = 0
    chunk_bytes: int = 0
    descriptor_count: int = 0
    ipc: bytes = _EMPTY_IPC_HANDLE

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_kind()
        if len(self.device_uuid) != _UUID_BYTES or not any(self.device_uuid):
            _refuse("it has no device UUID")
        if not 0 < self.owner.process_id < 1 << 32:
            _refuse(f"its owner's process id {self.owner.process_id} is out of range")

    @property
    def device(self) -> str:
        """The UUID of the device as nvidia-smi prints it, ``GPU-...``."""
        return f"GPU-{uuid.UUID(bytes=self.device_uuid)}"

    def pack(self) -> bytes:
        """Return the handle as :data:`SHARE_HANDLE_BYTES` bytes."""
        body = _HANDLE_STRUCT.pack(
            _MAGIC,
            _VERSION,
            self.kind,
            SHARE_HANDLE_BYTES,
            self.allocation_bytes,
            self.offset_bytes,
            self.length_bytes,
            self.address,
            self.chunk_bytes,
            self.descriptor_count,
            0,
            self.device_uuid,
            self.owner.boot_id,
            self.owner.process_id,
            self.owner.pid_namespace,
            self.owner.started_ticks,
            self.ipc,
            bytes(_DIGEST_BYTES),
        )[:-_DIGEST_BYTES]
        return body + _compute_digest(body)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the handle that `data` contains.

        Raises
        ------
        UsageError
            MALFORMED: `data` is too short, too long, damaged or of another version, or its fields contradict each
            other.
        """
        if len(data) != SHARE_HANDLE_BYTES:
            _refuse(f"it has {len(data)} bytes, not {SHARE_HANDLE_BYTES}")
        fields = dict(zip((field.name for field in LAYOUT), _HANDLE_STRUCT.unpack(data), strict=True))
        if fields["magic"] != _MAGIC:
            _refuse("it does not begin with GDRSHARE")
        if fields["version"] != _VERSION:
            _refuse(f"it has version {fields['version']}, not {_VERSION}", "use the same gdrkit on both sides")
        if fields["digest"] != _compute_digest(data[:-_DIGEST_BYTES]):
            _refuse("its checksum is wrong")
        if fields["handle_bytes"] != SHARE_HANDLE_BYTES or fields["reserved"] != 0:
            _refuse("its handle_bytes or reserved field is wrong")
        if fields["kind"] not in frozenset(ShareKind):
            _refuse(f"its kind must be 1, 2 or 3, not {fields['kind']}")
        return cls(
            kind=ShareKind(fields["kind"]),
            owner=ProcessIdentity(
                boot_id=fields["owner_boot_id"],
                process_id=fields["owner_process_id"],
                pid_namespace=fields["owner_namespace"],
                started_ticks=fields["owner_started_ticks"],
            ),
            **{name: fields[name] for name in _UNCHANGED_FIELDS},
        )

    def _check_sizes(self) -> None:
        # Integers of Python do not overflow, so sums need no check. The limits come from the driver's 64-bit sizes.
        if not 0 < self.allocation_bytes <= _SIZE_MAX:
            _refuse(f"its allocation_bytes {self.allocation_bytes} is out of range")
        if self.length_bytes <= 0 or self.offset_bytes < 0:
            _refuse(f"its length_bytes {self.length_bytes} or its offset_bytes {self.offset_bytes} is out of range")
        if self.offset_bytes + self.length_bytes > self.allocation_bytes:
            _refuse(
                f"{self.length_bytes} bytes at offset {self.offset_bytes} are not inside {self.allocation_bytes} bytes"
            )

    def _check_kind(self) -> None:
        if len(self.ipc) != _IPC_BYTES or any(self.ipc) != (self.kind is ShareKind.IPC):
            _refuse("a handle of the kind IPC must have an IPC handle, and no other kind may have one")
        if self.kind is ShareKind.VMM:
            self._check_chunks()
        elif self.chunk_bytes or self.descriptor_count != (self.kind is ShareKind.DMABUF):
            _refuse(
                f"its kind {self.kind.name} does not allow {self.descriptor_count} descriptors "
                f"and chunks of {self.chunk_bytes} bytes"
            )
        if self.kind is ShareKind.DMABUF:
            end_address = self.address + self.length_bytes
            # ibv_reg_dmabuf_mr requires that the iova and the offset in the dma-buf have the same offset in a page.
            if self.address <= 0 or end_address > _ADDRESS_END or (self.address - self.offset_bytes) % HOST_PAGE_BYTES:
                _refuse(f"its address {self.address:#x} does not fit its offset {self.offset_bytes} in the dma-buf")
        elif self.address:
            _refuse("only a handle of a dma-buf may have an address")

    def _check_chunks(self) -> None:
        chunk_bytes, chunk_count = self.chunk_bytes, self.descriptor_count  # One descriptor for each chunk.
        if chunk_bytes <= 0 or chunk_bytes % HOST_PAGE_BYTES or not 1 <= chunk_count <= DESCRIPTORS_MAX:
            _refuse(
                f"it has {chunk_count} chunks of {chunk_bytes} bytes", f"share at most {DESCRIPTORS_MAX} chunks at once"
            )
        if self.allocation_bytes != chunk_bytes * chunk_count:
            _refuse(f"{chunk_count} chunks of {chunk_bytes} bytes do not have {self.allocation_bytes} bytes together")
        if self.offset_bytes >= chunk_bytes or self.offset_bytes + self.length_bytes <= chunk_bytes * (chunk_count - 1):
            _refuse("its first or last chunk has none of the shared bytes")


# The fields that ShareHandle takes from the packed handle without a conversion.
_UNCHANGED_FIELDS = (
    "allocation_bytes",
    "offset_bytes",
    "length_bytes",
    "address",
    "chunk_bytes",
    "descriptor_count",
    "device_uuid",
    "ipc",
)


def _compute_digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_DIGEST_BYTES]


def _refuse(problem: str, what_to_do: str = "") -> NoReturn:
    message = f"not a handle of shared memory: {problem}"
    raise UsageError(message, reason=Reason.MALFORMED, what_to_do=what_to_do)
