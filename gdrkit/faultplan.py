"""Parser of fault plans, the files that tell the software twins which calls have to fail.

A software twin is a drop-in library that emulates hardware under the API of the real library. The twins read the plan
themselves, with the same grammar. ``gdrkit run`` and ``gdrkit qualify`` parse it here first, so that a malformed plan
is refused before a process starts.

The first line of a plan is ``gdrkit-faults 1``. Each further line is one rule, and ``#`` begins a comment::

    ibv_reg_dmabuf_mr  call=2     errno=EOPNOTSUPP
    cuMemAlloc_v2      call=1-3   status=2
    wc.rdma_write      call=*     status=12
    cufile.route       call=*     route=nvfs
    ibv_post_send      call=*     stop=/tmp/run/stop
    wc.rdma_read       call=*     status=12  nic=twin2

A rule is for a *point*: an API function, or a named step inside a twin, such as the completion of a work request
(``wc.rdma_write``). The first rule above makes the second call of ``ibv_reg_dmabuf_mr`` fail with EOPNOTSUPP. This
parser checks only the prefix of a function name, such as ``ibv_``. A twin reports an unknown function when the process
makes its first call to the twin.
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

# The errnos that a plan may contain as names. All others are written as numbers.
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
# The points at which a work request completes. A rule for "wc.NAME" makes the work request fail before its bytes are
# transferred; a rule for "wc.NAME.landed" makes it fail after the transfer.
_COMPLETION_FAULT_POINTS = tuple(
    f"wc.{name}{suffix}" for name in ("send", "rdma_write", "rdma_read") for suffix in ("", ".landed")
)
# Points whose calls belong to a NIC, so that a rule can name the NIC.
_NIC_FAULT_POINTS = frozenset(
    ["ibv_reg_mr", "ibv_reg_dmabuf_mr", *(point for point in _COMPLETION_FAULT_POINTS if ".rdma_" in point)]
)
# The points at which a transfer of a cuFile batch or of a CUDA stream completes, after its cuFile call has returned.
_CUFILE_IO_FAULT_POINTS = ("cufile.batch_io", "cufile.async_io")
_ROUTE_FAULT_POINT = "cufile.route"
# The lowest status that a rule can set, for each point where it is not 1. With status 0 for "cufile.async_io", a
# transfer of a CUDA stream completes with 0 bytes moved. With status 0 for the others, a work request completes with
# success although no bytes were moved.
_STATUS_MIN_BY_POINT = {"cufile.async_io": 0, "wc.rdma_write": 0, "wc.rdma_read": 0}
# The values of route=. The first route has the code 1, the second 2, and so on.
_ROUTE_NAMES = ("p2p", "nvfs", "posix")
# The kernel's MAX_ERRNO. A plan uses it also as the limit of status= for all functions outside cuFile.
_ERRNO_MAX = 4095
# The largest CUfileOpError, which is the limit of status= for the functions of cuFile.
_CUFILE_STATUS_MAX = 5050
_CALL_MAX = (1 << 64) - 1  # The twins count calls in 64 bits.
# An errno of the kernel that user space receives but errno.h does not define.
_ERRNO_ENOTSUPP = 524
_DELAY_US_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One rule of a fault plan.

    The calls `first_call` to `last_call` of `point`, counted from 1, wait for `delay_us` microseconds and then return
    `code`. `code_key` is the type of the code: ``errno``, ``status`` or ``route``. A `last_call` of None means all
    calls from `first_call` on. A `code` of None means that the call returns its normal result.

    While the file `hold_path` exists, the call waits, at most 60 s.

    If the file `stop_path` exists at the beginning of a call, the twin appends ``.<process id>`` to its name and stops
    the process with SIGSTOP.

    With a `nic`, the rule applies only to calls that belong to the NIC of this name.
    """

    point: str
    first_call: int
    last_call: int | None
    code_key: str
    code: int | None
    delay_us: int = 0
    hold_path: str = ""
    stop_path: str = ""
    nic: str = ""


