"""Evidence about GPUs and RDMA devices from kernel interfaces that no library and no mounted file can replace.

A device is proven if the sources below agree. The attribute ``missing`` of its evidence has one sentence for each
disagreement. The sources are:

- its PCI function below /sys/bus/pci, on a genuine sysfs, with the driver that is bound to it;
- its character device below /dev, whose major number the kernel lists in /proc/devices, on a genuine procfs;
- the reply of its driver to an ioctl: for a GPU on /dev/nvidiactl, for an RDMA device on its own character device;
- for an RDMA device also the device list of the kernel over netlink.

Source: include/uapi/linux/magic.h, include/uapi/rdma and drivers/infiniband/core/uverbs_ioctl.c of Linux; nv-ioctl.h of
NVIDIA's open kernel modules (nv_ioctl_card_info_t, nv_ioctl_rm_api_version_t).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.evidence.genuine_files import (
    SYSFS_MAGIC,
    DeviceNode,
    MissingEvidence,
    failure_text,
    open_checked,
    open_node,
    read_at,
    read_majors,
    stat_node,
)
from gdrkit.evidence.netlink import rdma_netlink_devices
from gdrkit.host import HostTree, nvidia_driver_version

if TYPE_CHECKING:
    from gdrkit.evidence.netlink import NetlinkDevice

__all__ = ["SOFTWARE_DRIVERS", "GpuEvidence", "KernelEvidence", "RdmaEvidence", "kernel_evidence"]

_PCI_FUNCTION_PATTERN = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

_NVIDIA_VENDOR_ID = 0x10DE
_NVIDIA_CHARDEV_DRIVERS = frozenset({"nvidia", "nvidia-frontend", "nvidiactl"})
_NVIDIA_CARDS_MAX = 32
# nv_ioctl_card_info_t: valid, domain, bus, slot, function, vendor id, device id, gpu_id, interrupt_line, reg_address,
# reg_size, fb_address, fb_size, minor_number, dev_name.
_CARD_INFO = struct.Struct("=B3xIBBBxHHIH2xQQQQI10s2x")
_CARD_MINOR_INDEX = 13  # The index of minor_number among the unpacked fields.
# nv_ioctl_rm_api_version_t: command, reply, version.
_RM_VERSION = struct.Struct("=II64s")
# NV_RM_API_VERSION_CMD_QUERY and NV_RM_API_VERSION_REPLY_RECOGNIZED.
_RM_VERSION_QUERY, _RM_VERSION_RECOGNIZED = ord("2"), 1
_CARD_INFO_IOCTL, _RM_VERSION_IOCTL = 200, 210  # NV_ESC_CARD_INFO, NV_ESC_CHECK_VERSION_STR

_UVERBS_CHARDEV_DRIVER = "infiniband_verbs"
# Fields of struct ib_uverbs_ioctl_hdr: length, object_id, method_id, num_attrs, reserved1, driver_id, reserved2.
_UVERBS_HEADER = struct.Struct("=HHHHQII")
_RDMA_VERBS_IOCTL = 0xC0181B01  # _IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)
# No uverbs object type has this number, so the kernel refuses each request and changes nothing. The errno of the
# refusal shows whether the request had the id of the driver (see _read_uverbs_driver).
_UNKNOWN_OBJECT_TYPE = 0x0FFF
# Values of enum rdma_driver_id.
_RDMA_DRIVER_NAMES = {
    1: "mlx5",
    2: "mlx4",
    3: "cxgb3",
    4: "cxgb4",
    5: "mthca",
    6: "bnxt_re",
    7: "ocrdma",
    8: "nes",
    9: "irdma",
    10: "vmw_pvrdma",
    11: "qedr",
    12: "hns",
    13: "usnic",
    14: "rxe",
    15: "hfi1",
    16: "qib",
    17: "efa",
    18: "siw",
    19: "erdma",
    20: "mana",
}
SOFTWARE_DRIVERS = frozenset({"rxe", "siw"})


@dataclass(frozen=True, slots=True)
class GpuEvidence:
    """One GPU of the NVIDIA driver, as the driver lists it by ioctl.

    Attributes
    ----------
    pci_address : str
        PCI address, e.g. ``0000:1b:00.0``.
    pci_driver : str or None
        The driver that is bound to the PCI function according to sysfs. None if sysfs does not show it.
    node : DeviceNode or None
        The character device of the GPU. None if it was not found.
    missing : tuple of str
        One sentence for each piece of evidence that does not agree; empty if all agree.
    """

    pci_address: str
    pci_driver: str | None
    node: DeviceNode | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RdmaEvidence:
    """One RDMA device, as the kernel lists it over netlink.

    Attributes
    ----------
    name, node_guid : str
        Name and node GUID as reported over netlink.
    driver : str or None
        The kernel driver, translated from its number (``enum rdma_driver_id``), e.g. ``mlx5``. None if unknown.
    node : DeviceNode or None
        The character device of the RDMA device. None if it was not found.
    pci_address, pci_driver : str or None
        The PCI function, and the driver that is bound to it according to sysfs. None for a software driver, or if sysfs
        does not show them.
    missing : tuple of str
        One sentence for each piece of evidence that does not agree; empty if all agree.
    """

    name: str
    node_guid: str
    driver: str | None
    node: DeviceNode | None
    pci_address: str | None
    pci_driver: str | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelEvidence:
    """The evidence that the kernel reported about GPUs and RDMA devices.

    Attributes
    ----------
    nvidia_version : str or None
        Version of the NVIDIA kernel driver, as reported by ioctl.
    nvidia_control : DeviceNode or None
        The control device ``/dev/nvidiactl``.
    nvidia_missing : tuple of str
        Reasons why the NVIDIA driver as a whole is not proven; empty if it is.
    gpus : tuple of GpuEvidence
        The GPUs in the order of the driver.
    rdma_missing : tuple of str
        Reasons why RDMA devices could not be queried; empty if they could.
    rdma : tuple of RdmaEvidence
        The RDMA devices in the order of the kernel.
    """

    nvidia_version: str | None = None
    nvidia_control: DeviceNode | None = None
    nvidia_missing: tuple[str, ...] = ()
    gpus: tuple[GpuEvidence, ...] = ()
    rdma_missing: tuple[str, ...] = ()
    rdma: tuple[RdmaEvidence, ...] = ()


def kernel_evidence() -> KernelEvidence:
    """Query the kernel of this machine. Missing evidence becomes a sentence in the result; no error is raised."""
    try:
        drivers_by_major = read_majors()
    except MissingEvidence as error:
        return KernelEvidence(nvidia_missing=(str(error),), rdma_missing=(str(error),))
    driver_version, control_node, gpus, nvidia_missing = _query_nvidia(drivers_by_major)
    try:
        rdma = tuple(_collect_rdma_evidence(device, drivers_by_major) for device in rdma_netlink_devices())
        rdma_missing: tuple[str, ...] = ()
    except OSError as error:
        rdma, rdma_missing = (), (failure_text("query the RDMA devices over netlink", error),)
    return KernelEvidence(
        nvidia_version=driver_version,
        nvidia_control=control_node,
        nvidia_missing=nvidia_missing,
        gpus=gpus,
        rdma_missing=rdma_missing,
        rdma=rdma,
    )


def _query_nvidia(
    drivers_by_major: dict[int, set[str]],
) -> tuple[str | None, DeviceNode | None, tuple[GpuEvidence, ...], tuple[str, ...]]:
    """Query the NVIDIA driver. Return its version, control device and GPUs, and a sentence for each disagreement."""
    try:
        with open_node("/dev/nvidiactl", drivers_by_major, _NVIDIA_CHARDEV_DRIVERS) as (descriptor, control_node):
            card_table = _ioctl(
                descriptor, "NV_ESC_CARD_INFO", _CARD_INFO_IOCTL, bytes(_CARD_INFO.size * _NVIDIA_CARDS_MAX)
            )
            version_request = _RM_VERSION.pack(_RM_VERSION_QUERY, 0, b"")
            version_reply = _ioctl(descriptor, "NV_ESC_CHECK_VERSION_STR", _RM_VERSION_IOCTL, version_request)
    except MissingEvidence as error:
        return None, None, (), (str(error),)
    missing_evidence = []
    _command, is_recognized, version_bytes = _RM_VERSION.unpack(version_reply)
    driver_version = version_bytes.partition(b"\0")[0].decode("ascii", "backslashreplace")
    if is_recognized != _RM_VERSION_RECOGNIZED or not driver_version:
        missing_evidence.append("the NVIDIA driver does not report its version by ioctl (NV_ESC_CHECK_VERSION_STR)")
    # A container runtime mounts a copy of /proc/driver/nvidia/version, so the file system type of that file proves
    # nothing. The version in the file must agree with the reply to the ioctl.
    procfs_version = nvidia_driver_version(HostTree())
    if driver_version and procfs_version != driver_version:
        missing_evidence.append(
            f"/proc/driver/nvidia/version contains {procfs_version or 'no version'}, "
            f"but the NVIDIA driver reports {driver_version}"
        )
    # The first field, `valid`, is 0 if the entry describes no card.
    gpus = tuple(
        _collect_gpu_evidence(card_fields, drivers_by_major)
        for card_fields in _CARD_INFO.iter_unpack(card_table)
        if card_fields[0]
    )
    if not gpus:
        missing_evidence.append("the NVIDIA driver lists no GPU by ioctl (NV_ESC_CARD_INFO)")
    return driver_version or None, control_node, gpus, tuple(missing_evidence)


def _collect_gpu_evidence(card_fields: tuple[int, ...], drivers_by_major: dict[int, set[str]]) -> GpuEvidence:
    _valid, domain, bus, slot, function, vendor_id, device_id = card_fields[:7]
    minor = card_fields[_CARD_MINOR_INDEX]
    pci_address = f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
    missing_evidence = []
    node: DeviceNode | None = None
    try:
        # The device node is examined with O_PATH and not opened, because opening it would wake the GPU.
        node = stat_node(f"/dev/nvidia{minor}", drivers_by_major, _NVIDIA_CHARDEV_DRIVERS)
        if node.minor != minor:
            missing_evidence.append(
                f"{node.path} is device {node.major}:{node.minor}, but the NVIDIA driver reports minor {minor}"
            )
    except MissingEvidence as error:
        missing_evidence.append(str(error))
    pci_driver, pci_missing = _read_pci_driver(pci_address, vendor_id=vendor_id, device_id=device_id)
    missing_evidence += pci_missing
    if vendor_id != _NVIDIA_VENDOR_ID:
        missing_evidence.append(f"PCI function {pci_address} is of vendor {vendor_id:#06x}, not NVIDIA")
    if pci_driver is not None and pci_driver != "nvidia":
        missing_evidence.append(f"PCI function {pci_address} has driver {pci_driver}, not nvidia")
    return GpuEvidence(pci_address=pci_address, pci_driver=pci_driver, node=node, missing=tuple(missing_evidence))


def _collect_rdma_evidence(device: NetlinkDevice, drivers_by_major: dict[int, set[str]]) -> RdmaEvidence:
    missing_evidence = []
    node: DeviceNode | None = None
    driver_id = device.driver_id
    try:
        node, driver_id = _find_uverbs_node(device, drivers_by_major)
    except MissingEvidence as error:
        missing_evidence.append(str(error))
    driver = None if driver_id is None else _RDMA_DRIVER_NAMES.get(driver_id, f"driver {driver_id}")
    pci_address, pci_driver = None, None
    if driver not in SOFTWARE_DRIVERS:
        try:
            pci_address = _read_rdma_pci_address(device)
            pci_driver, pci_missing = _read_pci_driver(pci_address)
            missing_evidence += pci_missing
        except MissingEvidence as error:
            missing_evidence.append(str(error))
    return RdmaEvidence(
        name=device.name,
        node_guid=device.node_guid,
        driver=driver,
        node=node,
        pci_address=pci_address,
        pci_driver=pci_driver,
        missing=tuple(missing_evidence),
    )


def _find_uverbs_node(device: NetlinkDevice, drivers_by_major: dict[int, set[str]]) -> tuple[DeviceNode, int]:
    """Return the character device of an RDMA device, and the id of the driver that responds on it."""
    if device.uverbs_name is None or device.uverbs_number is None:
        message = "the kernel reports no uverbs device over netlink (Linux 5.3 and newer report it)"
        raise MissingEvidence(message)
    node_path = f"/dev/infiniband/{device.uverbs_name}"
    with open_node(node_path, drivers_by_major, frozenset({_UVERBS_CHARDEV_DRIVER})) as (descriptor, node):
        if (node.major, node.minor) != device.uverbs_number:
            major, minor = device.uverbs_number
            message = (
                f"{node_path} is device {node.major}:{node.minor}, but the kernel reports {major}:{minor} over netlink"
            )
            raise MissingEvidence(message)
        driver_id = _read_uverbs_driver(descriptor)
    if device.driver_id not in {None, driver_id}:
        message = f"netlink reports driver {device.driver_id}, but {node_path} is of driver {driver_id}"
        raise MissingEvidence(message)
    return node, driver_id


def _read_uverbs_driver(descriptor: int) -> int:
    """Return the ``enum rdma_driver_id`` of the driver of an open uverbs device.

    The kernel first compares the driver id in the header with the id of the driver, and refuses another id with EINVAL.
    A header with the same id fails with EPROTONOSUPPORT, because its object type does not exist.
    """
    for driver_id in _RDMA_DRIVER_NAMES:
        header = _UVERBS_HEADER.pack(_UVERBS_HEADER.size, _UNKNOWN_OBJECT_TYPE, 0, 0, 0, driver_id, 0)
        try:
            fcntl.ioctl(descriptor, _RDMA_VERBS_IOCTL, header)
        except OSError as error:
            if error.errno == errno.EPROTONOSUPPORT:
                return driver_id
            if error.errno != errno.EINVAL:
                raise MissingEvidence(failure_text("ioctl RDMA_VERBS_IOCTL", error)) from error
    message = "the driver of the uverbs device is not known (ioctl RDMA_VERBS_IOCTL)"
    raise MissingEvidence(message)


def _read_rdma_pci_address(device: NetlinkDevice) -> str:
    """Return the address of the PCI function of an RDMA device according to sysfs.

    The path of the device in sysfs also contains the PCI bridges above the function, which is the last in the path.
    """
    folder = f"/sys/class/infiniband/{device.name}"
    with open_checked(folder, os.O_PATH | os.O_DIRECTORY, magic=SYSFS_MAGIC) as descriptor:
        sysfs_guid = read_at(descriptor, "node_guid", folder, magic=SYSFS_MAGIC)
        if sysfs_guid != device.node_guid:
            message = (
                f"{folder}/node_guid contains {sysfs_guid}, but the kernel reports {device.node_guid} over netlink"
            )
            raise MissingEvidence(message)
    pci_addresses = _PCI_FUNCTION_PATTERN.findall(os.path.realpath(f"{folder}/device"))
    if not pci_addresses:
        message = f"{folder}/device is not a PCI function"
        raise MissingEvidence(message)
    return str(pci_addresses[-1])


def _read_pci_driver(
    pci_address: str, *, vendor_id: int | None = None, device_id: int | None = None
) -> tuple[str | None, list[str]]:
    """Return the driver that is bound to a PCI function, and one sentence for each piece of evidence that is missing.

    `vendor_id` and `device_id` are the ids that the NVIDIA driver reports by ioctl. sysfs must have the same ids.
    """
    folder = f"/sys/bus/pci/devices/{pci_address}"
    missing_evidence = []
    try:
        with open_checked(folder, os.O_PATH | os.O_DIRECTORY, magic=SYSFS_MAGIC) as descriptor:
            for file_name, expected_id in (("vendor", vendor_id), ("device", device_id)):
                id_text = read_at(descriptor, file_name, folder, magic=SYSFS_MAGIC)
                if expected_id is not None and id_text != f"{expected_id:#06x}":
                    missing_evidence.append(
                        f"{folder}/{file_name} contains {id_text}, but the driver reports {expected_id:#06x}"
                    )
            try:
                return os.path.basename(os.readlink("driver", dir_fd=descriptor)), missing_evidence  # noqa: PTH119
            except OSError as error:
                missing_evidence.append(failure_text(f"readlink {folder}/driver", error))
    except MissingEvidence as error:
        missing_evidence.append(str(error))
    return None, missing_evidence


def _ioctl(descriptor: int, ioctl_name: str, ioctl_number: int, argument: bytes) -> bytes:
    """Send an ioctl of the NVIDIA driver, and return the argument as the driver modified it."""
    # The request is _IOWR('F', ioctl_number, size).
    request = 3 << 30 | len(argument) << 16 | ord("F") << 8 | ioctl_number
    buffer = bytearray(argument)
    try:
        fcntl.ioctl(descriptor, request, buffer)
    except OSError as error:
        raise MissingEvidence(failure_text(f"ioctl {ioctl_name} on /dev/nvidiactl", error)) from error
    return bytes(buffer)
