"""RDMA through libibverbs: devices, memory regions, completion queues and reliable connections.

Importing this package loads neither pyverbs nor libibverbs; the first call of a function does. ``_pyverbs.py`` is the
only file that uses pyverbs.
"""

from __future__ import annotations

from gdrkit.verbs.completion import WORK_ID_MAX, Completion, CompletionQueue
from gdrkit.verbs.context import NicContext
from gdrkit.verbs.initiator import Burst, Direction, Initiator, Latencies
from gdrkit.verbs.nic import Nic, open_active_nics
from gdrkit.verbs.ports import NicInfo, PortInfo, list_nics
from gdrkit.verbs.queue_pair import QueuePair
from gdrkit.verbs.region import Region, ScatterGatherElement
from gdrkit.verbs.status import Access, CompletionOpcode, LinkLayer, PortState, QueuePairState, Status
from gdrkit.verbs.wire import Endpoint, RemoteRange

__all__ = [
    "WORK_ID_MAX",
    "Access",
    "Burst",
    "Completion",
    "CompletionOpcode",
    "CompletionQueue",
    "Direction",
    "Endpoint",
    "Initiator",
    "Latencies",
    "LinkLayer",
    "Nic",
    "NicContext",
    "NicInfo",
    "PortInfo",
    "PortState",
    "QueuePair",
    "QueuePairState",
    "Region",
    "RemoteRange",
    "ScatterGatherElement",
    "Status",
    "list_nics",
    "open_active_nics",
]
