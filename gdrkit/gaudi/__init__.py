"""Gaudi devices and their memory, through hl-thunk.

Importing this package opens no library; the first call does. ``_hlthunk.py`` is the only file that uses the library.
"""

from __future__ import annotations

from gdrkit.gaudi.context import GaudiContext
from gdrkit.gaudi.device import Device
from gdrkit.gaudi.device_info import DeviceInfo, Generation, device_count, list_devices
from gdrkit.gaudi.host_mapping import HostMapping
from gdrkit.gaudi.memory import BorrowedMemory, DeviceMemory, GaudiMemory
from gdrkit.gaudi.pool import MemoryPool, PoolMemory
from gdrkit.gaudi.query import AddressInfo

__all__ = [
    "AddressInfo",
    "BorrowedMemory",
    "Device",
    "DeviceInfo",
    "DeviceMemory",
    "GaudiContext",
    "GaudiMemory",
    "Generation",
    "HostMapping",
    "MemoryPool",
    "PoolMemory",
    "device_count",
    "list_devices",
]