def read_plan(path: str | os.PathLike[str]) -> tuple[FaultRule, ...]:
    """Read and check the plan at `path`.

    Raises
    ------
    ApiError
        MALFORMED, EINVAL: a line is malformed; ``arguments["line"]`` of the error is its number. BAD_ARGUMENT: the file
        cannot be read; the error has the errno of the system call.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "backslashreplace")
    except OSError as error:
        errno_value = error.errno or errno.EIO
        raise _make_error(
            errno_value, str(path), line_number=0, detail="the file cannot be read", reason=Reason.BAD_ARGUMENT
        ) from error
    return parse_plan(text, name=str(path))


def parse_plan(text: str, *, name: str = "plan") -> tuple[FaultRule, ...]:
    """Parse and check the text of a plan; see :func:`read_plan`."""
    rules: list[FaultRule] = []
    has_header = False
    for line_number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not has_header:
            if words != HEADER.split():
                raise _make_malformed_error(name, line_number, f"the first line must be '{HEADER}'")
            has_header = True
            continue
        rules.append(_parse_rule(words, name, line_number))
    if not has_header:
        raise _make_malformed_error(name, 1, f"the first line must be '{HEADER}'")
    return tuple(rules)


def _parse_rule(words: list[str], plan_name: str, line_number: int) -> FaultRule:
    point_name = words[0]
    code_key = _find_code_key(point_name)
    if code_key is None:
        apis_text = (
            "verbs (ibv_), librdmacm (rdma_), CUDA (cu), cuFile (cuFile) or hl-thunk (hlthunk_), "
            "or a point of a twin (wc., cufile.)"
        )
        raise _make_malformed_error(plan_name, line_number, f"'{point_name}' is not a function of {apis_text}")
    parsed_values: dict[str, Any] = {}
    for word in words[1:]:
        word_key, separator, value_text = word.partition("=")
        allowed_keys = {
            "call",
            code_key,
            "delay_us",
            "hold",
            "stop",
            *(["nic"] if point_name in _NIC_FAULT_POINTS else []),
        }
        if not separator or word_key in parsed_values or word_key not in allowed_keys:
            raise _make_malformed_error(plan_name, line_number, f"'{word}' is not expected here")
        if word_key == "status":
            minimum, maximum = _find_status_range(point_name)
            parsed_values[word_key] = _parse_number_in_range(value_text, minimum=minimum, maximum=maximum)
            expected_form = f"a number from {minimum} to {maximum} after status="
        else:
            parse_value, expected_form = _PARSER_AND_FORM_BY_KEY[word_key]
            parsed_values[word_key] = parse_value(value_text)
        if parsed_values[word_key] is None:
            raise _make_malformed_error(plan_name, line_number, f"'{word}': expected {expected_form}")
    if "call" not in parsed_values or not parsed_values.keys() - {"call", "nic"}:
        raise _make_malformed_error(
            plan_name,
            line_number,
            f"expected '{point_name} call=... {code_key}=..., delay_us=..., hold=... or stop=...'",
        )
    first_call, last_call = parsed_values["call"]
    return FaultRule(
        point=point_name,
        first_call=first_call,
        last_call=last_call,
        code_key=code_key,
        code=parsed_values.get(code_key),
        delay_us=parsed_values.get("delay_us", 0),
        hold_path=parsed_values.get("hold", ""),
        stop_path=parsed_values.get("stop", ""),
        nic=parsed_values.get("nic", ""),
    )


def _find_code_key(point: str) -> str | None:
    """Return the key of a rule that sets the result of `point`: errno, status or route.

    The result is None if the name of the point has no known prefix.
    """
    if point == _ROUTE_FAULT_POINT:
        return "route"
    if point in _COMPLETION_FAULT_POINTS or point in _CUFILE_IO_FAULT_POINTS:
        return "status"
    if point.startswith(("ibv_", "_ibv_", "rdma_", "hlthunk_")):
        return "errno"
    return "status" if point.startswith("cu") else None


def _find_status_range(point: str) -> tuple[int, int]:
    """Return the smallest and the largest status that a plan can set for the function or point."""
    return _STATUS_MIN_BY_POINT.get(point, 1), _CUFILE_STATUS_MAX if point.startswith(
        ("cuFile", "cufile.")
    ) else _ERRNO_MAX


def _parse_calls(text: str) -> tuple[int, int | None] | None:
    if text == "*":
        return 1, None
    first_text, dash, last_text = text.partition("-")
    first_call = _parse_number(first_text)
    last_call = _parse_number(last_text) if dash else first_call
    if first_call is None or last_call is None or not 1 <= first_call <= last_call <= _CALL_MAX:
        return None
    return first_call, last_call


def _parse_errno(text: str) -> int | None:
    if text in _ERRNO_NAMES:
        # ENOTSUPP is internal to the kernel and not in errno.h.
        return _ERRNO_ENOTSUPP if text == "ENOTSUPP" else int(getattr(errno, text))
    return _parse_number_in_range(text, maximum=_ERRNO_MAX)


def _parse_number_in_range(text: str, *, maximum: int, minimum: int = 1) -> int | None:
    number = _parse_number(text)
    return number if number is not None and minimum <= number <= maximum else None


def _parse_route(text: str) -> int | None:
    return _ROUTE_NAMES.index(text) + 1 if text in _ROUTE_NAMES else None


def _parse_delay_us(text: str) -> int | None:
    number = _parse_number(text)
    return number if number is not None and 1 <= number <= _DELAY_US_MAX else None


def _parse_absolute_path(text: str) -> str | None:
    return text if text.startswith("/") else None


def _parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


# For each key of a rule: the parser of its value, and the expected form for the error message. A parser returns None
# for a malformed value.
_PARSER_AND_FORM_BY_KEY: dict[str, tuple[Callable[[str], object], str]] = {
    "call": (_parse_calls, "call=N, call=N-M or call=*"),
    "errno": (_parse_errno, f"a name or number from 1 to {_ERRNO_MAX} after errno="),
    "route": (_parse_route, "p2p, nvfs or posix after route="),
    "delay_us": (_parse_delay_us, f"a number from 1 to {_DELAY_US_MAX} after delay_us="),
    "hold": (_parse_absolute_path, "the absolute path of a file after hold="),
    "nic": (lambda text: text or None, "the name of a NIC after nic="),
    "stop": (_parse_absolute_path, "the absolute path of a file after stop="),
}


def _make_malformed_error(plan_name: str, line_number: int, detail: str) -> ApiError:
    return _make_error(errno.EINVAL, plan_name, line_number=line_number, detail=detail, reason=Reason.MALFORMED)


def _make_error(errno_value: int, plan_name: str, *, line_number: int, detail: str, reason: Reason) -> ApiError:
    """Return the error about a line of a plan. With a `line_number` of 0, the error is about the whole file."""
    advice = f"fix line {line_number} of the plan" if line_number else "name a file that can be read"
    effects_text = "errno=E|status=S|route=R|delay_us=N|hold=FILE|stop=FILE|nic=NAME"
    return ApiError(
        api=Api.TWINS,
        operation="read fault plan",
        status=errno_value,
        status_name=errno_name(errno_value),
        errno=errno_value,
        arguments={"path": plan_name, "line": line_number} if line_number else {"path": plan_name},
        reason=reason,
        what_to_do=f"{advice}; a rule is 'FUNCTION call=N|N-M|* {effects_text}'",
        detail=detail,
    )
