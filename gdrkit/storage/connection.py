"""Control connections of the storage service: frames over a TCP or unix socket.

Over a unix socket, a frame can carry file descriptors.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

from gdrkit import scm_rights
from gdrkit.errors import BrokenResource, Reason, UsageError
from gdrkit.storage.wire import HEADER_BYTES, FrameType, Header, check_payload, pack_control, parse_header

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ControlConnection", "shut_down"]

# Largest number of descriptors that one frame can carry.
_DESCRIPTORS_MAX = 4


class ControlConnection:
    """A connected socket that sends and receives control frames. This object owns the socket."""

    def __init__(self, connected_socket: socket.socket) -> None:
        self._socket = connected_socket
        self._is_unix = connected_socket.family == socket.AF_UNIX
        # The header of the frame that is being received, or None while the header is incomplete.
        self._header: Header | None = None
        # The part of the header that has arrived. After the header, the part of the payload that has arrived.
        self._arrived_bytes = bytearray()
        # Descriptors that arrived with the last frame (SCM_RIGHTS). The caller removes the descriptors that it keeps.
        self.descriptors: list[int] = []

    @property
    def is_unix(self) -> bool:
        """Whether the socket is a unix socket, for which the kernel reports the peer's credentials."""
        return self._is_unix

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """Set the longest time to wait for a part of a frame."""
        self._socket.settimeout(timeout_s)

    def send(self, frame_type: FrameType, payload: bytes, *, sequence: int, descriptors: Sequence[int] = ()) -> None:
        """Send one frame, with descriptors of this process (SCM_RIGHTS). Raises OSError if the peer is gone."""
        frame_bytes = pack_control(frame_type, payload, sequence=sequence)
        # The descriptors travel with the first bytes of the frame. send_fds() may send only a part of the frame.
        sent_byte_count = socket.send_fds(self._socket, [frame_bytes], list(descriptors)) if descriptors else 0
        self._socket.sendall(frame_bytes[sent_byte_count:])

    def receive(self, expected_type: FrameType) -> tuple[bytes, int] | None:
        """Return payload and sequence of the next frame, or None if the peer ended the connection before the frame.

        Raises
        ------
        UsageError
            MALFORMED: the frame is invalid, has another type than `expected_type`, or has more descriptors than
            allowed.
        BrokenResource
            The peer ended the connection within the frame.
        TimeoutError
            Nothing arrived in time.
        """
        self.close_descriptors()
        try:
            return self._read_frame(expected_type)
        except BaseException:
            self.close_descriptors()
            raise

    def receive_ready(self, expected_type: FrameType) -> tuple[bytes, int] | None:
        """Read the next frame from a non-blocking socket. Return None while the frame is incomplete.

        Raises
        ------
        UsageError, BrokenResource
            See :meth:`receive`. Unlike :meth:`receive`, this method also raises BrokenResource if the peer ended the
            connection before the frame.
        """
        try:
            frame = self._read_frame(expected_type)
        except BlockingIOError:
            return None
        except BaseException:
            self.close_descriptors()
            raise
        if frame is None:
            message = "the peer ended the connection before a frame"
            raise BrokenResource(message, reason=Reason.PEER_GONE)
        return frame

    def detach_socket(self) -> socket.socket:
        """Return the socket, without a timeout. The caller owns it from now on, and this connection is closed."""
        detached_socket = socket.socket(fileno=self.detach_descriptor())
        detached_socket.settimeout(None)
        return detached_socket

    def detach_descriptor(self) -> int:
        """Return the descriptor of the socket. The caller owns it from now on, and this connection is closed."""
        self.close_descriptors()
        return self._socket.detach()

    def shut_down(self) -> None:
        """Shut the socket down, which wakes every thread that waits on it."""
        shut_down(self._socket)

    def close(self) -> None:
        """Close the connection."""
        self.close_descriptors()
        self._socket.close()

    def close_descriptors(self) -> None:
        """Close the descriptors that arrived with the last frame and that the caller has not removed."""
        descriptors, self.descriptors = self.descriptors, []
        scm_rights.close_all(descriptors)

    def _read_frame(self, expected_type: FrameType) -> tuple[bytes, int] | None:
        """Continue to receive the next frame. Return None if the peer ended the connection before the frame."""
        if self._header is None:
            if not self._receive_until(HEADER_BYTES):
                if not self._arrived_bytes:
                    return None
                raise _make_ended_error()
            header = parse_header(self._take_arrived_bytes())
            if header.type is not expected_type:
                message = f"frame: the type must be {expected_type.name}, not {header.type.name}"
                raise UsageError(message, reason=Reason.MALFORMED)
            self._header = header
        header = self._header
        if not self._receive_until(header.length):
            raise _make_ended_error()
        self._header = None
        payload = self._take_arrived_bytes()
        check_payload(header, payload)
        return payload, header.sequence

    def _receive_until(self, length_bytes: int) -> bool:
        """Receive until `length_bytes` have arrived. Return False if the connection ended before that."""
        while len(self._arrived_bytes) < length_bytes:
            data = self._receive(length_bytes - len(self._arrived_bytes))
            if not data:
                return False
            self._arrived_bytes += data
        return True

    def _take_arrived_bytes(self) -> bytes:
        """Return the bytes that have arrived, and forget them."""
        taken_bytes, self._arrived_bytes = bytes(self._arrived_bytes), bytearray()
        return taken_bytes

    def _receive(self, length_bytes: int) -> bytes:
        if not self._is_unix:
            return self._socket.recv(length_bytes)
        descriptors_max = _DESCRIPTORS_MAX - len(self.descriptors)
        data, descriptors = scm_rights.receive(self._socket, length_bytes=length_bytes, descriptors_max=descriptors_max)
        self.descriptors += descriptors
        return data


def shut_down(connected_socket: socket.socket) -> None:
    """Shut a socket down in both directions. Do nothing if its connection has ended or the socket is closed."""
    try:
        connected_socket.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.EBADF}:
            raise


def _make_ended_error() -> BrokenResource:
    return BrokenResource("the peer ended the connection within a frame", reason=Reason.PEER_GONE)
