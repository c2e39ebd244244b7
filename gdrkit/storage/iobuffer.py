"""Host or device memory that the storage server may read and write.

The CPU never touches device memory here: there is no view of its bytes, the device fills its holes, and the server
computes its checksums. A range of a buffer is a buffer, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from gdrkit.buffers import DeviceBuffer, check_range
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.storage.checksum import crc32c

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.registration import Lease, RegionCache
    from gdrkit.verbs import Nic, Region, RemoteRange

__all__ = ["IOBuffer"]


@runtime_checkable
class _Fillable(Protocol):
    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set bytes by a call of the device, and wait for it."""


class _Registered:
    """The state that a buffer and its parts share."""

    def __init__(self) -> None:
        self.regions: dict[Nic, Region] = {}
        self.view: memoryview | None = None
        self.memory: DeviceBuffer | None = None
        self.lease: Lease | None = None
        self.parts = ReleaseStack()
        self.closed = False
        self.handle = Handle("storage.iobuffer")

    def close(self) -> None:
        if self.closed:
            return
        if self.view is not None:
            self.view.release()
        self.parts.run()
        self.closed = True
        self.handle.release()


class IOBuffer:
    """Registered memory, created by :meth:`StorageClient.register`, or a part of it, created by :meth:`subrange`.

    Attributes
    ----------
    length_bytes : int
        Size in bytes.
    """

    def __init__(self, registered: _Registered, *, offset_bytes: int, length_bytes: int, is_part: bool) -> None:
        """Callers use :meth:`of_host` and :meth:`of_device` instead."""
        self.length_bytes = length_bytes
        self._registered = registered
        self._offset_bytes = offset_bytes
        self._is_part = is_part

    @classmethod
    def of_host(cls, buffer: bytearray | mmap.mmap | memoryview, nics: Sequence[Nic]) -> Self:
        """Register a writable host buffer with all of these NICs (the sequence may be empty)."""
        registered = _Registered()
        try:
            for nic in nics:
                region = nic.register_host(buffer)
                registered.parts.push(region.close)
                registered.regions[nic] = region
            registered.view = memoryview(buffer).cast("B")
        except BaseException:
            registered.close()
            raise
        return cls(registered, offset_bytes=0, length_bytes=registered.view.nbytes, is_part=False)

    @classmethod
    def of_device(cls, memory: DeviceBuffer, cache: RegionCache) -> Self:
        """Lease a registration of device memory with all NICs of the cache."""
        lease = cache.lease(memory)
        registered = _Registered()
        registered.lease = lease
        registered.memory = memory
        registered.parts.push(lease.close)
        return cls(registered, offset_bytes=0, length_bytes=memory.length_bytes, is_part=False)

    @property
    def is_device_memory(self) -> bool:
        """Whether it is device memory, which the CPU must not touch."""
        return self._registered.memory is not None

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return self._registered.closed

    def subrange(self, *, offset_bytes: int, length_bytes: int) -> IOBuffer:
        """Return a part of the buffer, which is valid as long as the whole buffer."""
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        begin_bytes = self._offset_bytes + offset_bytes
        return IOBuffer(self._registered, offset_bytes=begin_bytes, length_bytes=length_bytes, is_part=True)

    def data(self) -> memoryview:
        """Return a view of the bytes.

        Raises
        ------
        UsageError
            NOT_SUPPORTED: it is device memory, which the CPU must not touch.
        """
        view = self._check_open().view
        if view is None:
            message = "the CPU cannot access device memory"
            raise UsageError(message, reason=Reason.NOT_SUPPORTED, what_to_do="copy the bytes by copy_out()")
        return view[self._offset_bytes : self._offset_bytes + self.length_bytes]

    def checksum(self, *, length_bytes: int) -> int:
        """Return the CRC32C of the first bytes, computed by the CPU. Device memory fails as in :meth:`data`."""
        return crc32c(self.data()[:length_bytes])

    def copy_out(self) -> bytes:
        """Return a copy of the bytes. For device memory, the device's copy call makes it."""
        memory = self._check_open().memory
        if memory is None:
            return bytes(self.data())
        return memory.read(offset_bytes=self._offset_bytes, length_bytes=self.length_bytes)

    def zero(self, *, offset_bytes: int, length_bytes: int) -> None:
        """Set bytes to zero. For device memory, the device does it, and this call waits."""
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        memory = self._check_open().memory
        if memory is None:
            self.data()[offset_bytes : offset_bytes + length_bytes] = bytes(length_bytes)
        elif isinstance(memory, _Fillable):
            memory.fill(0, offset_bytes=self._offset_bytes + offset_bytes, length_bytes=length_bytes)
        else:
            message = f"{type(memory).__name__} cannot be filled by its device"
            raise UsageError(message, reason=Reason.NOT_SUPPORTED)

    @property
    def can_zero(self) -> bool:
        """Whether :meth:`zero` works. If not, the client asks the server to send the zeros."""
        memory = self._registered.memory
        return memory is None or isinstance(memory, _Fillable)

    def remote(self, nic: Nic) -> RemoteRange:
        """Return the address and key that the server needs to access the buffer through this NIC."""
        registered = self._check_open()
        offset_bytes, length_bytes = self._offset_bytes, self.length_bytes
        if registered.lease is not None:
            return registered.lease.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
        return registered.regions[nic].remote(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister the memory. A second close does nothing, and neither does the close of a part."""
        if not self._is_part:
            self._registered.close()

    def _check_open(self) -> _Registered:
        if self._registered.closed:
            resource = "IO buffer"
            raise ClosedResource(resource)
        return self._registered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
