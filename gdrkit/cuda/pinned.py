"""Pinned host memory: pages that copy engines access without the driver's staging buffers.

The flag CU_MEMHOSTALLOC_PORTABLE makes the memory pinned for every context of the process, not only for the context
that allocates it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from gdrkit.cuda import _driver
from gdrkit.errors import Reason, UsageError
from gdrkit.handles import Resource

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gdrkit.cuda.context import PrimaryContext

__all__ = ["PinnedMemory"]

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE


class PinnedMemory(Resource):
    """Host memory that cannot be paged out. :meth:`close` frees it.

    Parameters
    ----------
    device : PrimaryContext
        The device whose context allocates the memory. Every device can copy from and to it.
    length_bytes : int
        Size in bytes, above 0.

    Raises
    ------
    ApiError
        cuMemHostAlloc failed, for example with CUDA_ERROR_OUT_OF_MEMORY.
    """

    def __init__(self, device: PrimaryContext, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"length_bytes must be above 0, not {length_bytes}"
            raise UsageError(message)
        self.device = device
        self.length_bytes = length_bytes
        with device.current():
            self._address = _driver.call_int("cuMemHostAlloc", bytesize=length_bytes, Flags=_PORTABLE)
        # A weak reference to the ctypes array on which all views are based. It is dead when no view exists.
        self._view_base: weakref.ref[Any] | None = None
        super().__init__("cuda.pinned", name="pinned memory", on_close=device.on_close, size_bytes=length_bytes)

    @property
    def address(self) -> int:
        """Address of the first byte, for the host and for devices."""
        self._check_open()
        return self._address

    def current(self) -> AbstractContextManager[None]:
        """Make the context that allocated the memory current on this thread; see :meth:`PrimaryContext.current`."""
        return self.device.current()

    def view(self) -> memoryview:
        """Return a writable view of the memory. All views must be deleted before :meth:`close`."""
        self._check_open()
        array = None if self._view_base is None else self._view_base()
        if array is None:
            array = _driver.array_at(self._address, self.length_bytes)
            self._view_base = weakref.ref(array)
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Free the memory. A second close does nothing.

        Raises
        ------
        UsageError
            BUSY: a view still exists. After the memory is freed, the view could show memory of another owner.
        """
        super().close()

    def _release(self) -> None:
        if self._view_base is not None and self._view_base() is not None:
            message = "a view of the pinned memory is still used"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="delete the views that were made from it")
        with self.device.current():
            _driver.call("cuMemFreeHost", p=self._address)

    def __repr__(self) -> str:
        return (
            f"PinnedMemory({'closed' if self._is_closed else f'{self._address:#x}'}, length_bytes={self.length_bytes})"
        )
