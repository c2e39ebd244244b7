"""Facts about a Linux host from sysfs, procfs and the loader's cache, and host memory for RDMA.

Every reader takes a :class:`HostTree`, so that the same code reads this machine, a capture of another machine, and a
folder of files that a test has written. Only ``nvml_facts`` needs a library. A file that exists and cannot be read is
listed in :attr:`HostTree.unreadable`.
"""

from __future__ import annotations

from gdrkit.host._fanotify import OpenedFile, OpenReports, open_by_handle
from gdrkit.host._libc import (
    acting_as,
    allow_set_group_id,
    die_with_parent,
    drop_write_capabilities,
    file_system_type,
    read_removed_names,
    rename_without_replacing,
    separate_umask,
    watch_removed_names,
)
from gdrkit.host.config_space import AcsControl, ConfigSpace, config_space, parse_config_space
from gdrkit.host.container import container_hints, virtual_machine_hint
from gdrkit.host.distance import Distance, pci_distance, pci_path
from gdrkit.host.gpu_traffic import GpuTraffic, GpuTrafficCounter, WrappingCounter
from gdrkit.host.identity import DMI_NAMES, HostIdentity, dmi_strings, host_identity
from gdrkit.host.infiniband import PortFacts, RdmaDevice, rdma_devices
from gdrkit.host.kernel import KernelFacts, kernel_facts, nvidia_driver_version
from gdrkit.host.libraries import cached_libraries, find_libraries, find_library
from gdrkit.host.limits import Limits, process_limits, raise_open_files_limit
from gdrkit.host.memory import BorrowedHostMemory, HostAllocator, HostBuffer, HostMemory, MappedFile
from gdrkit.host.mounts import BlockDevice, Mount, block_device, mount_of, mounts
from gdrkit.host.nvme import NvmeController, nvme_controllers
from gdrkit.host.nvml import GpuHealth, GpuLink, NvmlFacts, nvml_facts
from gdrkit.host.pci import (
    PciDevice,
    habana_accelerators,
    is_bridge,
    is_gpu,
    is_nic,
    is_nvme,
    nvidia_gpus,
    pci_devices,
)
from gdrkit.host.port_counters import PortCounters, PortGrowth, port_counters, port_growth, read_port_counters
from gdrkit.host.private import PrivateFolder
from gdrkit.host.process import (
    ProcessIdentity,
    descendants,
    is_running,
    process_identity,
    processor_wait_s,
    this_process,
)
from gdrkit.host.state import STATE_VARIABLE, state_folder
from gdrkit.host.tree import DiskFiles, Files, HostTree, Unreadable

__all__ = [
    "DMI_NAMES",
    "STATE_VARIABLE",
    "AcsControl",
    "BlockDevice",
    "BorrowedHostMemory",
    "ConfigSpace",
    "DiskFiles",
    "Distance",
    "Files",
    "GpuHealth",
    "GpuLink",
    "GpuTraffic",
    "GpuTrafficCounter",
    "HostAllocator",
    "HostBuffer",
    "HostIdentity",
    "HostMemory",
    "HostTree",
    "KernelFacts",
    "Limits",
    "MappedFile",
    "Mount",
    "NvmeController",
    "NvmlFacts",
    "OpenReports",
    "OpenedFile",
    "PciDevice",
    "PortCounters",
    "PortFacts",
    "PortGrowth",
    "PrivateFolder",
    "ProcessIdentity",
    "RdmaDevice",
    "Unreadable",
    "WrappingCounter",
    "acting_as",
    "allow_set_group_id",
    "block_device",
    "cached_libraries",
    "config_space",
    "container_hints",
    "descendants",
    "die_with_parent",
    "dmi_strings",
    "drop_write_capabilities",
    "file_system_type",
    "find_libraries",
    "find_library",
    "habana_accelerators",
    "host_identity",
    "is_bridge",
    "is_gpu",
    "is_nic",
    "is_nvme",
    "is_running",
    "kernel_facts",
    "mount_of",
    "mounts",
    "nvidia_driver_version",
    "nvidia_gpus",
    "nvme_controllers",
    "nvml_facts",
    "open_by_handle",
    "parse_config_space",
    "pci_devices",
    "pci_distance",
    "pci_path",
    "port_counters",
    "port_growth",
    "process_identity",
    "process_limits",
    "processor_wait_s",
    "raise_open_files_limit",
    "rdma_devices",
    "read_port_counters",
    "read_removed_names",
    "rename_without_replacing",
    "separate_umask",
    "state_folder",
    "this_process",
    "virtual_machine_hint",
    "watch_removed_names",
]
