"""Queries of the kernel over netlink: RDMA devices, queue pairs and memory regions, and the bytes of TCP sockets.

The replies come from the kernel and not from a file or a library, so a mount over /sys or a replaced libibverbs cannot
change them. The constants are taken from include/uapi/rdma/rdma_netlink.h, include/uapi/linux/inet_diag.h and
drivers/infiniband/core/nldev.c of Linux.
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

__all__ = [
    "NetlinkDevice",
    "RdmaQueuePair",
    "RdmaRegion",
    "TcpSocket",
    "rdma_netlink_devices",
    "rdma_queue_pairs",
    "rdma_regions",
    "tcp_sockets",
]

_NETLINK_SOCK_DIAG, _NETLINK_RDMA = 4, 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 0x1, 0x4, 0x300
# The message type is (RDMA_NL_NLDEV << 10) + command. The commands are RDMA_NLDEV_CMD_GET,
# RDMA_NLDEV_CMD_RES_QP_GET, RDMA_NLDEV_CMD_RES_MR_GET and RDMA_NLDEV_CMD_GET_CHARDEV.
_DEVICE_GET, _QUEUE_PAIR_GET, _REGION_GET, _CHARDEV_GET = ((5 << 10) + command for command in (1, 10, 13, 15))
# Attribute types (enum rdma_nldev_attr).
_DEV_INDEX, _DEV_NAME, _NODE_GUID = 1, 2, 6
_CHARDEV_TYPE, _CHARDEV_NAME, _CHARDEV_NUMBER, _UVERBS_DRIVER_ID = 69, 70, 72, 73
_PORT_INDEX, _LOCAL_QP_NUMBER, _REMOTE_QP_NUMBER, _QP_TYPE, _QP_STATE, _OWNER_PROCESS_ID = 3, 21, 22, 26, 27, 28
_REGION_LENGTH, _REGION_NUMBER = 45, 62
# A reply about queue pairs or regions has a table, which has one entry for each object.
_QUEUE_PAIR_TABLE, _QUEUE_PAIR_ENTRY, _REGION_TABLE, _REGION_ENTRY = 19, 20, 40, 41
# enum ib_qp_type and enum ib_qp_state of include/rdma/ib_verbs.h.
_QP_TYPE_NAMES = {
    0: "SMI",
    1: "GSI",
    2: "RC",
    3: "UC",
    4: "UD",
    8: "RAW_PACKET",
    9: "XRC_INI",
    10: "XRC_TGT",
    0xFF: "DRIVER",
}
_QP_STATE_NAMES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
# struct inet_diag_req_v2: family, protocol, extensions, padding, states, and a socket of 48 bytes that a dump ignores.
_SOCKET_REQUEST = struct.Struct("=BBBBI48x")
# SOCK_DIAG_BY_FAMILY, INET_DIAG_INFO, and one bit for each TCP state.
_SOCKETS_GET, _TCP_INFO, _ALL_STATES = 20, 2, 0xFFFF_FFFF
# struct inet_diag_msg: family, state, timer, retransmits, ports in network byte order, addresses, ..., inode.
_SOCKET_REPLY = struct.Struct("=BBBB2s2s16s16s28xI")
# The offsets of tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (Linux 4.1 and newer).
_TCP_BYTE_COUNTERS = struct.Struct("=120xQQ")
_ATTRIBUTE_TYPE_MASK = 0x3FFF  # NLA_TYPE_MASK: an attribute type without its two flags
_MESSAGE_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence number, port
_ATTRIBUTE_HEADER = struct.Struct("=HH")  # struct nlattr: length, type
_ERROR_CODE = struct.Struct("=i")  # The first field of struct nlmsgerr: a negative errno, or 0 for an acknowledgement
_TIMEOUT_S = 5.0
_DATAGRAM_BYTES_MAX = 1 << 16
_DATAGRAMS_MAX = 4096


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
        EPROTONOSUPPORT: the RDMA subsystem of the kernel is not loaded. EBADMSG: a reply is malformed. EOVERFLOW: the
        reply has more datagrams than gdrkit reads. Other errors are errors of socket(7).
    """
    with _open_netlink(_NETLINK_RDMA) as netlink:
        # All replies are received into this list before the next request is sent on this socket.
        attributes_of_devices = [
            _parse_attributes(reply) for reply in _request(netlink, _DEVICE_GET, b"", is_dump=True)
        ]
        return tuple(_query_device(netlink, device_attributes) for device_attributes in attributes_of_devices)


