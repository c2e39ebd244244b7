"""Transfers between files and device memory by NVIDIA cuFile (GPUDirect Storage), with proof of their route.

Importing this package loads no library; the first call does. Only ``_cufile.py`` imports ``cuda.bindings.cufile``, and
only ``_kvikio.py`` imports kvikio.

    from gdrkit import cuda, cufile, host

    with cuda.Device(0) as device, device.allocate(1 << 20) as memory, cufile.Driver() as driver:
        driver.statistics.start()
        monitor = cufile.RouteMonitor(driver, host.HostTree())
        with cufile.FileHandle(driver, fd) as file, monitor.watch(fd):
            file.read(memory)
        print(monitor.proof.state, monitor.proof.why)
"""

from __future__ import annotations

from gdrkit.cufile.batch import Batch, Ended, Event, Opcode, Request
from gdrkit.cufile.buffer import Memory, RegisteredBuffer
from gdrkit.cufile.driver import Driver, Properties, library_version
from gdrkit.cufile.handle import FileHandle, Piece
from gdrkit.cufile.nvidia_fs import NvidiaFs, nvidia_fs
from gdrkit.cufile.obstacles import Cause, Obstacle, obstacles
from gdrkit.cufile.probe import ProbeAnswer, probe
from gdrkit.cufile.proof import DirectPathError, Proof, Route, RouteMonitor, RouteState, judge, refused
from gdrkit.cufile.statistics import GpuCounters, Level, Snapshot, Statistics
from gdrkit.cufile.stream import Fixed, Pending, RegisteredStream, Stream

__all__ = [
    "Batch",
    "Cause",
    "DirectPathError",
    "Driver",
    "Ended",
    "Event",
    "FileHandle",
    "Fixed",
    "GpuCounters",
    "Level",
    "Memory",
    "NvidiaFs",
    "Obstacle",
    "Opcode",
    "Pending",
    "Piece",
    "ProbeAnswer",
    "Proof",
    "Properties",
    "RegisteredBuffer",
    "RegisteredStream",
    "Request",
    "Route",
    "RouteMonitor",
    "RouteState",
    "Snapshot",
    "Statistics",
    "Stream",
    "judge",
    "library_version",
    "nvidia_fs",
    "obstacles",
    "probe",
    "refused",
]
