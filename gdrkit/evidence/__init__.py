"""Readers of evidence: libraries, file descriptors, kernel device interfaces, kernel log.

This package only reports observations. :mod:`gdrkit.report.substrate` derives from them on which substrate an API ran.
"""

from __future__ import annotations

from gdrkit.evidence.descriptors import descriptors, device_nodes
from gdrkit.evidence.elf import ElfFile, ElfNote, parse_elf, read_elf
from gdrkit.evidence.genuine_files import DeviceNode
from gdrkit.evidence.kernel_devices import (
    SOFTWARE_DRIVERS,
    GpuEvidence,
    KernelEvidence,
    RdmaEvidence,
    kernel_evidence,
)
from gdrkit.evidence.kernel_log import KernelLog, kernel_log
from gdrkit.evidence.libraries import LoadedLibrary, describe_library, libraries

__all__ = [
    "SOFTWARE_DRIVERS",
    "DeviceNode",
    "ElfFile",
    "ElfNote",
    "GpuEvidence",
    "KernelEvidence",
    "KernelLog",
    "LoadedLibrary",
    "RdmaEvidence",
    "describe_library",
    "descriptors",
    "device_nodes",
    "kernel_evidence",
    "kernel_log",
    "libraries",
    "parse_elf",
    "read_elf",
]
