"""Query of RDMA devices from the kernel over netlink (NETLINK_RDMA, client NLDEV).

The replies come from the kernel and not from a file or a library, so a mount over /sys or a replaced libibverbs cannot
change them. The constants are those of include/uapi/rdma/rdma_netlink.h and drivers/infiniband/core/nldev.c of Linux.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NetlinkDevice", "rdma_netlink_devices"]

_NETLINK_RDMA = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 0x1, 0x4, 0x300
# The message type is (RDMA_NL_NLDEV << 10) + command.
_DEVICE_GET, _CHARDEV_GET = (5 << 10) + 1, (5 << 10) + 15
_DEV_INDEX, _DEV_NAME, _NODE_GUID = 1, 2, 6
_CHARDEV_TYPE, _CHARDEV_NAME, _CHARDEV, _UVERBS_DRIVER_ID = 69, 70, 72, 73
_TYPE_MASK = 0x3FFF
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = struct.Struct("=i")
_TIMEOUT_S = 5.0
_DATAGRAM_BYTES = 1 << 16
_MESSAGES_MAX = 4096


@dataclass(frozen=True, slots=True)
class NetlinkDevice:
    """An RDMA device as reported over netlink.

    Attributes
    ----------
    name : str
        Device name, e.g. ``mlx5_0``.
    node_guid : str
        Node GUID in the format of sysfs, e.g. ``b83f:d203:00a1:7c52``.
    uverbs_name : str or None
        Name of the character device, e.g. ``uverbs0``; None if the kernel reports none.
    uverbs_number : tuple of int or None
        Major and minor number of the character device.
    driver_id : int or None
        ``enum rdma_driver_id`` of the driver; None if the driver does not report it over netlink.
    """

    name: str
    node_guid: str
    uverbs_name: str | None = None
    uverbs_number: tuple[int, int] | None = None
    driver_id: int | None = None


def rdma_netlink_devices() -> tuple[NetlinkDevice, ...]:
    """Query the RDMA devices of the kernel.

    Raises
    ------
    OSError
        EPROTONOSUPPORT: the RDMA subsystem of the kernel is not loaded. EBADMSG: a reply is malformed. Other errors are
        those of socket(7).
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_RDMA) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        netlink.bind((0, 0))
        device_attribute_maps = [_parse_attributes(reply) for reply in _request(netlink, _DEVICE_GET, b"", dump=True)]
        return tuple(_device(netlink, device_attributes) for device_attributes in device_attribute_maps)


def _device(netlink: socket.socket, device_attributes: dict[int, bytes]) -> NetlinkDevice:
    index = device_attributes.get(_DEV_INDEX, b"")
    guid_digits = f"{_integer_attribute(device_attributes, _NODE_GUID) or 0:016x}"
    device_without_chardev = NetlinkDevice(
        name=_text(device_attributes.get(_DEV_NAME, b"")),
        node_guid=":".join(guid_digits[start : start + 4] for start in range(0, 16, 4)),
    )
    request = _pack_attribute(_DEV_INDEX, index) + _pack_attribute(_CHARDEV_TYPE, b"uverbs\0")
    try:
        replies = list(_request(netlink, _CHARDEV_GET, request, dump=False))
    except OSError:
        # Linux before 5.3 does not support this command, and a device may have no uverbs node. The caller then reports
        # the node as missing evidence.
        return device_without_chardev
    uverbs = _parse_attributes(replies[0]) if replies else {}
    chardev_number = _integer_attribute(uverbs, _CHARDEV)
    return NetlinkDevice(
        name=device_without_chardev.name,
        node_guid=device_without_chardev.node_guid,
        uverbs_name=_text(uverbs[_CHARDEV_NAME]) if _CHARDEV_NAME in uverbs else None,
        uverbs_number=None if chardev_number is None else (os.major(chardev_number), os.minor(chardev_number)),
        driver_id=_integer_attribute(uverbs, _UVERBS_DRIVER_ID),
    )


def _request(netlink: socket.socket, command: int, attributes: bytes, *, dump: bool) -> Iterator[bytes]:
    """Send one request and yield the payload of each reply until the last one."""
    flags = _NLM_F_REQUEST | (_NLM_F_DUMP if dump else _NLM_F_ACK)
    netlink.sendto(_HEADER.pack(_HEADER.size + len(attributes), command, flags, command, 0) + attributes, (0, 0))
    for _ in range(_MESSAGES_MAX):
        data, (sender, _groups) = netlink.recvfrom(_DATAGRAM_BYTES)
        if sender != 0:
            continue  # Another process can also send to this socket. The kernel has port 0.
        for message_type, payload in _messages(data):
            if message_type == _NLMSG_DONE:
                return
            if message_type == _NLMSG_ERROR:
                error_number = -_ERROR.unpack(_checked_slice(payload, 0, _ERROR.size, 0))[0]
                if error_number:
                    raise OSError(error_number, os.strerror(error_number), "NETLINK_RDMA")
                return
            if message_type == command:
                yield payload


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, message_type, _flags, _sequence, _port = _HEADER.unpack_from(data, offset)
        yield message_type, _checked_slice(data, offset, length, _HEADER.size)
        offset += (length + 3) & ~3


def _parse_attributes(data: bytes) -> dict[int, bytes]:
    attributes: dict[int, bytes] = {}
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, attribute_type = _ATTRIBUTE.unpack_from(data, offset)
        attributes[attribute_type & _TYPE_MASK] = _checked_slice(data, offset, length, _ATTRIBUTE.size)
        offset += (length + 3) & ~3
    return attributes


def _checked_slice(data: bytes, offset: int, length: int, header_bytes: int) -> bytes:
    """Return the payload of a message or an attribute whose header begins at `offset`. A wrong length is EBADMSG."""
    if not header_bytes <= length <= len(data) - offset:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), "NETLINK_RDMA")
    return data[offset + header_bytes : offset + length]


def _pack_attribute(attribute_type: int, value: bytes) -> bytes:
    length = _ATTRIBUTE.size + len(value)
    return _ATTRIBUTE.pack(length, attribute_type) + value + bytes(-length % 4)


def _integer_attribute(attributes: dict[int, bytes], attribute_type: int) -> int | None:
    return int.from_bytes(attributes[attribute_type], sys.byteorder) if attribute_type in attributes else None


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "backslashreplace")
