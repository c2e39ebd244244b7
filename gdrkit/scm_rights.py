"""Reception of file descriptors from another process through a UNIX socket (SCM_RIGHTS).

This is the only module of gdrkit that calls recvmsg. Every received descriptor is close-on-exec from the start
(MSG_CMSG_CLOEXEC). If the kernel dropped bytes or descriptors of a message, the message is refused.
"""

from __future__ import annotations

import array
import os
import socket
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["close_all", "receive"]

_DESCRIPTOR_BYTES = array.array("i").itemsize


def receive(connection: socket.socket, *, length_bytes: int, descriptors_max: int) -> tuple[bytes, list[int]]:
    """Receive bytes and the descriptors that are sent with them, with one call of recvmsg.

    Parameters
    ----------
    connection : socket
        A UNIX socket. Its timeout applies.
    length_bytes : int
        Largest number of bytes to receive. A longer message of a SOCK_SEQPACKET or SOCK_DGRAM socket is refused.
    descriptors_max : int
        Largest number of descriptors that may come with the bytes, 0 or more.

    Returns
    -------
    bytes
        The received bytes. They are empty if the peer closed the socket.
    list of int
        The received descriptors. The caller owns and closes them.

    Raises
    ------
    UsageError
        MALFORMED: the message has more than `descriptors_max` descriptors or more than `length_bytes` bytes, or this
        process reached its limit of open files. All received descriptors are closed.
    OSError
        recvmsg failed, for example with TimeoutError. Nothing was received.
    """
    # The buffer has space for one more descriptor than allowed. An excess descriptor is then received and counted; the
    # kernel would otherwise drop it.
    ancillary_bytes = socket.CMSG_SPACE((descriptors_max + 1) * _DESCRIPTOR_BYTES)
    data, ancillary, flags, _address = connection.recvmsg(length_bytes, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    descriptors = [descriptor for control_message in ancillary for descriptor in _parse_descriptors(*control_message)]
    if len(descriptors) <= descriptors_max and not flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        return data, descriptors
    close_all(descriptors)
    what_to_do = ""
    if len(descriptors) > descriptors_max:
        message = f"recvmsg: at most {descriptors_max} descriptors may come with a message, not {len(descriptors)}"
    elif flags & socket.MSG_CTRUNC:
        message = f"recvmsg: {len(descriptors)} descriptors came, and the kernel dropped others (MSG_CTRUNC)"
        what_to_do = "raise the limit of open files (ulimit -n, RLIMIT_NOFILE) if it is low"
    else:
        message = f"recvmsg: a message may have at most {length_bytes} bytes, and this one has more (MSG_TRUNC)"
    raise UsageError(message, reason=Reason.MALFORMED, what_to_do=what_to_do)


def close_all(descriptors: Iterable[int]) -> None:
    """Close all of the descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def _parse_descriptors(level: int, message_type: int, content: bytes) -> list[int]:
    """Return the descriptors in one control message of recvmsg. Control messages of other types have none."""
    if (level, message_type) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        return []
    descriptors = array.array("i")
    descriptors.frombytes(content[: len(content) - len(content) % _DESCRIPTOR_BYTES])
    return descriptors.tolist()
