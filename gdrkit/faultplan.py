"""Parser of fault plans, so that a malformed plan is refused before a process starts.

The first line of a plan is ``gdrkit-faults 1``. Each further line is one rule, and ``#`` begins a comment::

    ibv_reg_dmabuf_mr  call=2     errno=EOPNOTSUPP
    cuMemAlloc_v2      call=1-3   status=2
    wc.rdma_write      call=*     status=12
    cufile.route       call=*     route=nvfs
    ibv_post_send      call=*     stop=/tmp/run/stop

The twin libraries read the same file with the same grammar. Only they know which of their functions can fail, and they
report an unknown function at their first call.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Api, ApiError, Reason, errno_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__all__ = ["FaultRule", "parse_plan", "read_plan"]

HEADER = "gdrkit-faults 1"

# The errnos that a plan may name. All others are written as numbers.
_ERRNO_NAMES = frozenset(
    [
        "EPERM",
        "ENOENT",
        "EIO",
        "ENXIO",
        "EBADF",
        "EAGAIN",
        "ENOMEM",
        "EACCES",
        "EFAULT",
        "EBUSY",
        "ENODEV",
        "EINVAL",
        "EMFILE",
        "ENOSPC",
        "EPIPE",
        "ENOSYS",
        "EPROTO",
        "EOVERFLOW",
        "ENOTSUP",
        "EOPNOTSUPP",
        "EPROTONOSUPPORT",
        "ENOTSUPP",
        "ETIMEDOUT",
        "ECONNREFUSED",
    ]
)
# Points of the twins that are not functions: completions of queue pairs, and the I/O of cuFile after a call returned.
_COMPLETION_POINTS = tuple(
    f"wc.{name}{suffix}" for name in ("send", "rdma_write", "rdma_read") for suffix in ("", ".landed")
)
_CUFILE_IO_POINTS = ("cufile.batch_io", "cufile.async_io")
_ROUTE_POINT = "cufile.route"
# The lowest status, if it is not 1. An asynchronous transfer of a stream can return 0 without having moved any bytes.
_STATUS_MIN = {"cufile.async_io": 0}
# The routes in the order of their numbers, which begin at 1.
_ROUTES = ("p2p", "nvfs", "posix")
_CODE_MAX = 4095
# The largest CUfileOpError is above all errnos.
_CUFILE_CODE_MAX = 5050
_CALL_MAX = (1 << 64) - 1
_ERRNO_ENOTSUPP = 524
_DELAY_US_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One rule of a fault plan.

    Calls number `first` to `last` of `point` wait for `delay_us` microseconds and then return `code`. A `last` of None
    means all calls from `first` on. A `code` of None means that the call returns its normal result. If the file `stop`
    exists at the beginning of a call, that call first renames it to ``<stop>.<process id>`` and stops its process
    (SIGSTOP).
    """

    point: str
    first: int
    last: int | None
    key: str
    code: int | None
    delay_us: int = 0
    stop: str = ""


