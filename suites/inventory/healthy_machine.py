"""A synthetic host without defects: the files that the doctor reads, in a folder, and the facts of the APIs.

The host has a PCIe switch with a GPU, a ConnectX NIC with RoCE and an NVMe drive. nvidia-fs, nvidia_peermem, cuFile and
UCX are installed. Each case changes a few files or facts.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gdrkit import serialization
from gdrkit.evidence import KernelLog
from gdrkit.host import DiskFiles, GpuLink, HostTree, NvmlFacts
from gdrkit.inventory import (
    CudaDeviceFacts,
    CudaFacts,
    Machine,
    NicFacts,
    Observation,
    RouteFacts,
    VerbsFacts,
    probe,
)
from gdrkit.inventory.gpu_processes import GPU_PROCESSES, NOT_READABLE, GpuProcess
from gdrkit.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "ACS_REDIRECT",
    "GPU_ADDRESS",
    "GPU_SWITCH_PORT",
    "HEALTHY_FILES",
    "LINKS",
    "NIC_ADDRESS",
    "NVME_ADDRESS",
    "make_config_space",
    "make_gpu_processes",
    "make_machine",
]

# PCI addresses. PORTS has, for each device, the downstream port of the switch.
GPU_ADDRESS, NIC_ADDRESS, NVME_ADDRESS = "0000:03:00.0", "0000:04:00.0", "0000:05:00.0"
ROOT_PORT, SWITCH = "0000:00:01.0", "0000:01:00.0"
PORTS = {GPU_ADDRESS: "0000:02:00.0", NIC_ADDRESS: "0000:02:01.0", NVME_ADDRESS: "0000:02:02.0"}
GPU_SWITCH_PORT = PORTS[GPU_ADDRESS]
# An ACS control word with the bits source validation, request redirect, completion redirect, upstream forwarding.
ACS_REDIRECT = 0x1D

_SWITCH_PATH = f"pci0000:00/{ROOT_PORT}/{SWITCH}"
# Each PCI function, by its address: path below /sys/devices, vendor, device, class, driver and link width.
_PCI_FUNCTIONS = {
    ROOT_PORT: (f"pci0000:00/{ROOT_PORT}", 0x8086, 0x352A, 0x060400, "pcieport", 16),
    SWITCH: (_SWITCH_PATH, 0x1000, 0xC030, 0x060400, "pcieport", 16),
    **{
        port: (f"{_SWITCH_PATH}/{port}", 0x1000, 0xC030, 0x060400, "pcieport", 4 if device == NVME_ADDRESS else 16)
        for device, port in PORTS.items()
    },
    GPU_ADDRESS: (f"{_SWITCH_PATH}/{PORTS[GPU_ADDRESS]}/{GPU_ADDRESS}", 0x10DE, 0x2335, 0x030200, "nvidia", 16),
    NIC_ADDRESS: (f"{_SWITCH_PATH}/{PORTS[NIC_ADDRESS]}/{NIC_ADDRESS}", 0x15B3, 0x1021, 0x020000, "mlx5_core", 16),
    NVME_ADDRESS: (f"{_SWITCH_PATH}/{PORTS[NVME_ADDRESS]}/{NVME_ADDRESS}", 0x144D, 0xA824, 0x010802, "nvme", 4),
}
_CUFILE_JSON = """{
    // The recommended settings.
    "logging": { "dir": "/var/log" },
    "properties": {
        "allow_compat_mode": false, /* a transfer that cannot be direct fails */
        "use_pci_p2pdma": true,
        "io_batchsize": 128,
        "posix_pool_slab_count": [128, 128],
    },
}
"""


def make_config_space(
    *, acs_control: int | None = None, ats_enabled: bool | None = None, read_request_bytes: int = 4096
) -> bytes:
    """Return a configuration space of 4 KiB with the PCIe capability.

    If `acs_control` is not None, it has the capability ACS with this control word. If `ats_enabled` is not None, it has
    the capability ATS.
    """
    data = bytearray(4096)
    # The status register announces a list of capabilities: power management at 0x40, and PCIe at 0x60.
    struct.pack_into("<H", data, 0x06, 0x10)
    data[0x34], data[0x40], data[0x41] = 0x40, 0x01, 0x60
    data[0x60] = 0x10
    # The device control register: the maximum read request size, and relaxed ordering.
    struct.pack_into("<H", data, 0x68, (read_request_bytes.bit_length() - 8) << 12 | 0x10)
    # As on real devices, the first extended capability is error reporting (ID 1). ACS (ID 0x0D) is at 0x150, and ATS
    # (ID 0x0F) at 0x160. A header has the ID, the version (from bit 16) and the offset of the next capability (from bit
    # 20). Then ACS and ATS have a capability register and a control register.
    next_offset = 0x150 if acs_control is not None else 0x160 if ats_enabled is not None else 0
    struct.pack_into("<I", data, 0x100, 0x0001 | 2 << 16 | next_offset << 20)
    if acs_control is not None:
        struct.pack_into(
            "<IHH", data, 0x150, 0x000D | 1 << 16 | (0x160 if ats_enabled is not None else 0) << 20, 0x1F, acs_control
        )
    if ats_enabled is not None:
        struct.pack_into("<IHH", data, 0x160, 0x000F | 1 << 16, 0, 0x8000 if ats_enabled else 0)
    return bytes(data)


def _make_function_files() -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {}
    for address, (path, vendor_id, device_id, class_code, _, link_width) in _PCI_FUNCTIONS.items():
        folder = f"/sys/devices/{path}"
        is_bridge = class_code == 0x060400
        files |= {
            f"{folder}/vendor": f"{vendor_id:#06x}\n",
            f"{folder}/device": f"{device_id:#06x}\n",
            f"{folder}/class": f"{class_code:#08x}\n",
            f"{folder}/numa_node": "0\n",
            f"{folder}/current_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{folder}/current_link_width": f"{link_width}\n",
            f"{folder}/max_link_width": f"{link_width}\n",
            f"{folder}/config": make_config_space(
                acs_control=0x01 if is_bridge else None, ats_enabled=True if address == NIC_ADDRESS else None
            ),
        }
    return files


_NIC_PORT_FOLDER = "/sys/class/infiniband/mlx5_0/ports/1"
# The host has 2 TiB of memory in pages of 4 KiB. Linux writes no start_pfn for a zone without memory, here Device.
_ZONEINFO = (
    "Node 0, zone   Normal\n        spanned  535822336\n        present  535822336\n  start_pfn:           1048576\n"
    "Node 0, zone   Device\n        spanned  0\n        present  0\n"
)
HEALTHY_FILES: dict[str, str | bytes] = {
    **_make_function_files(),
    "/sys/kernel/iommu_groups/7/type": "identity\n",
    "/sys/class/infiniband/mlx5_0/hca_type": "MT4129\n",
    "/sys/class/infiniband/mlx5_0/fw_ver": "28.41.1000\n",
    "/sys/class/infiniband/mlx5_0/node_guid": "b83f:d203:00a1:7c52\n",
    f"{_NIC_PORT_FOLDER}/state": "4: ACTIVE\n",
    f"{_NIC_PORT_FOLDER}/phys_state": "5: LinkUp\n",
    f"{_NIC_PORT_FOLDER}/rate": "400 Gb/sec (4X NDR)\n",
    f"{_NIC_PORT_FOLDER}/link_layer": "Ethernet\n",
    f"{_NIC_PORT_FOLDER}/counters/link_downed": "0\n",
    f"{_NIC_PORT_FOLDER}/gids/0": "fe80:0000:0000:0000:ba3f:d2ff:fea1:7c52\n",
    f"{_NIC_PORT_FOLDER}/gids/1": "0000:0000:0000:0000:0000:ffff:0a09:0001\n",
    f"{_NIC_PORT_FOLDER}/gids/2": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    f"{_NIC_PORT_FOLDER}/gid_attrs/types/0": "IB/RoCE v1\n",
    f"{_NIC_PORT_FOLDER}/gid_attrs/types/1": "RoCE v2\n",
    f"/sys/devices/{_PCI_FUNCTIONS[NIC_ADDRESS][0]}/net/eth0/mtu": "9000\n",
    "/sys/class/net/eth0/mtu": "9000\n",
    "/sys/class/nvme/nvme0/transport": "pcie\n",
    "/sys/class/nvme/nvme0/model": "PM9A3\n",
    "/sys/class/block/nvme0n1/queue/logical_block_size": "512\n",
    "/sys/devices/block/nvme0n1/nvme0n1p1/partition": "1\n",
    "/sys/module/nvidia_peermem/version": "580.159.04\n",
    "/sys/kernel/mm/memory_peers/nv_mem/version": "580.159.04\n",
    "/sys/module/nvidia_fs/parameters/rw_stats_enabled": "1\n",
    "/sys/module/nvme_core/parameters/multipath": "N\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/nvme0n1p1 intel_iommu=on iommu=pt\n",
    # BAR1 of the GPU has 256 GiB and begins at 4 TiB.
    f"/sys/devices/{_PCI_FUNCTIONS[GPU_ADDRESS][0]}/resource": (
        "0x00000000b8000000 0x00000000b8ffffff 0x0000000000040200\n"
        "0x0000040000000000 0x0000043fffffffff 0x000000000014220c\n"
    ),
    "/proc/zoneinfo": _ZONEINFO,
    "/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vme sse avx512f\n",
    "/proc/kallsyms": "0000000000000000 T ib_register_peer_memory_client\n0000000000000000 d p2pdma_pgmap_ops\n",
    "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
    "/proc/self/limits": (
        "Max open files            1048576              1048576              files\n"
        "Max locked memory         unlimited            unlimited            bytes\n"
    ),
    "/proc/sys/fs/file-nr": "11264\t0\t9223372036854775807\n",
    "/proc/sys/kernel/yama/ptrace_scope": "1\n",
    "/proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "/proc/self/mountinfo": (
        "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw,data=ordered\n"
        "23 22 0:21 / /proc rw - proc proc rw\n"
    ),
    "/proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    ),
    "/proc/driver/nvidia/params": (
        'GrdmaPciTopoCheckOverride: 0\nRegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"\n'
    ),
    "/proc/driver/nvidia-fs/version": "version: 2.28.4\n",
    "/proc/driver/nvidia-fs/devcount": "1\n",
    "/proc/driver/nvidia-fs/modules": "nvme: p2p\n",
    "/proc/driver/nvidia-fs/stats": "GDS Version: 1.15\nReads\t\t\t\t: n=24 ok=24 err=0\n",
    "/boot/config-6.8.0-60-generic": (
        "CONFIG_DMA_SHARED_BUFFER=y\nCONFIG_PCI_P2PDMA=y\nCONFIG_RANDOMIZE_MEMORY=y\n"
        "CONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING=0xa\n"
    ),
    "/etc/cufile.json": _CUFILE_JSON,
    "/dev/infiniband/uverbs0": "",
    "/dev/nvidiactl": "",
    "/dev/nvidia-fs0": "",
    "/run/udev/data/b259:1": "E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n",
    "/usr/lib/x86_64-linux-gnu/libucs.so.0": "",
    "/usr/lib/x86_64-linux-gnu/ucx/libuct_cuda.so.0": "",
    "/usr/lib/x86_64-linux-gnu/libcufile.so.0": "",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1": "",
}
LINKS: dict[str, str] = {
    **{
        f"/sys/bus/pci/devices/{address}": f"../../../devices/{function_fields[0]}"
        for address, function_fields in _PCI_FUNCTIONS.items()
    },
    **{
        f"/sys/devices/{function_fields[0]}/driver": f"/sys/bus/pci/drivers/{function_fields[4]}"
        for function_fields in _PCI_FUNCTIONS.values()
    },
    f"/sys/devices/{_PCI_FUNCTIONS[GPU_ADDRESS][0]}/iommu_group": "/sys/kernel/iommu_groups/7",
    "/sys/class/infiniband/mlx5_0/device": f"../../../devices/{_PCI_FUNCTIONS[NIC_ADDRESS][0]}",
    "/sys/class/nvme/nvme0/device": f"../../../devices/{_PCI_FUNCTIONS[NVME_ADDRESS][0]}",
    "/sys/dev/block/259:1": "../../devices/block/nvme0n1/nvme0n1p1",
}

_CUDA_ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "DMA_BUF_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_SUPPORTED": 1,
    "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
}


def _write_files(root: Path, files: Mapping[str, str | bytes | None], links: Mapping[str, str | None]) -> None:
    for absolute_path, content in files.items():
        if content is not None:
            path = root / absolute_path.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for absolute_path, target in links.items():
        if target is not None:
            path = root / absolute_path.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)


def make_gpu_processes(*changes: Mapping[str, Any], unreadable: str = "") -> dict[str, Observation]:
    """Return the observation of the processes of one job. Each of `changes` adds a process with these fields changed.

    `unreadable` states what could not be read, and is empty if everything was read.
    """
    process = GpuProcess(
        process_id=4711,
        program="python",
        user_id=1000,
        pid_namespace=4026531836,
        ipc_namespace=4026531839,
        gpus=("nvidia0",),
        has_contexts=True,
        descriptors_count=90,
        descriptors_max=1024,
        dmabufs_count=0,
        dmabuf_bytes=0,
        environment={"SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "0,1"},
    )
    processes = [
        replace(process, process_id=process.process_id + index, **change) for index, change in enumerate(changes)
    ]
    json_by_title = {process.title: json.dumps(serialization.to_json_data(process)) for process in processes}
    return {
        GPU_PROCESSES: Observation(
            GPU_PROCESSES, seen=json_by_title | ({NOT_READABLE: unreadable} if unreadable else {})
        )
    }


def make_machine(
    root: Path,
    *,
    files: Mapping[str, str | bytes | None] | None = None,
    links: Mapping[str, str | None] | None = None,
    cuda_attributes: Mapping[str, int] | None = None,
    nic_supports_dmabuf: bool = True,
    working_registration_methods: tuple[str, ...] = ("dmabuf", "peer_memory"),
    kernel_log_lines: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    observations: Mapping[str, Observation] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Machine:
    """Write the files of the host to `root`, with changes, and return the host as a :class:`Machine`.

    Parameters
    ----------
    root : Path
        Empty folder for the files.
    files, links : mapping, optional
        Other contents of files and other targets of links, by path. None removes the file or the link.
    cuda_attributes : mapping, optional
        Other attributes of the CUDA device, by name without the prefix ``CU_DEVICE_ATTRIBUTE_``.
    nic_supports_dmabuf : bool
        Whether the NIC supports dma-buf regions.
    working_registration_methods : tuple of str
        The registration routes that work.
    kernel_log_lines : tuple of str
        Lines of the kernel log.
    environment : mapping, optional
        Environment variables.
    observations : mapping, optional
        Results of experiments, by name.
    facts : mapping, optional
        Other values for fields of the facts, by field name.
    """
    _write_files(root, {**HEALTHY_FILES, **(files or {})}, {**LINKS, **(links or {})})
    facts_of_files = probe(HostTree(root), environment=environment or {}, query_apis=False)
    cuda_device = CudaDeviceFacts(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-0",
        pci_bus_id=GPU_ADDRESS,
        attributes=_CUDA_ATTRIBUTES | dict(cuda_attributes or {}),
    )
    nic = NicFacts(
        name="mlx5_0", driver="mlx5_core", node_guid="", active_ports=(1,), dmabuf=nic_supports_dmabuf, failure=None
    )
    gpu_link = GpuLink(
        pci_bus_id=GPU_ADDRESS,
        link_generation=5,
        link_generation_max=5,
        link_width=16,
        link_width_max=16,
        replay_count=0,
        bar1_bytes=256 * GIB,
        bar1_free_bytes=255 * GIB,
        common_ancestor={},
    )
    api_facts: dict[str, Any] = {
        "cuda": CudaFacts(driver_version="13.0", devices=(cuda_device,), libraries=()),
        "verbs": VerbsFacts(nics=(nic,), libraries=()),
        "routes": tuple(
            RouteFacts(
                device_index=0, nic="mlx5_0", way=route, possible=route in working_registration_methods, failure=None
            )
            for route in ("dmabuf", "peer_memory")
        ),
        "nvml": NvmlFacts(driver_version="580.159.04", gpus=(gpu_link,)),
    }
    return Machine(
        files=DiskFiles(root),
        facts=replace(facts_of_files, **(api_facts | dict(facts or {}))),
        kernel_log=KernelLog(lines=kernel_log_lines, unreadable=None),
        environment=dict(environment or {}),
        observations=make_gpu_processes({}, {}) | dict(observations or {}),
    )