@dataclass(frozen=True, slots=True)
class RdmaQueuePair:
    """A queue pair of the kernel's RDMA subsystem.

    Attributes
    ----------
    device : str
        Device name, e.g. ``mlx5_0``.
    port : int or None
        Port number; None before the queue pair has one.
    number, remote_number : int or None
        Number of the queue pair, and number of the queue pair to which it is connected (None if it is not connected).
    type, state : str
        Names as in rdma-tool, e.g. ``RC`` and ``RTS``.
    process_id : int or None
        The process that created the queue pair; None if the kernel did.
    """

    device: str
    port: int | None
    number: int
    remote_number: int | None
    type: str
    state: str
    process_id: int | None


@dataclass(frozen=True, slots=True)
class RdmaRegion:
    """A memory region of the kernel's RDMA subsystem. The kernel does not report its keys to unprivileged users.

    Attributes
    ----------
    device : str
        Device name.
    number : int or None
        Number by which the kernel identifies the region; None before Linux 5.0.
    length_bytes : int
        Length of the region.
    process_id : int or None
        The process that registered the region; None if the kernel did.
    """

    device: str
    number: int | None
    length_bytes: int
    process_id: int | None


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """A TCP socket of this network namespace.

    Attributes
    ----------
    inode : int
        Inode of the socket, which the descriptors of its process show as ``socket:[inode]``.
    is_loopback : bool
        Whether source and destination address are equal.
    sent_bytes, received_bytes : int
        Payload that the peer acknowledged, and payload that arrived.
    """

    inode: int
    is_loopback: bool
    sent_bytes: int
    received_bytes: int


def rdma_queue_pairs() -> tuple[RdmaQueuePair, ...]:
    """Query the queue pairs of all RDMA devices, as far as this PID namespace shows them. This needs no privilege.

    Raises
    ------
    OSError
        See :func:`rdma_netlink_devices`.
    """
    return tuple(
        RdmaQueuePair(
            device=device,
            port=_read_integer(entry, _PORT_INDEX),
            number=_read_required_integer(entry, _LOCAL_QP_NUMBER),
            remote_number=_read_integer(entry, _REMOTE_QP_NUMBER) or None,
            type=_QP_TYPE_NAMES.get(
                _read_required_integer(entry, _QP_TYPE), f"type {_read_required_integer(entry, _QP_TYPE)}"
            ),
            state=_find_qp_state_name(_read_required_integer(entry, _QP_STATE)),
            process_id=_read_integer(entry, _OWNER_PROCESS_ID),
        )
        for device, entry in _query_resources(_QUEUE_PAIR_GET, _QUEUE_PAIR_TABLE, _QUEUE_PAIR_ENTRY)
    )


def rdma_regions() -> tuple[RdmaRegion, ...]:
    """Query the memory regions of all RDMA devices, as far as this PID namespace shows them. This needs no privilege.

    Raises
    ------
    OSError
        See :func:`rdma_netlink_devices`.
    """
    return tuple(
        RdmaRegion(
            device=device,
            number=_read_integer(entry, _REGION_NUMBER),
            length_bytes=_read_required_integer(entry, _REGION_LENGTH),
            process_id=_read_integer(entry, _OWNER_PROCESS_ID),
        )
        for device, entry in _query_resources(_REGION_GET, _REGION_TABLE, _REGION_ENTRY)
    )


