"""Readers of evidence about the hardware and software below an API: libraries, descriptors, kernel devices, kernel log.

This package only reports observations. :mod:`gdrkit.report.substrate` derives from them on which substrate an API ran:
on hardware, on software of the kernel, or on a software twin.
"""

from __future__ import annotations

from gdrkit.evidence.descriptors import HeldDmabuf, descriptor_targets, device_nodes, held_dmabufs
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
from gdrkit.evidence.netlink import (
    RdmaQueuePair,
    RdmaRegion,
    TcpSocket,
    rdma_queue_pairs,
    rdma_regions,
    tcp_sockets,
)

__all__ = [
    "SOFTWARE_DRIVERS",
    "DeviceNode",
    "ElfFile",
    "ElfNote",
    "GpuEvidence",
    "HeldDmabuf",
    "KernelEvidence",
    "KernelLog",
    "LoadedLibrary",
    "RdmaEvidence",
    "RdmaQueuePair",
    "RdmaRegion",
    "TcpSocket",
    "describe_library",
    "descriptor_targets",
    "device_nodes",
    "held_dmabufs",
    "kernel_evidence",
    "kernel_log",
    "libraries",
    "parse_elf",
    "rdma_queue_pairs",
    "rdma_regions",
    "read_elf",
    "tcp_sockets",
]
