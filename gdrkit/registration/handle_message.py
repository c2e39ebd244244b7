"""A handle with its file descriptors as a message to another process, sent with SCM_RIGHTS.

One message is the 192 bytes of a handle. The first of these bytes carries the descriptors that the handle needs. A
receiver refuses a message with too few bytes, with another number of descriptors, or with descriptors that the kernel
had to drop (MSG_CTRUNC). The receiver closes all descriptors of a refused message.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import TYPE_CHECKING, Self

from gdrkit import scm_rights
from gdrkit.errors import (
    Api,
    ApiError,
    BrokenResource,
    ClosedResource,
    GdrkitWarning,
    Reason,
    UsageError,
    errno_name,
)
from gdrkit.handles import Handle
from gdrkit.registration.handle import DESCRIPTORS_MAX, SHARE_HANDLE_BYTES, ShareHandle
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["HandleMessage", "receive"]


class HandleMessage:
    """A handle of some memory with the descriptors that it needs, as one message. The message owns the descriptors.

    Parameters
    ----------
    data : bytes
        The packed handle.
    descriptors : sequence of int
        The file descriptors. The message owns them from now on, even if the constructor raises.

    Raises
    ------
    UsageError
        MALFORMED: `data` is not a handle, or the handle needs another number of descriptors.
    """

    def __init__(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self._descriptors = tuple(descriptors)
        # A message with descriptors counts as an open object until close().
        self._live_handle = Handle("share.handle_message") if self._descriptors else None
        self.data = bytes(data)
        try:
            self.handle = ShareHandle.parse(self.data)
            if self.handle.descriptor_count != len(self._descriptors):
                message = (
                    f"the handle needs {format_count(self.handle.descriptor_count, 'descriptor')}, "
                    f"but the message has {len(self._descriptors)}"
                )
                raise UsageError(message, reason=Reason.MALFORMED)  # noqa: TRY301 - the except clause closes them.
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors. The message still owns them."""
        if self.closed:
            resource = "handle message"
            raise ClosedResource(resource)
        return self._descriptors

    @property
    def closed(self) -> bool:
        """Whether the descriptors were closed. A message without descriptors has nothing to close."""
        return self._live_handle is not None and not self._descriptors

    def send(self, connection: socket.socket) -> None:
        """Send the handle and duplicates of its descriptors through a UNIX socket.

        The message keeps its own descriptors.

        Raises
        ------
        BrokenResource
            PEER_GONE: the peer closed the socket.
        ApiError
            sendmsg failed for another reason.
        """
        try:
            # The kernel sends the descriptors with the first byte. If the first call does not send all bytes, the
            # second call sends the remaining bytes without descriptors.
            sent_bytes = socket.send_fds(connection, [self.data], list(self.descriptors))
            connection.sendall(self.data[sent_bytes:])
        except OSError as error:
            raise _make_socket_error("sendmsg", error) from error

    def close(self) -> None:
        """Close the descriptors. A second close does nothing."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        if self._live_handle is not None:
            self._live_handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptors", ()):
            # The descriptors are closed first, because a warning filter may turn the warning into an error.
            descriptor_count = len(self._descriptors)
            self.close()
            warnings.warn(
                f"a handle message with {format_count(descriptor_count, 'descriptor')} was never closed",
                GdrkitWarning,
                stacklevel=1,
            )

    def __repr__(self) -> str:
        return f"HandleMessage({self.handle.kind.name}, {format_count(len(self._descriptors), 'descriptor')})"


def receive(connection: socket.socket, *, timeout_ms: float | None = None) -> HandleMessage:
    """Receive the next handle message from a UNIX socket. The caller closes it.

    Parameters
    ----------
    connection : socket
        The connected socket. This function sets its timeout and does not restore the previous one.
    timeout_ms : float or None
        Longest wait for each part of the message, in milliseconds. With None, there is no limit.

    Raises
    ------
    BrokenResource
        PEER_GONE: the peer closed the socket before the handle was complete. TIMEOUT: a part did not arrive in time.
    UsageError
        MALFORMED: the message is not a handle, does not have the number of descriptors that the handle needs, or has
        more descriptors than one message may carry.
    """
    connection.settimeout(None if timeout_ms is None else timeout_ms / 1000)
    data = bytearray()
    descriptors: list[int] = []
    try:
        while len(data) < SHARE_HANDLE_BYTES:
            _receive_part(connection, data, descriptors)
    except BaseException:
        scm_rights.close_all(descriptors)
        raise
    return HandleMessage(bytes(data), descriptors)


def _receive_part(connection: socket.socket, data: bytearray, descriptors: list[int]) -> None:
    """Receive some bytes and descriptors of a message, and append them to `data` and `descriptors`."""
    try:
        new_bytes, new_descriptors = scm_rights.receive(
            connection,
            length_bytes=SHARE_HANDLE_BYTES - len(data),
            descriptors_max=DESCRIPTORS_MAX - len(descriptors),
        )
    except OSError as error:
        raise _make_socket_error("recvmsg", error) from error
    descriptors += new_descriptors
    if not new_bytes:
        message = f"the peer closed the socket after {len(data)} of {SHARE_HANDLE_BYTES} bytes of a handle"
        raise BrokenResource(message, reason=Reason.PEER_GONE)
    data += new_bytes


def _make_socket_error(operation: str, error: OSError) -> BrokenResource | ApiError:
    if isinstance(error, BrokenPipeError | ConnectionResetError):
        message = f"the peer closed the socket: {operation} failed: {error.strerror} ({errno_name(error.errno)})"
        return BrokenResource(message, reason=Reason.PEER_GONE)
    if isinstance(error, TimeoutError):
        message = f"the handle message was not complete in time ({operation} timed out)"
        return BrokenResource(message, reason=Reason.TIMEOUT)
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=error.errno,
        status_name=errno_name(error.errno),
        errno=error.errno,
        reason=Reason.BAD_DESCRIPTOR if isinstance(error, ConnectionError) else Reason.OTHER,
    )
