"""Host or device memory that the storage server may read and write.

The CPU never touches device memory: this module offers no view of device memory, the device zeroes the holes of files,
and the server computes the checksums. A subrange of a buffer is an :class:`IOBuffer` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from gdrkit.buffers import DeviceBuffer, check_range
from gdrkit.cuda import CudaMemory
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.storage.checksum import crc32c

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from gdrkit.cuda import PrimaryContext
    from gdrkit.registration import Lease, PooledMemory, RegionCache
    from gdrkit.verbs import Nic, Region, RemoteRange

__all__ = ["IOBuffer"]


@runtime_checkable
class _Fillable(Protocol):
    """Device memory that its device can fill."""

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set bytes by a call of the device, and wait until the call is complete."""


class _SharedRegistration:
    """The registered memory that a buffer and its subranges share.

    Host memory has `region_by_nic` and a `view`. Device memory has its object, `memory`, and a `lease` of its
    registration.
    """

    def __init__(self) -> None:
        self.region_by_nic: dict[Nic, Region] = {}
        self.view: memoryview | None = None
        self.memory: DeviceBuffer | None = None
        self.lease: Lease | None = None
        self.close_actions = ReleaseStack()
        self.closed = False
        self.live_handle = Handle("storage.iobuffer")

    def close(self) -> None:
        if self.closed:
            return
        if self.view is not None:
            self.view.release()
        self.close_actions.run()
        self.closed = True
        self.live_handle.release()


class IOBuffer:
    """Registered memory, created by :meth:`StorageClient.register`, or a subrange of it, created by :meth:`subrange`.

    Attributes
    ----------
    length_bytes : int
        Size in bytes.
    """

    def __init__(
        self, registration: _SharedRegistration, *, offset_bytes: int, length_bytes: int, is_subrange: bool
    ) -> None:
        """Create a buffer. Callers use :meth:`of_host`, :meth:`of_device` or :meth:`of_pool` instead."""
        self.length_bytes = length_bytes
        self._registration = registration
        self._offset_bytes = offset_bytes
        self._is_subrange = is_subrange

    @classmethod
    def of_host(cls, memory: bytearray | mmap.mmap | memoryview, nics: Sequence[Nic]) -> Self:
        """Register writable host memory with each of `nics`, which may be empty, and return its buffer."""
        registration = _SharedRegistration()
        try:
            for nic in nics:
                region = nic.register_host(memory)
                registration.close_actions.push(region.close)
                registration.region_by_nic[nic] = region
            registration.view = memoryview(memory).cast("B")
        except BaseException:
            registration.close()
            raise
        return cls(registration, offset_bytes=0, length_bytes=registration.view.nbytes, is_subrange=False)

    @classmethod
    def of_device(
        cls,
        memory: DeviceBuffer,
        cache: RegionCache,
        *,
        length_bytes: int | None = None,
        after_close: Callable[[], None] | None = None,
    ) -> Self:
        """Return a buffer in device memory, with a lease of its registration with all NICs of the cache.

        Parameters
        ----------
        memory : DeviceBuffer
            The memory.
        cache : RegionCache
            The cache of registrations.
        length_bytes : int or None
            Size of the buffer, from the first byte of the memory. None means all of the memory.
        after_close : callable or None
            Called after the lease has ended.
        """
        lease = cache.lease(memory)
        registration = _SharedRegistration()
        registration.lease = lease
        registration.memory = memory
        if after_close is not None:
            registration.close_actions.push(after_close)
        registration.close_actions.push(lease.close)
        length_bytes = memory.length_bytes if length_bytes is None else length_bytes
        return cls(registration, offset_bytes=0, length_bytes=length_bytes, is_subrange=False)

    @classmethod
    def of_pool(cls, pooled_memory: PooledMemory, cache: RegionCache) -> Self:
        """Return a buffer in pooled memory.

        When the buffer is closed, or if this method raises, the memory returns to the pool.
        """
        try:
            return cls.of_device(
                pooled_memory.memory, cache, length_bytes=pooled_memory.length_bytes, after_close=pooled_memory.close
            )
        except BaseException:
            pooled_memory.close()
            raise

    @property
    def is_device_memory(self) -> bool:
        """Whether the buffer is in device memory, which the CPU must not touch."""
        return self._registration.memory is not None

    @property
    def device(self) -> PrimaryContext | None:
        """The GPU whose memory the buffer is in. None for host memory, and for memory of other devices."""
        memory = self._registration.memory
        return memory.device if isinstance(memory, CudaMemory) else None

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The NICs with which the memory is registered."""
        registration = self._check_open()
        return tuple(registration.region_by_nic) if registration.lease is None else registration.lease.nics

    @property
    def closed(self) -> bool:
        """Whether the memory was deregistered."""
        return self._registration.closed

    def subrange(self, *, offset_bytes: int, length_bytes: int) -> IOBuffer:
        """Return a subrange of the buffer. It is valid until the buffer is closed."""
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        begin_bytes = self._offset_bytes + offset_bytes
        return IOBuffer(self._registration, offset_bytes=begin_bytes, length_bytes=length_bytes, is_subrange=True)

    def data(self) -> memoryview:
        """Return a view of the bytes.

        Raises
        ------
        UsageError
            NOT_SUPPORTED: the buffer is in device memory, which the CPU must not touch.
        """
        view = self._check_open().view
        if view is None:
            message = "the CPU cannot access device memory"
            raise UsageError(message, reason=Reason.NOT_SUPPORTED, what_to_do="copy the bytes by copy_out()")
        return view[self._offset_bytes : self._offset_bytes + self.length_bytes]

    def checksum(self, *, length_bytes: int) -> int:
        """Return the CRC32C of the first bytes. The CPU computes it, so :meth:`data` refuses device memory."""
        return crc32c(self.data()[:length_bytes])

    def copy_out(self) -> bytes:
        """Return a copy of the bytes. Device memory is copied by its device."""
        memory = self._check_open().memory
        if memory is None:
            return bytes(self.data())
        return memory.read(offset_bytes=self._offset_bytes, length_bytes=self.length_bytes)

    def zero(self, *, offset_bytes: int, length_bytes: int) -> None:
        """Set bytes to zero. The device zeroes its own memory, and this call waits for the device."""
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
        memory = self._registration.memory
        return memory is None or isinstance(memory, _Fillable)

    def remote(self, nic: Nic) -> RemoteRange:
        """Return the address and key that the server needs to access the buffer through this NIC."""
        registration = self._check_open()
        offset_bytes, length_bytes = self._offset_bytes, self.length_bytes
        if registration.lease is not None:
            return registration.lease.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
        return registration.region_by_nic[nic].remote(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister the memory. A second close and the close of a subrange do nothing."""
        if not self._is_subrange:
            self._registration.close()

    def _check_open(self) -> _SharedRegistration:
        if self._registration.closed:
            resource = "IO buffer"
            raise ClosedResource(resource)
        return self._registration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
