"""CUDA devices and their memory, through the CUDA driver API.

Importing this package opens no library. The first call opens libcuda. ``_driver.py`` is the only file that imports
``cuda.bindings.driver``.
"""

from __future__ import annotations

from gdrkit.cuda.context import DeviceAttribute, MemoryInfo, PrimaryContext
from gdrkit.cuda.device import Device, device_count, driver_version
from gdrkit.cuda.interop import ForeignArray, describe, dlpack_device, export_tensor, wrap
from gdrkit.cuda.ipc import ImportedMemory, device_of_handle, export_handle, open_handle
from gdrkit.cuda.memory import BorrowedMemory, CudaMemory, DeviceMemory, borrow
from gdrkit.cuda.peer import can_access_peer, peer_access
from gdrkit.cuda.pinned import PinnedMemory
from gdrkit.cuda.pointer import memory_kind
from gdrkit.cuda.stream import Event, Stream, wait_for_stream
from gdrkit.cuda.vmm import VmmMemory, granularity_bytes

__all__ = [
    "BorrowedMemory",
    "CudaMemory",
    "Device",
    "DeviceAttribute",
    "DeviceMemory",
    "Event",
    "ForeignArray",
    "ImportedMemory",
    "MemoryInfo",
    "PinnedMemory",
    "PrimaryContext",
    "Stream",
    "VmmMemory",
    "borrow",
    "can_access_peer",
    "describe",
    "device_count",
    "device_of_handle",
    "dlpack_device",
    "driver_version",
    "export_handle",
    "export_tensor",
    "granularity_bytes",
    "memory_kind",
    "open_handle",
    "peer_access",
    "wait_for_stream",
    "wrap",
]
