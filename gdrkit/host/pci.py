"""PCI devices as sysfs shows them. A GPU is recognised by its vendor and class, even if it has no driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = [
    "PciDevice",
    "habana_accelerators",
    "is_bridge",
    "is_gpu",
    "is_nic",
    "is_nvme",
    "nvidia_gpus",
    "pci_devices",
]

_PCI_DEVICES_FOLDER = "/sys/bus/pci/devices"
_VENDOR_NVIDIA = 0x10DE
_VENDOR_MELLANOX = 0x15B3
_VENDOR_HABANA = 0x1DA3
# The first number is a base class. The others contain base class and subclass (linux/pci_ids.h).
_BASE_CLASS_DISPLAY = 0x03
_CLASS_NVME, _CLASS_ETHERNET, _CLASS_INFINIBAND, _CLASS_3D, _CLASS_BRIDGE = 0x0108, 0x0200, 0x0207, 0x0302, 0x0604


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function on the PCI bus.

    Attributes
    ----------
    address : str
        Domain, bus, device and function, e.g. ``0000:1b:00.0``.
    vendor_id, device_id : int
        PCI IDs.
    class_code : int
        24 bits: base class, subclass, interface.
    driver : str or None
        The bound kernel driver.
    numa_node : int or None
        The nearest NUMA node; None if the firmware does not state it (sysfs has -1).
    iommu_group : str or None
        IOMMU group, if an IOMMU translates for the device.
    link_speed, link_width : str or None
        The PCIe link as trained, e.g. ``32.0 GT/s PCIe`` and ``16``.
    link_speed_max, link_width_max : str or None
        The most that both ends of the link support.
    """

    address: str
    vendor_id: int
    device_id: int
    class_code: int
    driver: str | None
    numa_node: int | None
    iommu_group: str | None
    link_speed: str | None
    link_width: str | None
    link_speed_max: str | None = None
    link_width_max: str | None = None


def pci_devices(tree: HostTree) -> tuple[PciDevice, ...]:
    """Return every PCI function, by address. A function with unreadable vendor, device or class is left out."""
    devices = []
    for address in tree.names(_PCI_DEVICES_FOLDER):
        folder = f"{_PCI_DEVICES_FOLDER}/{address}"
        vendor_id, device_id, class_code = (
            tree.number(f"{folder}/{file_name}", base=16) for file_name in ("vendor", "device", "class")
        )
        if vendor_id is None or device_id is None or class_code is None:
            continue
        numa_node = tree.number(f"{folder}/numa_node")
        devices.append(
            PciDevice(
                address=address,
                vendor_id=vendor_id,
                device_id=device_id,
                class_code=class_code,
                driver=tree.link_name(f"{folder}/driver"),
                numa_node=None if numa_node is None or numa_node < 0 else numa_node,
                iommu_group=tree.link_name(f"{folder}/iommu_group"),
                link_speed=tree.text(f"{folder}/current_link_speed"),
                link_width=tree.text(f"{folder}/current_link_width"),
                link_speed_max=tree.text(f"{folder}/max_link_speed"),
                link_width_max=tree.text(f"{folder}/max_link_width"),
            )
        )
    return tuple(devices)


def nvidia_gpus(tree: HostTree) -> tuple[PciDevice, ...]:
    """Return NVIDIA's display controllers: class 0x03 with any subclass, because compute GPUs are 3D controllers."""
    return tuple(
        device
        for device in pci_devices(tree)
        if device.vendor_id == _VENDOR_NVIDIA and device.class_code >> 16 == _BASE_CLASS_DISPLAY
    )


def is_gpu(device: PciDevice) -> bool:
    """Return whether the device is a compute GPU: an NVIDIA display controller, or any 3D controller."""
    return (
        device.vendor_id == _VENDOR_NVIDIA and device.class_code >> 16 == _BASE_CLASS_DISPLAY
    ) or device.class_code >> 8 == _CLASS_3D


def is_nic(device: PciDevice) -> bool:
    """Return whether the device is an InfiniBand or a Mellanox Ethernet controller, which may support RDMA.

    :func:`gdrkit.host.rdma_devices` has the NICs whose driver supports RDMA.
    """
    class_and_subclass = device.class_code >> 8
    return class_and_subclass == _CLASS_INFINIBAND or (
        class_and_subclass == _CLASS_ETHERNET and device.vendor_id == _VENDOR_MELLANOX
    )


def is_nvme(device: PciDevice) -> bool:
    """Return whether the device is an NVMe controller."""
    return device.class_code >> 8 == _CLASS_NVME


def is_bridge(device: PciDevice) -> bool:
    """Return whether the device is a PCI-to-PCI bridge: a root port, or a port of a switch."""
    return device.class_code >> 8 == _CLASS_BRIDGE


def habana_accelerators(tree: HostTree) -> tuple[PciDevice, ...]:
    """Return the devices with the vendor ID of Habana Labs, which are all accelerators: Gaudi, Gaudi 2, Gaudi 3."""
    return tuple(device for device in pci_devices(tree) if device.vendor_id == _VENDOR_HABANA)
