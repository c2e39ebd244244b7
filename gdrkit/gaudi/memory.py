"""Memory of a Gaudi.

Level 2. :class:`GaudiMemory` is what every kind can do; :class:`DeviceMemory` is an allocation of its own,
:class:`BorrowedMemory` the whole of one that somebody else owns. The driver gives an allocation no number that would
tell it from the next one at the same address, so each gets one here.
"""

from __future__ import annotations

import errno
import itertools
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import DmabufRange, MemoryKind, check_range
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi._answers import error_of
from gdrkit.gaudi.device import Piece
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.gaudi.device import Device

__all__ = ["Allocation", "BorrowedMemory", "DeviceMemory", "GaudiMemory"]

_FLAGS = os.O_RDWR | os.O_CLOEXEC  # The library takes no others.

_lock = ForkSafeLock()
_numbers = itertools.count(1)
_live: dict[int, Allocation] = {}


def _presence(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    return lambda: all(
        number in _live and _live[number].key == ((base, length_bytes, number),) for base, length_bytes, number in key
    )


class Allocation:
    """A contiguous piece of device memory, allocated and mapped; the driver's side of it.

    Of a first Gaudi it is a part of the physical memory that this program has set aside: its driver neither allocates
    nor maps.

    Parameters
    ----------
    device : Device
        Where.
    length_bytes : int
        Whole pages are taken.

    Raises
    ------
    ApiError
        ENOMEM: there is not so much; and others of ``hlthunk_device_memory_alloc`` and ``..._map``.
    """

    def __init__(self, device: Device, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"cannot allocate {length_bytes} bytes"
            raise UsageError(message)
        self.device = device
        self.length_bytes = align_up(length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        _ = device.fd  # Open: of a first Gaudi nothing else asks.
        self._steps = ReleaseStack()
        self.address = self._mapped() if device.generation.maps_memory else self._set_aside()
        number = next(_numbers)
        self.key = ((self.address, self.length_bytes, number),)
        with _lock:
            _live[number] = self

    @property
    def alive(self) -> bool:
        """Whether it was not given back."""
        return self.key[0][2] in _live

    def export(self, *, offset_bytes: int, length_bytes: int) -> int:
        """A new dma-buf over whole pages of it; gives the descriptor, which is the caller's."""
        if self.device.generation.maps_memory:
            return _hlthunk.call(
                "hlthunk_device_mapped_memory_export_dmabuf_fd",
                fd=self.device.fd,
                addr=self.address,
                size=length_bytes,
                offset=offset_bytes,
                flags=_FLAGS,
            )
        return _hlthunk.call(
            "hlthunk_device_memory_export_dmabuf_fd",
            fd=self.device.fd,
            addr=self.address + offset_bytes,
            size=length_bytes,
            flags=_FLAGS,
        )

    def close(self) -> None:
        """Unmap it, then free it; a second close does nothing.

        Raises
        ------
        ApiError
            EINVAL, BUSY: a dma-buf of it, or a region made from one, is alive. ETIMEDOUT: a copy is not done. It stays
            mapped; closing again tries again.
        """
        self.device.copies.settle()
        self._steps.run()
        with _lock:
            _live.pop(self.key[0][2], None)

    def _mapped(self) -> int:
        _hlthunk.require_page_size()
        fd = self.device.fd
        handle = _hlthunk.call(
            "hlthunk_device_memory_alloc",
            fd=fd,
            size=self.length_bytes,
            page_size=0,  # the driver's own
            contiguous=True,
            shared=False,
        )
        release = _Steps(self.device, handle)
        try:
            release.address = _hlthunk.call("hlthunk_device_memory_map", fd=fd, handle=handle, hint_addr=0)
        except BaseException as error:
            release.run_after(error)
            raise
        self._steps.push(release)
        return release.address

    def _set_aside(self) -> int:
        physical, length_bytes = self.device.physical, self.length_bytes
        address = physical.take(length_bytes)
        if address is None:
            raise error_of(
                operation="physical memory",
                number=errno.ENOMEM,
                arguments={"size": length_bytes},
                detail=f"the largest free part has {physical.largest_bytes} bytes",
            )
        self._steps.push(lambda: physical.give_back(address, length_bytes))
        return address


class _Steps:
    """Unmap, then free: each once, so that a close that is tried again goes on where it stopped."""

    def __init__(self, device: Device, handle: int) -> None:
        self._device = device
        self._handle = handle
        self.address = 0

    def __call__(self) -> None:
        if self._device.lost:
            return
        fd = self._device.fd
        if self.address:
            _hlthunk.call("hlthunk_memory_unmap", fd=fd, device_virt_addr=self.address)
            self.address = 0
        _hlthunk.call("hlthunk_device_memory_free", fd=fd, handle=self._handle)

    def run_after(self, error: BaseException) -> None:
        undo = ReleaseStack()
        undo.push(self)
        undo.run_after(error)


class GaudiMemory(ABC):
    """A piece of device memory; see :class:`gdrkit.buffers.DeviceBuffer`.

    Not for direct use: :meth:`Device.allocate` and :meth:`MemoryPool.allocate` make one.
    """

    kind = MemoryKind.GAUDI

    def __init__(self, allocation: Allocation, *, offset_bytes: int, length_bytes: int) -> None:
        self.device = allocation.device
        self.address = allocation.address + offset_bytes
        self.length_bytes = length_bytes
        self._allocation = allocation
        self._offset_bytes = offset_bytes
        self._before = ReleaseStack()
        self._handle = Handle("memory.gaudi")
        self._leave = self.device.adopt(self.close)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._closed

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` gives the memory back."""
        return True

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """(base, length_bytes, number) of the one allocation under it; another one at its address has another
        number.
        """
        self._check_open()
        return self._allocation.key

    # What says whether the allocation of an earlier answer of :meth:`allocation_key` is still there.
    presence = staticmethod(_presence)

    def allocation(self) -> BorrowedMemory:
        """The whole allocation under this memory, borrowed. Closing the result frees nothing."""
        self._check_open()
        return BorrowedMemory(self._allocation, export=self._export)

    def export_dmabuf(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> DmabufRange:
        """A new dma-buf over this memory or a part of it; the caller closes it.

        Whole host pages go out, so the range is widened to them; ``offset_bytes`` of the result says where in the
        dma-buf the asked-for bytes begin.

        Parameters
        ----------
        offset_bytes : int
            Where the part begins.
        length_bytes : int or None
            Its size, above 0; None: up to the end.

        Raises
        ------
        ApiError
            EINVAL: the driver does not export this (outside of the PCI BAR, say).
        Unsupported
            It exports nothing at all.
        UsageError
            The part is not inside the memory, or empty.
        """
        self._check_open()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        if length_bytes == 0:
            message = "an empty range has no dma-buf"
            raise UsageError(message)
        begin = self._offset_bytes + offset_bytes
        return self._export(begin, length_bytes)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Copy bytes to the host by the device's DMA, and wait for them; None: up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        data = bytearray(length_bytes)
        self.read_into(data, offset_bytes=offset_bytes)
        return bytes(data)

    def read_into(self, buffer: bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Fill a host buffer from here by the device's DMA, and wait for it."""
        view = self._checked(buffer, offset_bytes=offset_bytes)
        if view.nbytes:
            self.device.copies.read_into(self.address + offset_bytes, view)

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes from the host by the device's DMA, and wait until they are there."""
        view = self._checked(data, offset_bytes=offset_bytes)
        if view.nbytes:
            self.device.copies.write(self.address + offset_bytes, view)

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Have `action` run before the memory is freed, last added first; returns what takes the action back."""
        self._check_open()
        return self._before.push(action)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then give the memory back; a second close does nothing.

        Raises
        ------
        Exception
            Of the first action that failed, with the others as notes. The memory is *not* freed then; another close
            tries again.
        ApiError
            EINVAL, BUSY: a dma-buf of it is alive somewhere. The memory stays, and another close tries again.
        """
        if self._closed:
            return
        self._before.run()
        self._release()
        self._closed = True
        self._leave()
        self._handle.release()

    @abstractmethod
    def _release(self) -> None:
        """Give it back."""

    def _export(self, begin: int, length_bytes: int) -> DmabufRange:
        """A dma-buf over a part of the allocation."""
        first = align_down(begin, alignment_bytes=HOST_PAGE_BYTES)
        end = align_up(begin + length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        fd = self._allocation.export(offset_bytes=first, length_bytes=end - first)
        address = self._allocation.address + begin
        return DmabufRange(fd, offset_bytes=begin - first, length_bytes=length_bytes, address=address)

    def _check_open(self) -> None:
        if self._closed or not self._allocation.alive:
            what = f"Gaudi memory at {self.address:#x}"
            raise ClosedResource(what)

    def _checked(self, data: bytes | bytearray | memoryview, *, offset_bytes: int) -> memoryview:
        self._check_open()
        view = memoryview(data)
        if not view.c_contiguous:
            message = "the host buffer is not contiguous"
            raise UsageError(message)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=self.length_bytes)
        return view.cast("B")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.address:#x}"
        return f"{type(self).__name__}({state}, length_bytes={self.length_bytes})"


class DeviceMemory(GaudiMemory):
    """An allocation of its own; :meth:`close` unmaps and frees it.

    Parameters
    ----------
    device : Device
        Where.
    length_bytes : int
        How much may be used, above 0.

    Raises
    ------
    ApiError
        ENOMEM: there is not so much; and others of the driver.
    SetupMissing
        ELIBBAD: an hl-thunk whose ``hlthunk_device_memory_alloc`` is not known.
    """

    def __init__(self, device: Device, length_bytes: int) -> None:
        allocation = Allocation(device, length_bytes)
        super().__init__(allocation, offset_bytes=0, length_bytes=length_bytes)
        piece = Piece(self.kind, allocation.address, allocation.length_bytes, self._export_whole)
        self._forget = device.enter(piece)

    def _release(self) -> None:
        self._allocation.close()
        self._forget()

    def _export_whole(self, begin: int, length_bytes: int) -> DmabufRange:
        fd = self._allocation.export(offset_bytes=0, length_bytes=self._allocation.length_bytes)
        return DmabufRange(fd, offset_bytes=begin, length_bytes=length_bytes, address=self.address + begin)


class BorrowedMemory(GaudiMemory):
    """The whole of an allocation that something else owns; :meth:`close` runs the actions and frees nothing."""

    def __init__(self, allocation: Allocation, *, export: Callable[[int, int], DmabufRange]) -> None:
        super().__init__(allocation, offset_bytes=0, length_bytes=allocation.length_bytes)
        self._export_by_owner = export

    @property
    def owned(self) -> bool:
        """False: something else frees it."""
        return False

    def _release(self) -> None:
        return

    def _export(self, begin: int, length_bytes: int) -> DmabufRange:
        return self._export_by_owner(begin, length_bytes)
