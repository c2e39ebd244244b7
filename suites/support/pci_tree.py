"""Synthetic sysfs trees with a GPU and NICs at known places of the PCI bus, for cases about the nearest NIC."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.host import HostTree

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["GPU_ADDRESS", "PCI_PATHS", "SWITCH_PATH", "create_pci_tree", "make_pci_paths"]

GPU_ADDRESS = "0000:03:00.0"
# The path of a PCIe switch below sys/devices. The tree has three host bridges: 0000:00 with this switch and 0000:40,
# both on NUMA node 0, and 0000:80 on NUMA node 1. The addresses 0000:02:* are the downstream ports of the switch.
SWITCH_PATH = "pci0000:00/0000:00:01.0/0000:01:00.0"
# The path below sys/devices and the NUMA node of each PCI device, by its PCI address.
PCI_PATHS = {
    GPU_ADDRESS: (f"{SWITCH_PATH}/0000:02:00.0/{GPU_ADDRESS}", 0),
    "0000:04:00.0": (f"{SWITCH_PATH}/0000:02:00.0/0000:04:00.0", 0),
    "0000:05:00.0": (f"{SWITCH_PATH}/0000:02:01.0/0000:05:00.0", 0),
    # This NIC is below a second switch, which is below the first switch.
    "0000:0a:00.0": (f"{SWITCH_PATH}/0000:02:02.0/0000:08:00.0/0000:09:00.0/0000:0a:00.0", 0),
    "0000:06:00.0": ("pci0000:00/0000:00:02.0/0000:06:00.0", 0),
    "0000:41:00.0": ("pci0000:40/0000:40:01.0/0000:41:00.0", 0),
    "0000:81:00.0": ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
}


def create_pci_tree(
    root: Path, address_by_nic: Mapping[str, str], *, pci_paths: Mapping[str, tuple[str, int]] = PCI_PATHS
) -> HostTree:
    """Create the sysfs files of PCI devices and of RDMA devices below `root`.

    `address_by_nic` maps the name of each RDMA device to its PCI address.
    """
    for address, (path, numa_node) in pci_paths.items():
        folder = root / "sys/devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa_node}\n")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/{path}")
    for name, address in address_by_nic.items():
        nic_folder = root / "sys/class/infiniband" / name
        nic_folder.mkdir(parents=True)
        # gdrkit reads only the last component of this link, so its target need not exist.
        (nic_folder / "device").symlink_to(f"../../../{address}")
    return HostTree(root)


def make_pci_paths(gpu_address: str) -> dict[str, tuple[str, int]]:
    """Return PCI_PATHS with the GPU at another PCI address, below the same port of the switch."""
    path, numa_node = PCI_PATHS[GPU_ADDRESS]
    paths_without_gpu = {
        address: path_and_node for address, path_and_node in PCI_PATHS.items() if address != GPU_ADDRESS
    }
    return paths_without_gpu | {gpu_address: (f"{path.rpartition('/')[0]}/{gpu_address}", numa_node)}
