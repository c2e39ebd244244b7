"""Changes of the healthy host that make each rule of the doctor fail, and changes after which a rule still passes.

Rules that need an experiment on devices are tested in test_experiments.py.
"""

from __future__ import annotations

from typing import Any

from inventory.healthy_machine import (
    ACS_REDIRECT,
    GPU_ADDRESS,
    GPU_SWITCH_PORT,
    HEALTHY_FILES,
    NIC_ADDRESS,
    make_config_space,
    make_gpu_processes,
)

from gdrkit.errors import Reason
from gdrkit.host import GpuHealth, GpuLink, NvmlFacts
from gdrkit.inventory import ApiFailure, CudaFacts, Observation
from gdrkit.inventory.observation import DESCRIPTOR_0
from gdrkit.units import GIB, MIB

__all__ = [
    "EXPANDABLE_SEGMENTS_VARIABLES",
    "FAILING_EXAMPLES",
    "HCA_FOLDER",
    "JOB_VARIABLES",
    "NO_PEER_MEMORY_FILES",
    "NO_RDMA_FILES",
    "PASSING_EXAMPLES",
    "PEER_MEMORY_CLIENT_FILE",
    "PTRACE_CAPABILITY_FILES",
    "make_failed_driver_open",
]

_SWITCH_PATH = "pci0000:00/0000:00:01.0/0000:01:00.0"
_GPU_FOLDER = f"/sys/devices/{_SWITCH_PATH}/{GPU_SWITCH_PORT}/{GPU_ADDRESS}"
_NIC_FOLDER = f"/sys/devices/{_SWITCH_PATH}/0000:02:01.0/{NIC_ADDRESS}"
HCA_FOLDER = "/sys/class/infiniband/mlx5_0"
_NIC_PORT_FOLDER = f"{HCA_FOLDER}/ports/1"
NO_RDMA_FILES: dict[str, str | None] = {
    path: None for path in HEALTHY_FILES if path.startswith("/sys/class/infiniband/")
}
PEER_MEMORY_CLIENT_FILE = "/sys/kernel/mm/memory_peers/nv_mem/version"
NO_PEER_MEMORY_FILES: dict[str, str | None] = {
    "/sys/module/nvidia_peermem/version": None,
    PEER_MEMORY_CLIENT_FILE: None,
}
_NO_NVIDIA_FS_FILES: dict[str, str | None] = {
    f"/proc/driver/nvidia-fs/{name}": None for name in ("version", "modules", "stats", "devcount")
}
# Contents of the file `resource` of the GPU. BAR1 begins at 42 TiB.
_HIGH_BAR1_RESOURCE = (
    "0x00000000b8000000 0x00000000b8ffffff 0x0000000000040200\n"
    "0x00002a0000000000 0x00002a3fffffffff 0x000000000014220c\n"
)
_REFUSED_RANGE_TEXT = "range=0x2a0000000000-0x2a3fffffffff, maximum=0xbffffffffff"
_VIRTUAL_MACHINE_FILES = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vme hypervisor\n"}
_SLOW_LINK_FILES = {f"{_GPU_FOLDER}/current_link_speed": "2.5 GT/s PCIe\n"}
# The numbers are the link generation and its maximum, the link width and its maximum, and the replay count.
_SMALL_BAR1_LINK = GpuLink(
    GPU_ADDRESS, 5, 5, 16, 16, 0, bar1_bytes=256 * MIB, bar1_free_bytes=200 * MIB, common_ancestor={}
)
_FULL_BAR1_LINK = GpuLink(GPU_ADDRESS, 5, 5, 16, 16, 0, bar1_bytes=256 * GIB, bar1_free_bytes=MIB, common_ancestor={})
JOB_VARIABLES = {"SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "0,1"}
# The process has CAP_SYS_PTRACE.
PTRACE_CAPABILITY_FILES = {"/proc/self/status": "CapEff:\t0000000000080000\n"}
EXPANDABLE_SEGMENTS_VARIABLES = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def _make_mountinfo(file_system: str, options: str = "rw") -> dict[str, str]:
    return {"/proc/self/mountinfo": f"22 1 259:1 / / rw - {file_system} /dev/nvme0n1p1 {options}\n"}


def make_failed_driver_open(reason: Reason, status: int | None = None) -> dict[str, Observation]:
    """Return the observation that cuFileDriverOpen failed, for example with 5004 (CU_FILE_DRIVER_VERSION_MISMATCH)."""
    failure = ApiFailure(
        api="cufile",
        operation="cuFileDriverOpen",
        status=status,
        status_name="",
        errno=None,
        reason=reason,
        message="cuFileDriverOpen failed",
        what_to_do="",
    )
    return {"driver_open": Observation("driver_open", failure=failure)}


def _make_link_with_errors(*, corrected: int = 0, uncorrected: int = 0, is_remapping_pending: bool = False) -> GpuLink:
    health = GpuHealth(
        serial="1650023000000",
        vbios="96.00.A0.00.01",
        gsp_firmware="580.159.04",
        is_ecc_enabled=True,
        corrected_errors=corrected,
        uncorrected_errors=uncorrected,
        is_remapping_pending=is_remapping_pending,
        has_remapping_failed=False,
        active_nvlinks=18,
    )
    return GpuLink(GPU_ADDRESS, 5, 5, 16, 16, 0, 256 * GIB, 255 * GIB, common_ancestor={}, health=health)


# The arguments of inventory.healthy_machine.make_machine, by the code of the rule and the name of the example. Each
# rule fails on the machine of its examples. A file or link with the value None does not exist on the machine. The facts
# `routes` are the attempts to register GPU memory with a NIC.
FAILING_EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("no-registration-route", "every route refused"): {
        "working_registration_methods": (),
        "files": NO_PEER_MEMORY_FILES,
    },
    ("peermem-symbols", "refused by the kernel"): {
        "kernel_log_lines": ("nvidia_peermem: disagrees about version of symbol ib_register_peer_memory_client",)
    },
    ("peermem-refused", "no client"): {"files": {PEER_MEMORY_CLIENT_FILE: None}, "working_registration_methods": ()},
    ("peermem-refused", "a registered module"): {"working_registration_methods": ()},
    ("no-dmabuf-region", "the NIC refuses"): {
        "nic_supports_dmabuf": False,
        "working_registration_methods": (),
        "files": NO_PEER_MEMORY_FILES,
    },
    ("no-dmabuf-region", "an old kernel"): {
        "facts": {"verbs": None, "routes": ()},
        "files": NO_PEER_MEMORY_FILES | {"/proc/sys/kernel/osrelease": "5.4.0-generic\n"},
    },
    ("no-dmabuf-region", "a kernel without support"): {
        "facts": {"verbs": None, "routes": ()},
        "files": NO_PEER_MEMORY_FILES | {"/boot/config-6.8.0-60-generic": "CONFIG_DMA_SHARED_BUFFER=y\n"},
    },
    ("no-dmabuf-export", "the driver refuses"): {
        "cuda_attributes": {"DMA_BUF_SUPPORTED": 0},
        "files": NO_PEER_MEMORY_FILES,
    },
    ("no-dmabuf-export", "the proprietary module"): {
        "facts": {"cuda": None},
        "files": NO_PEER_MEMORY_FILES
        | {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04\n"},
    },
    ("no-gpudirect", "a consumer GPU"): {"cuda_attributes": {"GPU_DIRECT_RDMA_SUPPORTED": 0}},
    ("topology-veto", "denied"): {"files": {"/proc/driver/nvidia/params": "GrdmaPciTopoCheckOverride: 2\n"}},
    ("gpu-too-old", "Volta"): {
        "cuda_attributes": {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 0},
        "working_registration_methods": (),
        "files": NO_PEER_MEMORY_FILES,
    },
    ("gpu-too-old", "Pascal without CUDA"): {
        "facts": {"cuda": None, "routes": ()},
        "files": NO_PEER_MEMORY_FILES | {f"{_GPU_FOLDER}/device": "0x15f8\n"},
    },
    ("gpu-too-old", "Fermi"): {"cuda_attributes": {"COMPUTE_CAPABILITY_MAJOR": 2}},
    ("gpu-too-old", "driver 470"): {
        "working_registration_methods": (),
        "files": NO_PEER_MEMORY_FILES
        | {"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02\n"},
    },
    ("gpu-too-old", "CUDA 11.4"): {
        "facts": {"cuda": CudaFacts(driver_version="11.4", devices=(), libraries=()), "routes": ()},
        "files": NO_PEER_MEMORY_FILES,
    },
    ("nic-too-old", "ConnectX-3 Pro"): {
        "files": {f"{HCA_FOLDER}/hca_type": "MT4103\n"},
        "working_registration_methods": (),
    },
    ("nic-too-old", "Connect-IB without a driver"): {
        "links": {f"{HCA_FOLDER}/device": None},
        "files": NO_RDMA_FILES | {f"{_NIC_FOLDER}/device": "0x1011\n"},
        "working_registration_methods": (),
    },
    ("nic-too-old", "InfiniHost"): {
        "files": {f"{HCA_FOLDER}/hca_type": "MT25208\n"},
        "working_registration_methods": (),
    },
    ("nic-too-old", "firmware refused by the driver"): {
        "kernel_log_lines": ("mlx5_core 0000:04:00.0: Driver cmdif rev(5) differs from firmware's(4)",)
    },
    ("acs-redirect", "a port of the switch"): {
        "files": {f"/sys/devices/{_SWITCH_PATH}/{GPU_SWITCH_PORT}/config": make_config_space(acs_control=ACS_REDIRECT)}
    },
    ("ats-off-in-vm", "ATS off"): {
        "files": _VIRTUAL_MACHINE_FILES | {f"{_NIC_FOLDER}/config": make_config_space(ats_enabled=False)}
    },
    ("iommu-translates", "the group is translated"): {"files": {"/sys/kernel/iommu_groups/7/type": "DMA-FQ\n"}},
    ("iommu-translates", "pass-through on Arm"): {
        "files": {"/proc/sys/kernel/osrelease": "6.8.0-60-generic\n"},
        "facts": {"machine": "aarch64"},
    },
    ("far-apart", "another socket"): {
        "links": {f"/sys/bus/pci/devices/{GPU_ADDRESS}": f"../../../devices/pci0000:80/0000:80:01.0/{GPU_ADDRESS}"},
        "files": {
            f"/sys/devices/pci0000:80/0000:80:01.0/{GPU_ADDRESS}/{name}": content
            for name, content in {
                "vendor": "0x10de\n",
                "device": "0x2335\n",
                "class": "0x030200\n",
                "numa_node": "1\n",
            }.items()
        },
    },
    ("link-downgraded", "narrow"): {"files": {f"{_GPU_FOLDER}/current_link_width": "8\n"}},
    ("link-downgraded", "a slow NIC"): {"files": {f"{_NIC_FOLDER}/current_link_speed": "16.0 GT/s PCIe\n"}},
    ("link-downgraded", "slow under load"): {
        "files": _SLOW_LINK_FILES,
        "observations": {"load": Observation("load", seen={GPU_ADDRESS: "8.0 GT/s PCIe"})},
    },
    ("small-read-request", "128 bytes"): {
        "files": {f"{_NIC_FOLDER}/config": make_config_space(ats_enabled=True, read_request_bytes=128)}
    },
    ("gpu-errors", "fallen off the bus"): {
        "kernel_log_lines": ("NVRM: Xid (PCI:0000:03:00): 79, pid='<unknown>', GPU has fallen off the bus.",)
    },
    ("gpu-errors", "uncorrected errors"): {
        "facts": {"nvml": NvmlFacts("580.159.04", (_make_link_with_errors(uncorrected=2),))}
    },
    ("gpu-errors", "a row to be replaced"): {
        "facts": {"nvml": NvmlFacts("580.159.04", (_make_link_with_errors(is_remapping_pending=True),))}
    },
    ("port-down", "no cable"): {
        "files": {f"{_NIC_PORT_FOLDER}/state": "1: DOWN\n", f"{_NIC_PORT_FOLDER}/phys_state": "3: Disabled\n"}
    },
    ("small-mtu", "1500"): {"files": {"/sys/class/net/eth0/mtu": "1500\n"}},
    ("no-roce-gid", "RoCE v1 alone"): {"files": {f"{_NIC_PORT_FOLDER}/gid_attrs/types/1": "IB/RoCE v1\n"}},
    ("memlock-low", "8 MiB"): {
        "files": {"/proc/self/limits": "Max locked memory         8388608              8388608              bytes\n"}
    },
    ("cuda-ipc-refused", "PID namespaces"): {"observations": make_gpu_processes({}, {"pid_namespace": 4026532801})},
    ("descriptors-low", "a leak"): {
        "observations": make_gpu_processes({}, {"descriptors_count": 1000, "dmabufs_count": 900})
    },
    ("descriptors-low", "a small limit"): {
        "files": {"/proc/self/limits": "Max open files            256                  4096                 files\n"}
    },
    ("descriptors-low", "the machine"): {"files": {"/proc/sys/fs/file-nr": "90000\t0\t100000\n"}},
    ("no-device-nodes", "no uverbs"): {"files": {"/dev/infiniband/uverbs0": None}},
    ("no-device-nodes", "no nvidiactl"): {"files": {"/dev/nvidiactl": None}},
    ("nvidia-fs-absent", "neither path"): {
        "files": _NO_NVIDIA_FS_FILES | {"/proc/driver/nvidia/params": "GrdmaPciTopoCheckOverride: 0\n"},
    },
    ("nvidia-fs-absent", "not bound to nvme"): {"files": {"/proc/driver/nvidia-fs/modules": "lustre: \n"}},
    ("nvidia-fs-absent", "bound to nothing"): {"files": {"/proc/driver/nvidia-fs/modules": "\n"}},
    ("nvidia-fs-version", "unknown symbol"): {
        "kernel_log_lines": ("nvidia_fs: Unknown symbol nvidia_p2p_get_pages (err -2)",)
    },
    ("nvidia-fs-version", "refused by the library"): {"observations": make_failed_driver_open(Reason.OTHER, 5004)},
    ("p2pdma-off", "multipath"): {
        "files": _NO_NVIDIA_FS_FILES | {"/sys/module/nvme_core/parameters/multipath": "Y\n"},
    },
    ("kaslr-p2pdma", "in the kernel log"): {
        "files": _NO_NVIDIA_FS_FILES | {f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE},
        "kernel_log_lines": (f"Hotplugged memory exceeds maximum addressable address, {_REFUSED_RANGE_TEXT}",),
    },
    ("cufile-descriptor-0", "nodes are missing"): {"files": {"/dev/nvidia-fs0": None}},
    ("cufile-descriptor-0", "seen"): {
        "observations": {"driver_open": Observation("driver_open", seen={DESCRIPTOR_0: "was closed"})}
    },
    ("cufile-compat", "forced"): {"files": {"/etc/cufile.json": '{"properties": {"force_compat_mode": true}}'}},
    ("cufile-compat", "forced by the environment"): {"environment": {"CUFILE_FORCE_COMPAT_MODE": "true"}},
    ("silent-fallback", "in the log"): {
        "files": {"/var/log/cufile.log": "NOTICE cufio-drv:720 running in compatible mode\n"}
    },
    ("file-system", "ext4 without ordered data"): {"files": _make_mountinfo("ext4")},
    ("file-system", "btrfs"): {"files": _make_mountinfo("btrfs")},
    ("file-system", "device mapper"): {
        "files": _make_mountinfo("xfs") | {"/sys/devices/block/nvme0n1/nvme0n1p1/dm/uuid": "LVM-abc\n"}
    },
    ("direct-io", "large blocks"): {"files": {"/sys/class/block/nvme0n1/queue/logical_block_size": "16384\n"}},
    ("direct-io", "tmpfs alone"): {"files": {"/proc/self/mountinfo": "22 1 0:40 / / rw - tmpfs tmpfs rw\n"}},
    ("bar1-small", "256 MiB"): {"facts": {"nvml": NvmlFacts("580.159.04", (_SMALL_BAR1_LINK,))}},
    ("bar1-small", "full"): {"facts": {"nvml": NvmlFacts("580.159.04", (_FULL_BAR1_LINK,))}},
    ("udev-database", "none"): {"files": {"/run/udev/data/b259:1": None}},
    ("udev-database", "without the device"): {"files": {"/run/udev/data/b259:1": None, "/run/udev/data/b8:0": ""}},
    ("vmm-memory", "expandable segments"): {
        "environment": EXPANDABLE_SEGMENTS_VARIABLES,
        "cuda_attributes": {"GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 0},
    },
    ("pool-starved", "few slabs"): {
        "files": {"/etc/cufile.json": '{"properties": {"io_batchsize": 128, "posix_pool_slab_count": [16]}}'}
    },
    ("ucx-without-cuda", "no module"): {"files": {"/usr/lib/x86_64-linux-gnu/ucx/libuct_cuda.so.0": None}},
    ("driver-open", "no libcuda"): {"files": {"/usr/lib/x86_64-linux-gnu/libcuda.so.1": None}},
    ("driver-open", "hangs"): {"observations": make_failed_driver_open(Reason.TIMEOUT)},
}

# Arguments of the same form. The rule passes on the machine of the example.
PASSING_EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("no-registration-route", "peer memory alone"): {
        "working_registration_methods": ("peer_memory",),
        "nic_supports_dmabuf": False,
    },
    ("peermem-refused", "dma-buf instead"): {"working_registration_methods": ("dmabuf",)},
    ("peermem-refused", "a registered module, and nothing was tried"): {"facts": {"routes": ()}},
    ("peermem-refused", "ib_core is used"): {
        "files": {PEER_MEMORY_CLIENT_FILE: None, "/sys/module/ib_core/holders/nvidia_peermem": ""},
        "facts": {"routes": ()},
    },
    ("peermem-refused", "ib_uverbs is used"): {
        "files": {PEER_MEMORY_CLIENT_FILE: None, "/sys/module/ib_uverbs/holders/nvidia_peermem": ""},
        "facts": {"routes": ()},
    },
    ("no-dmabuf-region", "peer memory instead"): {
        "nic_supports_dmabuf": False,
        "working_registration_methods": ("peer_memory",),
    },
    ("no-dmabuf-export", "peer memory instead"): {"cuda_attributes": {"DMA_BUF_SUPPORTED": 0}},
    ("gpu-too-old", "peer memory instead"): {
        "cuda_attributes": {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 0}
    },
    ("gpu-too-old", "Turing"): {
        "cuda_attributes": {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 5},
        "files": NO_PEER_MEMORY_FILES,
        "working_registration_methods": ("dmabuf",),
    },
    ("nic-too-old", "old firmware that works"): {"files": {f"{HCA_FOLDER}/fw_ver": "28.34.1002\n"}},
    ("nic-too-old", "firmware of 2022"): {
        "files": {f"{HCA_FOLDER}/fw_ver": "28.35.1012\n"},
        "working_registration_methods": (),
    },
    ("acs-redirect", "source validation alone"): {
        "files": {f"/sys/devices/{_SWITCH_PATH}/{GPU_SWITCH_PORT}/config": make_config_space(acs_control=0x01)}
    },
    ("acs-redirect", "above the switch"): {
        "files": {"/sys/devices/pci0000:00/0000:00:01.0/config": make_config_space(acs_control=ACS_REDIRECT)}
    },
    ("ats-off-in-vm", "ATS on"): {"files": _VIRTUAL_MACHINE_FILES},
    ("iommu-translates", "no groups"): {"links": {f"{_GPU_FOLDER}/iommu_group": None}},
    ("link-downgraded", "slow when idle"): {
        "files": _SLOW_LINK_FILES,
        "observations": {"load": Observation("load", seen={GPU_ADDRESS: "32.0 GT/s PCIe"})},
    },
    ("gpu-errors", "corrected errors alone"): {
        "facts": {"nvml": NvmlFacts("580.159.04", (_make_link_with_errors(corrected=9),))}
    },
    ("gpu-errors", "another message of the driver"): {"kernel_log_lines": ("NVRM: Xid is a word of this text",)},
    ("memlock-low", "the capability"): {
        "files": {
            "/proc/self/limits": "Max locked memory         65536                65536                bytes\n",
            "/proc/self/status": "CapEff:\t0000000000004000\n",  # CAP_IPC_LOCK
        }
    },
    ("cuda-ipc-refused", "one GPU for each rank"): {
        "observations": make_gpu_processes(
            {"environment": JOB_VARIABLES | {"CUDA_VISIBLE_DEVICES": "0"}},
            {"environment": JOB_VARIABLES | {"CUDA_VISIBLE_DEVICES": "1"}},
        )
    },
    ("cuda-ipc-refused", "a monitor in a container"): {
        "observations": make_gpu_processes({}, {}, {"pid_namespace": 4026532801, "has_contexts": False})
    },
    ("cuda-ipc-refused", "a root process beside a job"): {
        "observations": make_gpu_processes({}, {}, {"user_id": 0, "environment": {}})
    },
    ("cuda-ipc-refused", "ptrace is allowed"): {
        "environment": EXPANDABLE_SEGMENTS_VARIABLES,
        "files": {"/proc/sys/kernel/yama/ptrace_scope": "0\n"},
    },
    ("cuda-ipc-refused", "the capability"): {
        "environment": EXPANDABLE_SEGMENTS_VARIABLES,
        "files": PTRACE_CAPABILITY_FILES,
    },
    ("cuda-ipc-refused", "expandable segments without a job"): {
        "environment": EXPANDABLE_SEGMENTS_VARIABLES,
        "observations": make_gpu_processes({"environment": {}}, {"environment": {}}),
    },
    ("descriptors-low", "the usual limit"): {
        "files": {"/proc/self/limits": "Max open files            1024                 524288               files\n"}
    },
    ("nvidia-fs-absent", "P2PDMA instead"): {"files": _NO_NVIDIA_FS_FILES},
    ("p2pdma-off", "nvidia-fs instead"): {"files": {"/sys/module/nvme_core/parameters/multipath": "Y\n"}},
    ("kaslr-p2pdma", "KASLR is off"): {
        "files": {f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE, "/proc/cmdline": "root=/dev/nvme0n1p1 nokaslr\n"}
    },
    ("kaslr-p2pdma", "Linux 6.15"): {
        "files": {f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE, "/proc/sys/kernel/osrelease": "6.15.0-1-generic\n"}
    },
    ("kaslr-p2pdma", "a large padding"): {
        "files": _NO_NVIDIA_FS_FILES
        | {
            f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE,
            "/boot/config-6.8.0-60-generic": (
                "CONFIG_RANDOMIZE_MEMORY=y\nCONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING=0x29\n"
            ),
        }
    },
    ("kaslr-p2pdma", "nvidia-fs instead"): {"files": {f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE}},
    ("kaslr-p2pdma", "P2PDMA has mapped BAR1"): {
        "files": _NO_NVIDIA_FS_FILES
        | {f"{_GPU_FOLDER}/resource": _HIGH_BAR1_RESOURCE, f"{_GPU_FOLDER}/p2pmem/size": "274877906944\n"}
    },
    ("cufile-descriptor-0", "nvidia-fs is not loaded"): {"files": _NO_NVIDIA_FS_FILES | {"/dev/nvidia-fs0": None}},
    ("cufile-descriptor-0", "descriptor 0 is still open"): {
        "files": {"/dev/nvidia-fs0": None},
        "observations": make_failed_driver_open(Reason.OTHER, 5001),  # CU_FILE_DRIVER_NOT_INITIALIZED
    },
    ("file-system", "xfs"): {"files": _make_mountinfo("xfs")},
    ("vmm-memory", "expandable segments"): {"environment": EXPANDABLE_SEGMENTS_VARIABLES},
    ("driver-open", "success"): {"observations": {"driver_open": Observation("driver_open", seen={"opened": "yes"})}},
}
