"""Transfers between files and device memory by NVIDIA cuFile (GPUDirect Storage), with proof of their route.

The import of this package loads no library. The first call that needs libcufile loads it. Only ``_cufile.py`` imports
``cuda.bindings.cufile``, and only ``_kvikio.py`` imports kvikio.

Example::

    from gdrkit import cuda, cufile, host

    with cuda.Device(0) as device, device.allocate(1 << 20) as memory, cufile.Driver() as driver:
        driver.statistics.start()
        monitor = cufile.RouteMonitor(driver, host.HostTree())
        with cufile.FileHandle(driver, fd) as file, monitor.watch(fd):
            file.read(memory)
        print(monitor.proof.state, monitor.proof.why)
"""

from __future__ import annotations

from gdrkit.cufile.batch import BatchEvent, BatchRequest, BatchStatus, IoBatch, Opcode
from gdrkit.cufile.buffer import BufferCache, BufferRange, RegisteredBuffer
from gdrkit.cufile.driver import Driver, Properties, library_version
from gdrkit.cufile.handle import FileHandle
from gdrkit.cufile.interfaces import CudaStream, Memory, OwnedMemory
from gdrkit.cufile.nvidia_fs import NvidiaFs, read_nvidia_fs
from gdrkit.cufile.obstacles import Cause, Obstacle, obstacles
from gdrkit.cufile.probe import ProbeResult, probe
from gdrkit.cufile.proof import (
    DirectPathError,
    Proof,
    Route,
    RouteMonitor,
    RouteState,
    failed_registration_proof,
    proof_from_counters,
)
from gdrkit.cufile.statistics import GpuCounters, Level, Statistics, StatisticsSnapshot
from gdrkit.cufile.stream import PendingTransfer, RegisteredStream, StreamFlags

__all__ = [
    "BatchEvent",
    "BatchRequest",
    "BatchStatus",
    "BufferCache",
    "BufferRange",
    "Cause",
    "CudaStream",
    "DirectPathError",
    "Driver",
    "FileHandle",
    "GpuCounters",
    "IoBatch",
    "Level",
    "Memory",
    "NvidiaFs",
    "Obstacle",
    "Opcode",
    "OwnedMemory",
    "PendingTransfer",
    "ProbeResult",
    "Proof",
    "Properties",
    "RegisteredBuffer",
    "RegisteredStream",
    "Route",
    "RouteMonitor",
    "RouteState",
    "Statistics",
    "StatisticsSnapshot",
    "StreamFlags",
    "failed_registration_proof",
    "library_version",
    "obstacles",
    "probe",
    "proof_from_counters",
    "read_nvidia_fs",
]
