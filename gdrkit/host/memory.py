"""Host memory that may be registered, cached and pooled as device memory is.

Level 2. The kernel gives pages of a process no number that would tell an old mapping from a new one at the same
address, as a GPU's driver does. So each mapping gets one here, and only memory that gdrkit itself has mapped can be
known again: it is what :class:`HostMemory` maps.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import DmabufRange, MemoryKind, check_range
from gdrkit.errors import Api, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.host._libc import address_of
from gdrkit.units import HOST_PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

__all__ = ["BorrowedHostMemory", "HostAllocator", "HostBuffer", "HostMemory"]

_lock = threading.Lock()
_numbers = itertools.count(1)
# Base and length of every live mapping by its number. No number is ever used twice in the life of the process.
_live: dict[int, tuple[int, int]] = {}


def _presence(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    """What says whether every mapping of `key` is still there."""
    return lambda: all(_live.get(number) == (base, length_bytes) for base, length_bytes, number in key)


class HostBuffer(ABC):
    """A piece of host memory; see :class:`gdrkit.buffers.DeviceBuffer`.

    Not for direct use: :class:`HostMemory` is one, and :meth:`allocation` gives one.
    """

    kind = MemoryKind.HOST

    def __init__(self, mapping: _Mapping, *, length_bytes: int) -> None:
        self.address = mapping.address
        self.length_bytes = length_bytes
        self._mapping = mapping
        self._before = ReleaseStack()
        self._handle = Handle("memory.host")
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._closed

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` gives the memory back to the kernel."""
        return False

    def current(self) -> AbstractContextManager[None]:
        """Nothing: it belongs to no device's context."""
        return contextlib.nullcontext()

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """(base, length_bytes, number) of the one mapping under it; a mapping made anew has another number."""
        self._check_open()
        return self._mapping.key

    # What says whether the mapping of an earlier answer of :meth:`allocation_key` is still there.
    presence = staticmethod(_presence)

    def allocation(self) -> BorrowedHostMemory:
        """The whole mapping under this memory, borrowed: the mapping stays until the result is closed."""
        self._check_open()
        return BorrowedHostMemory(self._mapping)

    def export_dmabuf(self) -> DmabufRange:
        """Nothing exports host memory.

        Raises
        ------
        Unsupported
            DMABUF_EXPORT_UNSUPPORTED, always.
        """
        self._check_open()
        raise Unsupported(
            api=Api.KERNEL,
            operation="dma-buf export",
            status=None,
            status_name="no call",
            arguments={"address": self.address, "length_bytes": self.length_bytes},
            reason=Reason.DMABUF_EXPORT_UNSUPPORTED,
            what_to_do="register it by its address, as the policy does",
            detail="the pages of a process have no exporter",
        )

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """A copy of its bytes; None: up to the end."""
        self._check_open()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return self._mapping.pages[offset_bytes : offset_bytes + length_bytes]

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes into it."""
        self._check_open()
        view = memoryview(data)
        if not view.c_contiguous:
            message = "the data is not contiguous"
            raise UsageError(message)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=self.length_bytes)
        if view.nbytes:
            self._mapping.pages[offset_bytes : offset_bytes + view.nbytes] = view.cast("B")

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set every byte of the range to `byte` (0 to 255); None: up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        if not 0 <= byte <= 0xFF:  # noqa: PLR2004 - the largest byte.
            message = f"{byte} is not a byte"
            raise UsageError(message)
        self.write(bytes([byte]) * length_bytes, offset_bytes=offset_bytes)

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Have `action` run before the memory is freed, last added first; returns what takes the action back."""
        self._check_open()
        return self._before.push(action)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then give back what is owned; a second close does nothing.

        Raises
        ------
        Exception
            Of the first action that failed, with the others as notes. The memory is *not* freed then, since somebody
            may still reach it; another close tries again.
        UsageError
            BUSY: it is still borrowed.
        """
        if self._closed:
            return
        self._before.run()
        self._release()
        self._closed = True
        self._handle.release()

    @abstractmethod
    def _release(self) -> None:
        """Give back what is owned."""

    def _check_open(self) -> None:
        if self._closed:
            what = f"host memory at {self.address:#x}"
            raise ClosedResource(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.address:#x}"
        return f"{type(self).__name__}({state}, length_bytes={self.length_bytes})"


class HostMemory(HostBuffer):
    """New anonymous pages of this process, all zero; :meth:`close` unmaps them.

    They begin at a page and end with one, so that the pages that a NIC pins hold nothing of anybody else. A child that
    is forked does not have them: else its first write would leave the NIC with pages that are nobody's.

    Parameters
    ----------
    length_bytes : int
        How much may be used, above 0.

    Raises
    ------
    UsageError
        BAD_ARGUMENT: the length. OUT_OF_MEMORY: the kernel does not map that much.
    """

    def __init__(self, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"cannot allocate {length_bytes} bytes"
            raise UsageError(message)
        super().__init__(_Mapping(length_bytes), length_bytes=length_bytes)

    @property
    def owned(self) -> bool:
        """True: :meth:`close` unmaps it."""
        return True

    def _release(self) -> None:
        self._mapping.close()


class BorrowedHostMemory(HostBuffer):
    """A whole mapping of some :class:`HostMemory`, which cannot be unmapped until this is closed."""

    def __init__(self, mapping: _Mapping) -> None:
        mapping.borrow()
        super().__init__(mapping, length_bytes=mapping.length_bytes)

    def _release(self) -> None:
        self._mapping.give_back()


class HostAllocator:
    """Gives host memory, where something else could be a device that gives its own."""

    def allocate(self, length_bytes: int) -> HostMemory:
        """New memory; see :class:`HostMemory`."""
        return HostMemory(length_bytes)


class _Mapping:
    """Whole pages, their number, and how many have borrowed them."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = align_up(length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        try:
            self.pages = mmap.mmap(-1, self.length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            message = f"the kernel does not map {self.length_bytes} bytes: {error}"
            raise UsageError(message, reason=Reason.OUT_OF_MEMORY) from error
        self.pages.madvise(mmap.MADV_DONTFORK)
        self.address = address_of(self.pages)
        number = next(_numbers)
        self.key = ((self.address, self.length_bytes, number),)
        self._borrowers = 0
        with _lock:
            _live[number] = (self.address, self.length_bytes)

    def borrow(self) -> None:
        with _lock:
            if self.key[0][2] not in _live:
                what = f"host memory at {self.address:#x}"
                raise ClosedResource(what)
            self._borrowers += 1

    def give_back(self) -> None:
        with _lock:
            self._borrowers -= 1

    def close(self) -> None:
        with _lock:
            if self._borrowers:
                message = f"host memory at {self.address:#x} is borrowed {self._borrowers} times"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="close what was borrowed from it first")
            self.pages.close()
            del _live[self.key[0][2]]
