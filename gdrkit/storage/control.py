"""Packing and parsing of control messages, which are the payload of control frames.

Received messages are checked against the types and limits of :mod:`gdrkit.storage.messages`. An invalid message raises
:class:`UsageError`.
"""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

from gdrkit.errors import Api, ApiError, Reason, UsageError, errno_name
from gdrkit.serialization import Json, from_json_data, to_json_data
from gdrkit.storage import messages
from gdrkit.storage.wire import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "REQUESTS",
    "Request",
    "operation_of",
    "pack_error",
    "pack_reply",
    "pack_request",
    "parse_reply",
    "parse_request",
    "storage_error",
]

PATH_CHARACTERS_MAX = 4096
# Largest number of ranges of one punch_hole request.
RANGES_MAX = 1024
# Largest number of groups of a user, as in Linux (NGROUPS_MAX).
_GROUPS_MAX = 65536
# Largest uid and gid. The number above it means "unchanged" in chown(2).
_ID_MAX = (1 << 32) - 2
# The largest number in a message.
_NUMBER_MAX = (1 << 63) - 1

Request: TypeAlias = Union[  # noqa: UP007 - Union is easier to read than 23 types with |.
    messages.StorageHello,
    messages.Attach,
    messages.Open,
    messages.Adopt,
    messages.Close,
    messages.Stat,
    messages.List,
    messages.Mkdir,
    messages.Rmdir,
    messages.Unlink,
    messages.Rename,
    messages.HardLink,
    messages.Symlink,
    messages.Readlink,
    messages.Truncate,
    messages.Sync,
    messages.PunchHole,
    messages.Statfs,
    messages.Chmod,
    messages.Utimens,
    messages.Chown,
    messages.SetUser,
    messages.ReadStatistics,
]

REQUESTS: Mapping[str, type[Request]] = {
    "hello": messages.StorageHello,
    "attach": messages.Attach,
    "open": messages.Open,
    "adopt": messages.Adopt,
    "close": messages.Close,
    "stat": messages.Stat,
    "list": messages.List,
    "mkdir": messages.Mkdir,
    "rmdir": messages.Rmdir,
    "unlink": messages.Unlink,
    "rename": messages.Rename,
    "link": messages.HardLink,
    "symlink": messages.Symlink,
    "readlink": messages.Readlink,
    "truncate": messages.Truncate,
    "sync": messages.Sync,
    "punch_hole": messages.PunchHole,
    "statfs": messages.Statfs,
    "chmod": messages.Chmod,
    "utimens": messages.Utimens,
    "chown": messages.Chown,
    "user": messages.SetUser,
    "statistics": messages.ReadStatistics,
}
_OPERATION_NAME_BY_TYPE = {request_type: name for name, request_type in REQUESTS.items()}
_TIME_FIELDS = frozenset({"access_time_ns", "modification_time_ns", "change_time_ns"})
# Largest number of characters of a text, by the name of its field. Texts in other fields have at most
# PATH_CHARACTERS_MAX.
_CHARACTERS_MAX_BY_FIELD: Mapping[str, int] = {
    "client": 256,
    "server": 256,
    "session": 64,
    "replaces": 64,
    "token": messages.TOKEN_CHARACTERS_MAX,
    "message": 4096,
}

_Reply = TypeVar("_Reply")


def operation_of(request: Request) -> str:
    """Return the name of a request's operation, as in the table of :mod:`gdrkit.storage.messages`."""
    return _OPERATION_NAME_BY_TYPE[type(request)]


def pack_request(request: Request) -> bytes:
    """Return the payload of a control request."""
    fields = to_json_data(request)
    if not isinstance(fields, dict):
        message = f"not a request: {request!r}"
        raise UsageError(message)
    return _pack({"op": _OPERATION_NAME_BY_TYPE[type(request)], **fields})


def parse_request(payload: bytes) -> Request:
    """Parse the payload of a control request, and check the limits of its numbers and texts.

    Raises
    ------
    UsageError
        ``MALFORMED``: the payload is not a valid request. ``BAD_ARGUMENT``: a text in it cannot be a file name.
    """
    data = _unpack(payload)
    operation = data.pop("op", None)
    request_type = REQUESTS.get(operation) if isinstance(operation, str) else None
    if request_type is None:
        message = f"request: unknown operation {str(operation)[:80]!r}"
        raise UsageError(message, reason=Reason.MALFORMED)
    try:
        _check_values(data, str(operation))
        request = from_json_data(request_type, data, where=str(operation))
    except RecursionError as error:
        message = f"{operation}: the JSON is nested too deeply"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    _check_request(request, str(operation))
    return request


def pack_reply(reply: object) -> bytes:
    """Return the payload of a successful reply."""
    return _pack({"ok": to_json_data(reply)})


def pack_error(reply: messages.ErrorReply) -> bytes:
    """Return the payload of an error reply."""
    return _pack({"error": to_json_data(reply)})


def parse_reply(payload: bytes, reply_type: type[_Reply]) -> _Reply | messages.ErrorReply:
    """Parse the payload of a control reply. Return a `reply_type`, or the error with which the server replied."""
    data = _unpack(payload)
    if data.keys() == {"error"}:
        _check_values(data, "reply")
        return from_json_data(messages.ErrorReply, data["error"], where="error")
    if data.keys() != {"ok"}:
        message = "reply: the JSON has neither ok nor error"
        raise UsageError(message, reason=Reason.MALFORMED)
    _check_values(data, "reply")
    return from_json_data(reply_type, data["ok"], where=reply_type.__name__)


