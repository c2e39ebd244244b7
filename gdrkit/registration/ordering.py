"""Visibility of the writes of NICs to a GPU, and of the writes of a GPU to NICs, as the device reports it.

A work completion means that the data has reached the GPU's memory controller. The device's attributes say whether a
kernel that starts after the completion sees the data. Source: ``CUdevice_attribute`` of the CUDA driver API,
GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS and GPU_DIRECT_RDMA_WRITES_ORDERING.

In the other direction, a copy or a kernel writes the data that a NIC reads. The NIC sees this data after the host has
waited for the copy or the kernel (cuStreamSynchronize or cuEventSynchronize). A synchronous copy may return before it
is complete, unless SYNC_MEMOPS is set. gdrkit sets SYNC_MEMOPS on all memory that it allocates or borrows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cuda import DeviceAttribute
from gdrkit.errors import Api, Reason, Unsupported

if TYPE_CHECKING:
    from gdrkit.cuda import PrimaryContext

__all__ = ["FlushOption", "Ordering", "WriteVisibility"]


class FlushOption(enum.IntFlag):
    """The calls that make the writes of NICs visible (CUflushGPUDirectRDMAWritesOptions)."""

    NONE = 0
    HOST = 1  # cuFlushGPUDirectRDMAWrites
    MEMOPS = 2  # a stream's wait with CU_STREAM_WAIT_VALUE_FLUSH


class WriteVisibility(enum.IntEnum):
    """The devices to which the writes of NICs are visible without a flush (CUGPUDirectRDMAWritesOrdering)."""

    NONE = 0
    OWNER = 100  # Visible to the work of the device that owns the memory.
    ALL_DEVICES = 200  # Visible to the work of every device.


@dataclass(frozen=True, slots=True)
class Ordering:
    """The guarantees of one device about when the writes of NICs become visible to its work.

    Attributes
    ----------
    device_index : int
        Number of the device.
    flush_options : FlushOption
        The calls that make the writes of NICs visible to work of this device.
    visibility : int
        The value of the device attribute GPU_DIRECT_RDMA_WRITES_ORDERING. :class:`WriteVisibility` names the known
        values. A larger value includes the guarantees of the smaller ones.
    """

    device_index: int
    flush_options: FlushOption
    visibility: int

    @classmethod
    def of(cls, device: PrimaryContext) -> Self:
        """Return the ordering that a device reports."""
        return cls(
            device_index=device.index,
            flush_options=FlushOption(device.attribute(DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)),
            visibility=device.attribute(DeviceAttribute.GPU_DIRECT_RDMA_WRITES_ORDERING),
        )

    @property
    def needs_flush(self) -> bool:
        """Whether work of the owning device that starts after a completion may still see the old data."""
        return self.visibility < WriteVisibility.OWNER

    def make_visible(self, device: PrimaryContext) -> bool:
        """Make all earlier writes of NICs visible to the work of `device`. Return whether this needed a flush.

        Raises
        ------
        Unsupported
            A flush is needed, and the host cannot flush writes to this device.
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
                what_to_do="if flush_options has MEMOPS, wait in a stream with CU_STREAM_WAIT_VALUE_FLUSH",
            )
        device.flush_remote_writes()
        return True