def tcp_sockets() -> tuple[TcpSocket, ...]:
    """Query the TCP sockets of this network namespace with the bytes that they moved. This needs no privilege.

    Raises
    ------
    OSError
        EBADMSG: a reply is malformed. EOVERFLOW: the reply has more datagrams than gdrkit reads. Other errors are
        errors of socket(7).
    """
    sockets = []
    with _open_netlink(_NETLINK_SOCK_DIAG) as netlink:
        for family in (socket.AF_INET, socket.AF_INET6):
            extensions = 1 << (_TCP_INFO - 1)
            request = _SOCKET_REQUEST.pack(family, socket.IPPROTO_TCP, extensions, 0, _ALL_STATES)
            for reply in _request(netlink, _SOCKETS_GET, request, is_dump=True):
                socket_fields = _take_payload(reply, 0, _SOCKET_REPLY.size, 0)
                *_, source_address, destination_address, inode = _SOCKET_REPLY.unpack(socket_fields)
                tcp_info = _parse_attributes(reply[_SOCKET_REPLY.size :]).get(_TCP_INFO, b"")
                # A socket with inode 0 belongs to no process any more. A kernel before 4.1 reports no byte counters.
                if inode and len(tcp_info) >= _TCP_BYTE_COUNTERS.size:
                    sent_bytes, received_bytes = _TCP_BYTE_COUNTERS.unpack_from(tcp_info)
                    sockets.append(TcpSocket(inode, source_address == destination_address, sent_bytes, received_bytes))
    return tuple(sockets)


def _query_resources(command: int, table_type: int, entry_type: int) -> Iterator[tuple[str, dict[int, bytes]]]:
    """Yield the device name and the attributes of each object that a dump of `command` reports."""
    with _open_netlink(_NETLINK_RDMA) as netlink:
        attributes_of_devices = [
            _parse_attributes(reply) for reply in _request(netlink, _DEVICE_GET, b"", is_dump=True)
        ]
        for device_attributes in attributes_of_devices:
            request = _pack_attribute(_DEV_INDEX, device_attributes.get(_DEV_INDEX, b""))
            for reply in _request(netlink, command, request, is_dump=True):
                table = _parse_attributes(reply).get(table_type, b"")
                for attribute_type, entry in _list_attributes(table):
                    if attribute_type == entry_type:
                        yield _decode_text(device_attributes.get(_DEV_NAME, b"")), _parse_attributes(entry)


def _read_required_integer(attributes: dict[int, bytes], attribute_type: int) -> int:
    value = _read_integer(attributes, attribute_type)
    if value is None:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), "netlink")
    return value


def _find_qp_state_name(state: int) -> str:
    return _QP_STATE_NAMES[state] if state < len(_QP_STATE_NAMES) else f"state {state}"


def _open_netlink(protocol: int) -> socket.socket:
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    netlink.settimeout(_TIMEOUT_S)
    netlink.bind((0, 0))
    return netlink


def _query_device(netlink: socket.socket, device_attributes: dict[int, bytes]) -> NetlinkDevice:
    """Query the character device of an RDMA device, and return the device with it."""
    device_index = device_attributes.get(_DEV_INDEX, b"")
    guid_digits = f"{_read_integer(device_attributes, _NODE_GUID) or 0:016x}"
    device_without_chardev = NetlinkDevice(
        name=_decode_text(device_attributes.get(_DEV_NAME, b"")),
        node_guid=":".join(guid_digits[start : start + 4] for start in range(0, 16, 4)),
    )
    request = _pack_attribute(_DEV_INDEX, device_index) + _pack_attribute(_CHARDEV_TYPE, b"uverbs\0")
    try:
        replies = list(_request(netlink, _CHARDEV_GET, request, is_dump=False))
    except OSError:
        # Linux before 5.3 does not support this command, and a device may have no uverbs node. The caller reports the
        # node as missing evidence in both cases.
        return device_without_chardev
    chardev_attributes = _parse_attributes(replies[0]) if replies else {}
    chardev_number = _read_integer(chardev_attributes, _CHARDEV_NUMBER)
    return NetlinkDevice(
        name=device_without_chardev.name,
        node_guid=device_without_chardev.node_guid,
        uverbs_name=_decode_text(chardev_attributes[_CHARDEV_NAME]) if _CHARDEV_NAME in chardev_attributes else None,
        uverbs_number=None if chardev_number is None else (os.major(chardev_number), os.minor(chardev_number)),
        driver_id=_read_integer(chardev_attributes, _UVERBS_DRIVER_ID),
    )