def storage_error(operation: str, error_number: int, *, detail: str = "", **arguments: object) -> ApiError:
    """Return the exception for an errno of the storage service."""
    reason_by_errno = {
        errno.EREMOTEIO: Reason.PEER_GONE,
        errno.EACCES: Reason.NO_PERMISSION,
        errno.EPERM: Reason.NO_PERMISSION,
        errno.EINVAL: Reason.BAD_ARGUMENT,
        errno.EBADF: Reason.BAD_DESCRIPTOR,
        errno.ETIMEDOUT: Reason.TIMEOUT,
    }
    return ApiError(
        api=Api.STORAGE,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=reason_by_errno.get(error_number, Reason.OTHER),
        detail=detail,
    )


def _pack(data: Json) -> bytes:
    # The JSON is ASCII with escapes, because a name can contain lone surrogates, which UTF-8 cannot encode. They stand
    # for bytes of the name that are not UTF-8.
    payload = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    if len(payload) > CONTROL_BYTES_MAX:
        message = f"a control message has at most {CONTROL_BYTES_MAX} bytes, not {len(payload)}"
        raise UsageError(message)
    return payload


def _unpack(payload: bytes) -> dict[str, Json]:
    try:
        data = json.loads(
            payload.decode(), object_pairs_hook=_refuse_duplicate_members, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        message = f"control message: not JSON: {str(error)[:200]}"
        raise UsageError(message, reason=Reason.MALFORMED) from error
    if not isinstance(data, dict):
        message = "control message: the JSON is not an object"
        raise UsageError(message, reason=Reason.MALFORMED)
    return data


def _refuse_duplicate_members(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return the members of a JSON object. Raise ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        message = "an object has two members with one name"
        raise ValueError(message)
    return members


def _refuse_constant(constant: str) -> Json:
    """Refuse NaN, Infinity and -Infinity, which json.loads() accepts although JSON does not have them."""
    message = f"{constant} is not a JSON number"
    raise ValueError(message)


def _check_values(value: object, where: str, *, field_name: str = "") -> None:
    """Check that numbers have at most 63 bits, only times of files are negative, and texts are within their limits.

    `where` names the value in errors, and `field_name` is the name of its field.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(item, f"{where}.{key[:40]}", field_name=key)
    elif isinstance(value, list):
        for item in value:
            _check_values(item, where, field_name=field_name)
    elif isinstance(value, str):
        if len(value) > _CHARACTERS_MAX_BY_FIELD.get(field_name, PATH_CHARACTERS_MAX) or "\0" in value:
            message = f"{where}: a text of {len(value)} characters is too long, or contains a zero character"
            raise UsageError(message, reason=Reason.MALFORMED)
        # A token is only compared, never used as a file name.
        if field_name != "token" and not _can_be_file_name(value):
            message = f"{where}: a lone surrogate must stand for a byte (U+DC80 to U+DCFF), as in os.fsdecode()"
            raise UsageError(message)
    elif isinstance(value, int) and not (-_NUMBER_MAX if field_name in _TIME_FIELDS else 0) <= value <= _NUMBER_MAX:
        # The limit of 63 bits is also enough for inode numbers: no file system of Linux uses bit 64 of st_ino.
        message = f"{where}: {str(value)[:40]} is out of range"
        raise UsageError(message, reason=Reason.MALFORMED)


def _can_be_file_name(text: str) -> bool:
    """Return whether a text can be a file name. JSON may contain lone surrogates that do not stand for bytes."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _check_request(request: Request, where: str) -> None:
    """Check rules such as: exactly one of path and handle must be set. `where` names the request in errors."""
    problem = ""
    match request:
        case messages.StorageHello(lanes=lanes) if not 0 < len(lanes) <= messages.LANES_MAX:
            problem = f"a session must have 1 to {messages.LANES_MAX} lanes, not {len(lanes)}"
        case messages.Stat(path=path, handle=handle) | messages.Truncate(path=path, handle=handle) if (
            path is None
        ) == (handle is None):
            problem = "exactly one of path and handle must be given"
        case messages.PunchHole(ranges=ranges):
            if not 0 < len(ranges) <= RANGES_MAX or any(len(bounds) != 2 or bounds[0] > bounds[1] for bounds in ranges):  # noqa: PLR2004
                problem = f"there must be 1 to {RANGES_MAX} ranges, each with an end that is not smaller than its begin"
        case messages.Rename(exclusive=True, exchange=True):
            problem = "exclusive and exchange exclude each other"
        case messages.Open(mode=mode) | messages.Mkdir(mode=mode) | messages.Chmod(mode=mode) if mode > 0o7777:  # noqa: PLR2004
            problem = f"the mode must be at most 0o7777, not {mode:#o}"
        case messages.SetUser(uid=uid, gid=gid, groups=groups) if len(groups) > _GROUPS_MAX or (
            max(uid, gid, *groups) > _ID_MAX
        ):
            problem = (
                f"a user must have at most {_GROUPS_MAX} groups, and uid, gid and groups must be at most {_ID_MAX}"
            )
        case messages.Chown(uid=uid, gid=gid) if max(uid or 0, gid or 0) > _ID_MAX:
            problem = f"the numbers of a user and a group must be at most {_ID_MAX}"
    if problem:
        message = f"{where}: {problem}"
        raise UsageError(message, reason=Reason.MALFORMED)
