"""The protocol between a test case and its peer processes: JSON lines and file descriptors over a socket pair.

A request has the keys ``id``, ``op``, ``arguments`` and ``descriptors`` (the count of descriptors that are sent with
it). A reply has ``id`` and either ``result`` or ``error``. The first message of a peer has ``ready`` and ``process``,
its process id. If an operation raises an error of gdrkit in the peer, the case gets an error of the same class with the
same fields.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from gdrkit import scm_rights
from gdrkit.errors import (
    Api,
    ApiError,
    BrokenResource,
    ClosedResource,
    DataMismatch,
    GdrkitError,
    Reason,
    RegistrationFailed,
    SetupMissing,
    Unsupported,
    UsageError,
)
from gdrkit.text import format_count

__all__ = ["Channel", "error_from_json_data", "error_to_json_data"]

# Largest number of bytes, and of descriptors, that one recvmsg(2) receives.
_RECEIVE_BYTES = 1 << 16
_DESCRIPTORS_MAX = 16
_API_ERROR_CLASSES = {cls.__name__: cls for cls in (ApiError, Unsupported, SetupMissing)}
# The error classes that have only a message, a reason and advice.
_MESSAGE_ERROR_CLASSES = {cls.__name__: cls for cls in (BrokenResource, UsageError)}


class Channel:
    """One end of the socket pair. It owns the socket, and the received descriptors until the caller takes them."""

    def __init__(self, connected_socket: socket.socket) -> None:
        self._socket = connected_socket
        self._receive_buffer = bytearray()
        self._received_descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], *, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message. The receiver gets duplicates of `descriptors`."""
        line = json.dumps(message).encode() + b"\n"
        # The descriptors arrive with the first byte. If sendmsg sends only a part of the line, sendall sends the rest.
        sent_bytes = socket.send_fds(self._socket, [line], list(descriptors)) if descriptors else 0
        self._socket.sendall(line[sent_bytes:])

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None if the other end is closed.

        Raises
        ------
        TimeoutError
            No complete message arrived in time.
        UsageError
            ``MALFORMED``: the message is not a JSON object, or too many descriptors arrived at once.
        ValueError
            The message is not JSON.
        """
        self._socket.settimeout(timeout_s)
        while True:
            line, line_end, remaining_bytes = bytes(self._receive_buffer).partition(b"\n")
            if line_end:
                self._receive_buffer = bytearray(remaining_bytes)
                message = json.loads(line)
                if not isinstance(message, dict):
                    error_message = f"a message must be a JSON object, not {message!r}"
                    raise UsageError(error_message, reason=Reason.MALFORMED)
                return message
            try:
                data, descriptors = scm_rights.receive(
                    self._socket, length_bytes=_RECEIVE_BYTES, descriptors_max=_DESCRIPTORS_MAX
                )
            except ConnectionResetError:
                return None
            self._received_descriptors += descriptors
            if not data:
                return None
            self._receive_buffer += data

    def take_descriptors(self, count: int) -> list[int]:
        """Return the next `count` received descriptors. The caller closes them."""
        if count > len(self._received_descriptors):
            message = f"expected {format_count(count, 'descriptor')}, and {len(self._received_descriptors)} arrived"
            raise UsageError(message, reason=Reason.MALFORMED)
        taken_descriptors, self._received_descriptors = (
            self._received_descriptors[:count],
            self._received_descriptors[count:],
        )
        return taken_descriptors

    def close(self) -> None:
        """Close the socket and the descriptors that the caller has not taken."""
        descriptors, self._received_descriptors = self._received_descriptors, []
        scm_rights.close_all(descriptors)
        self._socket.close()


def error_to_json_data(error: GdrkitError) -> dict[str, Any]:
    """Return the class and all fields of an error as JSON data."""
    data: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": error.message,
        "reason": error.reason.value,
        "what_to_do": error.what_to_do,
        "notes": list(getattr(error, "__notes__", ())),
    }
    if isinstance(error, ApiError):
        data |= {
            "api": error.api.value,
            "operation": error.operation,
            "status": error.status,
            "status_name": error.status_name,
            "errno": error.errno,
            "arguments": {key: _make_json_argument(value) for key, value in error.arguments.items()},
            "detail": error.detail,
        }
    elif isinstance(error, DataMismatch):
        data |= {
            "first_offset_bytes": error.first_offset_bytes,
            "expected": error.expected.hex(),
            "actual": error.actual.hex(),
            "length_bytes": error.length_bytes,
        }
    elif isinstance(error, RegistrationFailed):
        data["causes"] = [error_to_json_data(cause) for cause in error.causes]
    return data


def error_from_json_data(data: dict[str, Any]) -> GdrkitError:
    """Return the error that `data` describes: a plain :class:`GdrkitError` if this module does not know its class."""
    error = _parse_error(data)
    for note in data["notes"]:
        error.add_note(note)
    return error


def _parse_error(data: dict[str, Any]) -> GdrkitError:
    class_name, reason = data["kind"], Reason(data["reason"])
    if class_name in _API_ERROR_CLASSES:
        return _API_ERROR_CLASSES[class_name](
            api=Api(data["api"]),
            operation=data["operation"],
            status=data["status"],
            status_name=data["status_name"],
            errno=data["errno"],
            arguments=data["arguments"],
            reason=reason,
            what_to_do=data["what_to_do"],
            detail=data["detail"],
        )
    if class_name == DataMismatch.__name__:
        return DataMismatch(
            first_offset_bytes=data["first_offset_bytes"],
            expected=bytes.fromhex(data["expected"]),
            actual=bytes.fromhex(data["actual"]),
            length_bytes=data["length_bytes"],
        )
    if class_name == RegistrationFailed.__name__:
        causes = tuple(error_from_json_data(cause) for cause in data["causes"])
        # The message ends with the texts of the causes. They are removed, because the constructor appends them again.
        message = data["message"].partition(": [1] ")[0]
        return RegistrationFailed(message, causes=causes, reason=reason, what_to_do=data["what_to_do"])
    if class_name == ClosedResource.__name__:
        # The message ends with " is closed", which the constructor appends again.
        return ClosedResource(data["message"].removesuffix(" is closed"))
    return _MESSAGE_ERROR_CLASSES.get(class_name, GdrkitError)(
        data["message"], reason=reason, what_to_do=data["what_to_do"]
    )


def _make_json_argument(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