def _request(netlink: socket.socket, command: int, request_body: bytes, *, is_dump: bool) -> Iterator[bytes]:
    """Send one request and yield the payload of each reply. `request_body` is the request without its header.

    If there are more than _DATAGRAMS_MAX datagrams, the function raises EOVERFLOW instead of ending with incomplete
    replies.
    """
    flags = _NLM_F_REQUEST | (_NLM_F_DUMP if is_dump else _NLM_F_ACK)
    # The command is also the sequence number, which is not used: each reply is received before the next request.
    netlink.sendto(
        _MESSAGE_HEADER.pack(_MESSAGE_HEADER.size + len(request_body), command, flags, command, 0) + request_body,
        (0, 0),
    )
    for _ in range(_DATAGRAMS_MAX):
        datagram, (sender_port, _groups) = netlink.recvfrom(_DATAGRAM_BYTES_MAX)
        if sender_port != 0:
            continue  # The datagram is from another process: only the kernel has port 0.
        for message_type, payload in _split_messages(datagram):
            if message_type == _NLMSG_DONE:
                return
            if message_type == _NLMSG_ERROR:
                error_number = -_ERROR_CODE.unpack(_take_payload(payload, 0, _ERROR_CODE.size, 0))[0]
                if error_number:
                    raise OSError(error_number, os.strerror(error_number), "netlink")
                return
            if message_type == command:
                yield payload
    raise OSError(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW), "netlink")


def _split_messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _MESSAGE_HEADER.size <= len(datagram):
        length_bytes, message_type, _flags, _sequence, _port = _MESSAGE_HEADER.unpack_from(datagram, offset)
        yield message_type, _take_payload(datagram, offset, length_bytes, _MESSAGE_HEADER.size)
        offset += (length_bytes + 3) & ~3  # The next message is aligned to 4 bytes.


def _parse_attributes(attributes_bytes: bytes) -> dict[int, bytes]:
    return dict(_list_attributes(attributes_bytes))


def _list_attributes(attributes_bytes: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE_HEADER.size <= len(attributes_bytes):
        length_bytes, attribute_type = _ATTRIBUTE_HEADER.unpack_from(attributes_bytes, offset)
        yield (
            attribute_type & _ATTRIBUTE_TYPE_MASK,
            _take_payload(attributes_bytes, offset, length_bytes, _ATTRIBUTE_HEADER.size),
        )
        offset += (length_bytes + 3) & ~3  # The next attribute is aligned to 4 bytes.


def _take_payload(data: bytes, offset: int, length_bytes: int, header_bytes: int) -> bytes:
    """Return the payload of a message or an attribute whose header begins at `offset`.

    `length_bytes` includes the header. A wrong length raises an OSError with EBADMSG.
    """
    if not header_bytes <= length_bytes <= len(data) - offset:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG), "netlink")
    return data[offset + header_bytes : offset + length_bytes]


def _pack_attribute(attribute_type: int, payload: bytes) -> bytes:
    length_bytes = _ATTRIBUTE_HEADER.size + len(payload)
    return _ATTRIBUTE_HEADER.pack(length_bytes, attribute_type) + payload + bytes(-length_bytes % 4)


def _read_integer(attributes: dict[int, bytes], attribute_type: int) -> int | None:
    return int.from_bytes(attributes[attribute_type], sys.byteorder) if attribute_type in attributes else None


def _decode_text(text_bytes: bytes) -> str:
    return text_bytes.rstrip(b"\0").decode("utf-8", "backslashreplace")
