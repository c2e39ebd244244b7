"""Registration of device memory with NICs, and sharing of device memory between processes.

Packages such as `gdrkit.cuda` export device memory, and `gdrkit.verbs` imports it. This package joins both sides.
"""

from __future__ import annotations

from gdrkit.registration.balance import Balance, NicLoad, measure_balance
from gdrkit.registration.cache import RegionCache
from gdrkit.registration.connected_pair import ConnectedPair
from gdrkit.registration.dmabuf_memory import DmabufMemory
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.handle_message import HandleMessage, receive
from gdrkit.registration.lease import Lease
from gdrkit.registration.manager import GdrManager, GdrObstacle, GdrState, GpuState
from gdrkit.registration.memory_pool import MemoryPool, MemoryPoolStatistics, PooledMemory
from gdrkit.registration.ordering import FlushOption, Ordering, WriteVisibility
from gdrkit.registration.placement import Distance, Placement
from gdrkit.registration.policy import Registration, RegistrationRoute, register
from gdrkit.registration.pool import BufferPool, PoolStatistics, RdmaBuffer
from gdrkit.registration.reach import (
    COUNTERS_TIMEOUT_S,
    Reach,
    TransferPath,
    measure_devices,
    measure_reach,
    unproven_reason,
)
from gdrkit.registration.reach_table import ReachTable
from gdrkit.registration.share import device_of, export_memory, import_dmabuf, import_memory
from gdrkit.registration.statistics import CacheStatistics

__all__ = [
    "COUNTERS_TIMEOUT_S",
    "Balance",
    "BufferPool",
    "CacheStatistics",
    "ConnectedPair",
    "Distance",
    "DmabufMemory",
    "FlushOption",
    "GdrManager",
    "GdrObstacle",
    "GdrState",
    "GpuState",
    "HandleMessage",
    "Lease",
    "MemoryPool",
    "MemoryPoolStatistics",
    "NicLoad",
    "Ordering",
    "Placement",
    "PoolStatistics",
    "PooledMemory",
    "RdmaBuffer",
    "Reach",
    "ReachTable",
    "RegionCache",
    "Registration",
    "RegistrationRoute",
    "ShareHandle",
    "ShareKind",
    "TransferPath",
    "WriteVisibility",
    "device_of",
    "export_memory",
    "import_dmabuf",
    "import_memory",
    "measure_balance",
    "measure_devices",
    "measure_reach",
    "receive",
    "register",
    "unproven_reason",
]
