"""Device memory of ncclMemAlloc, which NCCL can always register with a communicator.

If the driver supports cuMemCreate, ncclMemAlloc uses it. The memory is then like :class:`gdrkit.cuda.VmmMemory`:
it has a dma-buf, and NICs can register it. Conversely, NCCL can also register memory that gdrkit allocated by
cuMemCreate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.cuda import CudaMemory, pointer
from gdrkit.errors import ApiError, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.nccl import _nccl

if TYPE_CHECKING:
    from gdrkit.cuda.context import PrimaryContext

__all__ = ["NcclMemory"]


class NcclMemory(CudaMemory):
    """Memory of ncclMemAlloc. :meth:`close` frees it.

    Parameters
    ----------
    device : PrimaryContext
        The device to allocate on.
    length_bytes : int
        Size in bytes, above 0. NCCL may allocate more.

    Raises
    ------
    ApiError
        ncclMemAlloc failed, for example because the device has no memory left.
    SetupMissing
        NCCL is missing.
    """

    def __init__(self, device: PrimaryContext, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"length_bytes must be above 0, not {length_bytes}"
            raise UsageError(message)
        with device.current():
            address = _nccl.allocate(length_bytes)
            cleanup_stack = ReleaseStack()
            cleanup_stack.push(lambda: _nccl.call("ncclMemFree", address))
            try:
                pointer.set_sync_memops(address)
                kind = pointer.memory_kind(address)
            except ApiError as error:
                cleanup_stack.run_after(error)
                raise
        super().__init__(device, kind=kind, address=address, length_bytes=length_bytes)

    def _release(self) -> None:
        _nccl.call("ncclMemFree", self.address, ptr=self.address)
