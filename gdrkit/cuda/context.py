"""The primary context of a CUDA device.

gdrkit shares the primary context of each device with all other code of the process (the CUDA runtime, PyTorch, ...).
Each call of gdrkit makes this context current for its duration, and then restores the previous one.
"""

from __future__ import annotations

import contextlib
import enum
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.cuda import _driver
from gdrkit.errors import ClosedResource
from gdrkit.handles import Closeable, Handle, ReleaseStack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DeviceAttribute", "MemoryInfo", "PrimaryContext"]

# Sizes of the buffers for the name and for the PCI address of a device.
_NAME_BYTES = 256
_PCI_BUS_ID_BYTES = 32
_FLUSH_CURRENT_CONTEXT = 0  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
_FLUSH_TO_OWNER = 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER


class DeviceAttribute(enum.IntEnum):
    """The attributes that :meth:`Device.attribute` can query.

    Values and names are taken from ``CUdevice_attribute``. The names lack the prefix ``CU_DEVICE_ATTRIBUTE_``.
    """

    MULTIPROCESSOR_COUNT = 16
    INTEGRATED = 18
    PCI_BUS_ID = 33
    PCI_DEVICE_ID = 34
    UNIFIED_ADDRESSING = 41
    PCI_DOMAIN_ID = 50
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    HOST_REGISTER_SUPPORTED = 99
    VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    MEMORY_POOLS_SUPPORTED = 115
    GPU_DIRECT_RDMA_SUPPORTED = 116
    GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117
    GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    DMA_BUF_SUPPORTED = 124
    HANDLE_TYPE_FABRIC_SUPPORTED = 128


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total memory of a device, from cuMemGetInfo."""

    free_bytes: int
    total_bytes: int


class PrimaryContext(Closeable):
    """A CUDA device and its primary context; the base of :class:`~gdrkit.cuda.Device`.

    The properties of the device can be read without the context. The first method that needs the context retains it
    (cuDevicePrimaryCtxRetain). :meth:`close` first closes all memory, streams and events of this object, in the reverse
    order of their creation, and then releases the context.

    Parameters
    ----------
    index : int
        The driver's number of the device, 0 to ``device_count() - 1``.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._cu_device = _driver.call_int("cuDeviceGet", ordinal=index)
        # The pair of the CUcontext and its handle for :func:`gdrkit.handles.live`. The list is empty until the first
        # call of _retain(). If several calls retain the context at the same time, each adds an item, and all but the
        # first remove theirs. A lock is not safe here: a signal handler would wait for the thread that it interrupted,
        # and a forked child for a thread of its parent.
        self._retained_contexts: list[tuple[int, Handle]] = []
        self._release_actions = ReleaseStack()
        self._is_closed = False

    @property
    def name(self) -> str:
        """The driver's name of the device, such as ``NVIDIA H200``."""
        return _driver.call_string("cuDeviceGetName", length=_NAME_BYTES, dev=self._cu_device)

    @property
    def uuid(self) -> str:
        """The UUID as nvidia-smi prints it, ``GPU-...``."""
        return f"GPU-{uuid.UUID(bytes=_driver.call_uuid('cuDeviceGetUuid', dev=self._cu_device))}"

    @property
    def pci_bus_id(self) -> str:
        """The PCI address as in sysfs, such as ``0000:1b:00.0``."""
        return _driver.call_string("cuDeviceGetPCIBusId", length=_PCI_BUS_ID_BYTES, dev=self._cu_device).lower()

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._is_closed

    def attribute(self, attribute: DeviceAttribute) -> int:
        """Return the value of one attribute. A flag is 0 or 1."""
        return _driver.call_int(
            "cuDeviceGetAttribute", attrib=_driver.enum_member("CUdevice_attribute", attribute), dev=self._cu_device
        )

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the primary context current on this thread, and restore the previous one afterwards."""
        with _driver.push_context(self._retain()):
            yield

    def context_handle(self) -> int:
        """Return the driver's handle of the primary context (``CUcontext``)."""
        return self._retain()

    @property
    def device_handle(self) -> int:
        """The driver's handle of the device (``CUdevice``)."""
        return self._cu_device

    def synchronize(self) -> None:
        """Wait until the device has finished all work of the primary context."""
        with self.current():
            _driver.call("cuCtxSynchronize")

    def flush_remote_writes(self) -> None:
        """Make all earlier writes of NICs visible to the work of this device.

        The method calls cuFlushGPUDirectRDMAWrites with the scope TO_OWNER.

        Raises
        ------
        Unsupported
            The device does not support the call; see :data:`DeviceAttribute.GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
        """
        flush_target = _driver.enum_member("CUflushGPUDirectRDMAWritesTarget", _FLUSH_CURRENT_CONTEXT)
        flush_scope = _driver.enum_member("CUflushGPUDirectRDMAWritesScope", _FLUSH_TO_OWNER)
        with self.current():
            _driver.call("cuFlushGPUDirectRDMAWrites", flush_target=flush_target, scope=flush_scope)

    def memory_info(self) -> MemoryInfo:
        """Return the size of the device's memory, and how much of it is free (cuMemGetInfo)."""
        with self.current():
            free_bytes, total_bytes = _driver.call_int_pair("cuMemGetInfo")
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def on_close(self, close: Callable[[], None]) -> Callable[[], None]:
        """Register `close` to be called before the device is closed, and return a function that cancels the call.

        Objects that are created on the device, such as memory and streams, register their `close` here.
        """
        return self._release_actions.push(close)

    def close(self) -> None:
        """Close everything that was made from this device, in the reverse order, and release the primary context.

        A second close does nothing.

        Raises
        ------
        ApiError
            An object of this device could not be closed; if several fail, this is the first error. The device stays
            open, and close() can be called again.
        """
        if self._is_closed:
            return
        self._release_actions.run()
        if self._retained_contexts:
            _driver.call("cuDevicePrimaryCtxRelease", dev=self._cu_device)
            _, handle = self._retained_contexts.pop()
            handle.release()
        self._is_closed = True

    def _retain(self) -> int:
        """Return the CUcontext of the primary context. The first call retains it."""
        if self._is_closed:
            resource = f"CUDA device {self.index}"
            raise ClosedResource(resource)
        retained_contexts = self._retained_contexts
        return retained_contexts[0][0] if retained_contexts else self._retain_first()

    def _retain_first(self) -> int:
        handle = Handle("cuda.primary_context")
        try:
            context_and_handle = _driver.call_int("cuDevicePrimaryCtxRetain", dev=self._cu_device), handle
        except BaseException:
            handle.release()
            raise
        self._retained_contexts.append(context_and_handle)
        if self._retained_contexts[0] is not context_and_handle:
            # Another thread or a signal handler has retained the context meanwhile.
            self._retained_contexts.remove(context_and_handle)
            handle.release()
            _driver.call("cuDevicePrimaryCtxRelease", dev=self._cu_device)
        return context_and_handle[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index}{', closed' if self._is_closed else ''})"
