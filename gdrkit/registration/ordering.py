"""When what a NIC wrote is visible to a GPU, and what a GPU wrote to a NIC: asked of the device, not assumed.

Level 3. A completion says that the data reached the GPU's memory controller; whether a kernel that starts now sees it
is for the device to say. Source: ``CUdevice_attribute`` of the CUDA driver API, GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
and GPU_DIRECT_RDMA_WRITES_ORDERING.

The other way, what a copy or a kernel wrote is there for a NIC once the host has waited for it (a stream or an event).
A synchronous copy may return earlier, unless SYNC_MEMOPS is set: gdrkit sets it on all memory that it makes or borrows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cuda import DeviceAttribute
from gdrkit.errors import Api, Reason, Unsupported

if TYPE_CHECKING:
    from gdrkit.cuda import Device

__all__ = ["FlushOption", "Ordering", "WriteVisibility"]


class FlushOption(enum.IntFlag):
    """By what the writes of NICs can be flushed (CUflushGPUDirectRDMAWritesOptions)."""

    NONE = 0
    HOST = 1  # cuFlushGPUDirectRDMAWrites
    MEMOPS = 2  # a stream's wait with CU_STREAM_WAIT_VALUE_FLUSH


class WriteVisibility(enum.IntEnum):
    """To whom writes are visible without a flush (CUGPUDirectRDMAWritesOrdering)."""

    NONE = 0
    OWNER = 100  # To the work of the device that owns the memory.
    ALL_DEVICES = 200  # To the work of every device.


@dataclass(frozen=True, slots=True)
class Ordering:
    """What one device says of the order of writes.

    Attributes
    ----------
    device_index : int
        Which device.
    flush_options : FlushOption
        What can be done about it.
    visibility : int
        Its number; :class:`WriteVisibility` names those that are known, and more than one of them includes it.
    """

    device_index: int
    flush_options: FlushOption
    visibility: int

    @classmethod
    def of(cls, device: Device) -> Self:
        """Ask a device."""
        return cls(
            device_index=device.index,
            flush_options=FlushOption(device.attribute(DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)),
            visibility=device.attribute(DeviceAttribute.GPU_DIRECT_RDMA_WRITES_ORDERING),
        )

    @property
    def needs_flush(self) -> bool:
        """Whether work of the owning device that starts after a completion may still see what was there before."""
        return self.visibility < WriteVisibility.OWNER

    def make_visible(self, device: Device) -> bool:
        """Have what NICs wrote until now seen by the work of `device`; gives whether a flush was needed for it.

        Raises
        ------
        Unsupported
            A flush is needed and the host has none for this device.
        """
        if not self.needs_flush:
            return False
        if not self.flush_options & FlushOption.HOST:
            raise Unsupported(
                api=Api.CUDA,
                operation="cuFlushGPUDirectRDMAWrites",
                status=None,
                status_name="no flush option",
                arguments={"device": device.index, "options": int(self.flush_options), "ordering": self.visibility},
                reason=Reason.NOT_SUPPORTED,
                what_to_do="wait in a stream with CU_STREAM_WAIT_VALUE_FLUSH, where the options say MEMOPS",
            )
        device.flush_remote_writes()
        return True