def read_plan(path: str | os.PathLike[str]) -> tuple[FaultRule, ...]:
    """Read and check the plan at `path`.

    Raises
    ------
    ApiError
        MALFORMED with EINVAL: a line is malformed; the error has its number. Otherwise the file cannot be read, and the
        error has the kernel's errno.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "backslashreplace")
    except OSError as error:
        number = error.errno or errno.EIO
        raise _error(number, str(path), line=0, detail="the file cannot be read", reason=Reason.BAD_ARGUMENT) from error
    return parse_plan(text, name=str(path))


def parse_plan(text: str, *, name: str = "plan") -> tuple[FaultRule, ...]:
    """Parse and check the text of a plan; see :func:`read_plan`."""
    rules: list[FaultRule] = []
    has_header = False
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not has_header:
            if words != HEADER.split():
                raise _malformed(name, number, f"expected '{HEADER}' first")
            has_header = True
            continue
        rules.append(_parse_rule(words, name, number))
    if not has_header:
        raise _malformed(name, 1, f"expected '{HEADER}' first")
    return tuple(rules)


def _parse_rule(words: list[str], name: str, number: int) -> FaultRule:
    point = words[0]
    key = _code_key(point)
    if key is None:
        apis = "verbs (ibv_), CUDA (cu), cuFile (cuFile) or hl-thunk (hlthunk_), or a point of a twin (wc., cufile.)"
        raise _malformed(name, number, f"'{point}' is not a function of {apis}")
    values: dict[str, Any] = {}
    for word in words[1:]:
        key_of_word, equals, text = word.partition("=")
        if not equals or key_of_word in values or key_of_word not in {"call", key, "delay_us", "stop"}:
            raise _malformed(name, number, f"'{word}' is not expected here")
        if key_of_word == "status":
            least, most = _status_limits(point)
            values[key_of_word] = _parse_bounded(text, least=least, most=most)
            expected = f"a number from {least} to {most} after status="
        else:
            parse, expected = _PARSERS[key_of_word]
            values[key_of_word] = parse(text)
        if values[key_of_word] is None:
            raise _malformed(name, number, f"'{word}': expected {expected}")
    if "call" not in values or len(values) == 1:
        raise _malformed(name, number, f"expected '{point} call=... {key}=..., delay_us=... or stop=...'")
    first, last = values["call"]
    code, delay_us, stop = values.get(key), values.get("delay_us", 0), values.get("stop", "")
    return FaultRule(point=point, first=first, last=last, key=key, code=code, delay_us=delay_us, stop=stop)


def _code_key(point: str) -> str | None:
    """Return the key of the code that a rule of `point` sets, or None if no twin has such a point."""
    if point == _ROUTE_POINT:
        return "route"
    if point in _COMPLETION_POINTS or point in _CUFILE_IO_POINTS:
        return "status"
    if point.startswith(("ibv_", "_ibv_", "hlthunk_")):
        return "errno"
    return "status" if point.startswith("cu") else None


def _status_limits(point: str) -> tuple[int, int]:
    """Return the smallest and the largest status that a plan can set for the function or point."""
    return _STATUS_MIN.get(point, 1), _CUFILE_CODE_MAX if point.startswith(("cuFile", "cufile.")) else _CODE_MAX


def _parse_calls(text: str) -> tuple[int, int | None] | None:
    if text == "*":
        return 1, None
    begin, dash, end = text.partition("-")
    first = _parse_number(begin)
    last = _parse_number(end) if dash else first
    if first is None or last is None or not 1 <= first <= last <= _CALL_MAX:
        return None
    return first, last


def _parse_errno(text: str) -> int | None:
    if text in _ERRNO_NAMES:
        # ENOTSUPP is internal to the kernel and not in errno.h.
        return _ERRNO_ENOTSUPP if text == "ENOTSUPP" else int(getattr(errno, text))
    return _parse_bounded(text, most=_CODE_MAX)


def _parse_bounded(text: str, *, most: int, least: int = 1) -> int | None:
    number = _parse_number(text)
    return number if number is not None and least <= number <= most else None


def _parse_route(text: str) -> int | None:
    return _ROUTES.index(text) + 1 if text in _ROUTES else None


def _parse_delay_us(text: str) -> int | None:
    number = _parse_number(text)
    return number if number is not None and 1 <= number <= _DELAY_US_MAX else None


def _parse_stop(text: str) -> str | None:
    return text if text.startswith("/") else None


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


# For each key of a rule: the parser of its value, which returns None for a wrong value, and the expected form.
_PARSERS: dict[str, tuple[Callable[[str], object], str]] = {
    "call": (_parse_calls, "call=N, call=N-M or call=*"),
    "errno": (_parse_errno, f"a name or number from 1 to {_CODE_MAX} after errno="),
    "route": (_parse_route, "p2p, nvfs or posix after route="),
    "delay_us": (_parse_delay_us, f"a number from 1 to {_DELAY_US_MAX} after delay_us="),
    "stop": (_parse_stop, "the absolute path of a file after stop="),
}


def _malformed(name: str, line: int, detail: str) -> ApiError:
    return _error(errno.EINVAL, name, line=line, detail=detail, reason=Reason.MALFORMED)


def _error(number: int, name: str, *, line: int, detail: str, reason: Reason) -> ApiError:
    advice = f"fix line {line} of the plan" if line else "name a file that can be read"
    return ApiError(
        api=Api.TWINS,
        operation="read fault plan",
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments={"path": name, "line": line} if line else {"path": name},
        reason=reason,
        what_to_do=f"{advice}; a rule is 'FUNCTION call=N|N-M|* errno=E|status=S|route=R|delay_us=N|stop=FILE'",
        detail=detail,
    )
