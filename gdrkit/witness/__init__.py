"""Readers of evidence: libraries, file descriptors, kernel device interfaces, RDMA port counters, kernel log.

This package reports what is there. ``report.substrate`` decides what a library stands for.
"""

from __future__ import annotations

from gdrkit.witness.counters import PortCounters, counters
from gdrkit.witness.descriptors import descriptors, device_nodes
from gdrkit.witness.elf import ElfFile, ElfNote, parse_elf, read_elf
from gdrkit.witness.genuine_files import DeviceNode
from gdrkit.witness.kernel_devices import (
    SOFTWARE_DRIVERS,
    GpuEvidence,
    KernelEvidence,
    RdmaEvidence,
    kernel_evidence,
)
from gdrkit.witness.kernel_log import KernelLog, kernel_log
from gdrkit.witness.libraries import LoadedLibrary, describe_library, libraries

__all__ = [
    "SOFTWARE_DRIVERS",
    "DeviceNode",
    "ElfFile",
    "ElfNote",
    "GpuEvidence",
    "KernelEvidence",
    "KernelLog",
    "LoadedLibrary",
    "PortCounters",
    "RdmaEvidence",
    "counters",
    "describe_library",
    "descriptors",
    "device_nodes",
    "kernel_evidence",
    "kernel_log",
    "libraries",
    "parse_elf",
    "read_elf",
]
