"""A handle and its descriptors on their way to another process, by SCM_RIGHTS.

Level 3. One message: the 192 bytes of a handle, and with the first of them the descriptors that it needs. Whatever else
arrives (too few bytes, more descriptors, ones that the kernel had to drop) is refused, and every descriptor that came
is closed.
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

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["Parcel", "receive"]


class Parcel:
    """The handle of some memory, and the descriptors that it needs; owns them.

    Parameters
    ----------
    data : bytes
        The handle as it travels.
    descriptors : sequence of int
        Owned from now on, also when the constructor raises.

    Raises
    ------
    UsageError
        MALFORMED: `data` is no handle, or wants another number of descriptors.
    """

    def __init__(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        self._descriptors = tuple(descriptors)
        self._handle = Handle("share.parcel") if self._descriptors else None
        self.data = bytes(data)
        try:
            self.handle = ShareHandle.parse(self.data)
            if self.handle.descriptor_count != len(self._descriptors):
                message = f"{len(self._descriptors)} descriptors for {self.handle.descriptor_count}"
                raise UsageError(message, reason=Reason.MALFORMED)  # noqa: TRY301 - they are closed below.
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Still owned by the parcel."""
        if self.closed:
            what = "parcel"
            raise ClosedResource(what)
        return self._descriptors

    @property
    def closed(self) -> bool:
        """Whether its descriptors were closed; one without descriptors never is."""
        return self._handle is not None and not self._descriptors

    def send(self, connection: socket.socket) -> None:
        """Send it through a UNIX socket; the other side gets descriptors of its own, and this one keeps these.

        Raises
        ------
        BrokenResource
            PEER_GONE: the other side closed the socket.
        ApiError
            What the kernel says else.
        """
        try:
            # The descriptors travel with the first byte; what one call does not take follows without them.
            sent = socket.send_fds(connection, [self.data], list(self.descriptors))
            connection.sendall(self.data[sent:])
        except OSError as error:
            raise _socket_error("sendmsg", error) from error

    def close(self) -> None:
        """Close its descriptors; a second close does nothing."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        if self._handle is not None:
            self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptors", ()):
            # Closed first: a warning may be made an error.
            count = len(self._descriptors)
            self.close()
            warnings.warn(f"a parcel with {count} descriptors was never closed", GdrkitWarning, stacklevel=1)

    def __repr__(self) -> str:
        return f"Parcel({self.handle.kind.name}, {len(self._descriptors)} descriptors)"


def receive(connection: socket.socket, *, timeout_ms: float | None = None) -> Parcel:
    """The next parcel from a UNIX socket; the caller closes it.

    Parameters
    ----------
    connection : socket
        Its timeout is changed.
    timeout_ms : float or None
        How long to wait for each part; None: for ever.

    Raises
    ------
    BrokenResource
        PEER_GONE: the other side closed the socket before the handle was complete. TIMEOUT: it was too slow.
    UsageError
        MALFORMED: no handle, other descriptors than it names, or more than one message may carry.
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
    return Parcel(bytes(data), descriptors)


def _receive_part(connection: socket.socket, data: bytearray, descriptors: list[int]) -> None:
    try:
        part, arrived = scm_rights.receive(
            connection,
            length_bytes=SHARE_HANDLE_BYTES - len(data),
            descriptors_max=DESCRIPTORS_MAX - len(descriptors),
        )
    except OSError as error:
        raise _socket_error("recvmsg", error) from error
    descriptors += arrived
    if not part:
        message = f"the other side closed the socket after {len(data)} of {SHARE_HANDLE_BYTES} bytes of a handle"
        raise BrokenResource(message, reason=Reason.PEER_GONE)
    data += part


def _socket_error(operation: str, error: OSError) -> BrokenResource | ApiError:
    if isinstance(error, BrokenPipeError | ConnectionResetError):
        message = f"the other side closed the socket ({operation} gave {errno_name(error.errno)})"
        return BrokenResource(message, reason=Reason.PEER_GONE)
    if isinstance(error, TimeoutError):
        message = "the other side sent no handle in time"
        return BrokenResource(message, reason=Reason.TIMEOUT)
    return ApiError(
        api=Api.KERNEL,
        operation=operation,
        status=error.errno,
        status_name=errno_name(error.errno),
        errno=error.errno,
        reason=Reason.BAD_DESCRIPTOR if isinstance(error, ConnectionError) else Reason.OTHER,
    )
