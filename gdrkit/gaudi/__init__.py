"""Intel Gaudi devices and their memory, through hl-thunk, the user library of the habanalabs driver.

An import of this package does not load the library; the first call does. Only ``_hlthunk.py`` uses the library.
"""

from __future__ import annotations

from gdrkit.gaudi.context import GaudiContext
from gdrkit.gaudi.device import Device
from gdrkit.gaudi.device_info import DeviceInfo, Generation, device_count, list_devices
from gdrkit.gaudi.host_mapping import HostMapping
from gdrkit.gaudi.memory import BorrowedMemory, DeviceMemory, GaudiMemory
from gdrkit.gaudi.pool import DmabufPool, PoolMemory
from gdrkit.gaudi.query import AddressInfo

__all__ = [
    "AddressInfo",
    "BorrowedMemory",
    "Device",
    "DeviceInfo",
    "DeviceMemory",
    "DmabufPool",
    "GaudiContext",
    "GaudiMemory",
    "Generation",
    "HostMapping",
    "PoolMemory",
    "device_count",
    "list_devices",
]
