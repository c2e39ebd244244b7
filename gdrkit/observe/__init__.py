"""``gdrkit observe``: the path that the bytes of a program took, as far as another process can see the path.

An :class:`Observer` collects evidence about a process and its descendants: libraries, RDMA queue pairs and memory
regions, dma-bufs, sockets, files, and the counters of NICs, GPUs and nvidia-fs. From this evidence,
:func:`derive_routes` makes one verdict per route. The program is not changed and needs no library of gdrkit.
"""

from __future__ import annotations

from gdrkit.observe.describe import describe_observation, render_page
from gdrkit.observe.observation import Observation, ObservedProcess, ObservedRoute, PortTraffic
from gdrkit.observe.observer import Observer, observe_process, run_observed
from gdrkit.observe.routes import derive_routes

__all__ = [
    "Observation",
    "ObservedProcess",
    "ObservedRoute",
    "Observer",
    "PortTraffic",
    "derive_routes",
    "describe_observation",
    "observe_process",
    "render_page",
    "run_observed",
]
