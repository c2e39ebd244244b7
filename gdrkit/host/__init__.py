"""What Linux says about a host, read from sysfs, procfs and the loader's cache.

Level 2. Every reader takes a :class:`HostTree`, whose root is an argument, so that the same code reads this machine, a
captured one and a tree that a case wrote. Nothing here needs a driver, a library or a privilege; what could not be read
is kept on the tree and belongs to the answer.
"""

from __future__ import annotations

from gdrkit.host.container import container_hints
from gdrkit.host.infiniband import PortFacts, RdmaDevice, rdma_devices
from gdrkit.host.kernel import KernelFacts, kernel_facts, nvidia_driver_version
from gdrkit.host.libraries import cached_libraries, find_library
from gdrkit.host.limits import Limits, process_limits
from gdrkit.host.pci import PciDevice, nvidia_gpus, pci_devices
from gdrkit.host.process import ProcessIdentity, is_running, this_process
from gdrkit.host.tree import HostTree, Unreadable

__all__ = [
    "HostTree",
    "KernelFacts",
    "Limits",
    "PciDevice",
    "PortFacts",
    "ProcessIdentity",
    "RdmaDevice",
    "Unreadable",
    "cached_libraries",
    "container_hints",
    "find_library",
    "is_running",
    "kernel_facts",
    "nvidia_driver_version",
    "nvidia_gpus",
    "pci_devices",
    "process_limits",
    "rdma_devices",
    "this_process",
]
