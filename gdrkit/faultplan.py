"""The grammar of fault plans, so that a malformed one is refused before anything starts.

Level 1. One rule a line, ``#`` begins a comment, the first line is ``gdrkit-faults 1``::

    ibv_reg_dmabuf_mr  call=2     errno=EOPNOTSUPP
    cuMemAlloc_v2      call=1-3   status=2
    wc.rdma_write      call=*     status=12

The libraries read the same file by the same grammar; only they know which of their functions can fail, and say so at
their first call.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, errno_name

if TYPE_CHECKING:
    import os

__all__ = ["FaultRule", "parse_plan", "read_plan"]

HEADER = "gdrkit-faults 1"

# The errnos that a plan may call by name; any other goes by number.
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
_COMPLETIONS = ("wc.send", "wc.rdma_write", "wc.rdma_read")
_CODE_MAX = 4095
_CALL_MAX = (1 << 64) - 1
_ERRNO_ENOTSUPP = 524
_DELAY_US_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class FaultRule:
    """One rule: calls `first` to `last` (None: all from there on) of `point` wait for `delay_us`, then answer `code`.

    A code of None: what they would answer anyway.
    """

    point: str
    first: int
    last: int | None
    key: str
    code: int | None
    delay_us: int = 0


def read_plan(path: str | os.PathLike[str]) -> tuple[FaultRule, ...]:
    """Read and check the plan at `path`.

    Raises
    ------
    ApiError
        ``MALFORMED`` with EINVAL and the line; or the kernel's errno when the file cannot be read.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8", "backslashreplace")
    except OSError as error:
        number = error.errno or errno.EIO
        raise _error(number, str(path), line=0, detail="the file cannot be read", reason=Reason.BAD_ARGUMENT) from error
    return parse_plan(text, name=str(path))


def parse_plan(text: str, *, name: str = "plan") -> tuple[FaultRule, ...]:
    """Check the text of a plan; see :func:`read_plan`."""
    rules: list[FaultRule] = []
    headed = False
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not headed:
            if words != HEADER.split():
                raise _malformed(name, number, f"expected '{HEADER}' first")
            headed = True
            continue
        rules.append(_rule(words, name, number))
    if not headed:
        raise _malformed(name, 1, f"expected '{HEADER}' first")
    return tuple(rules)


def _rule(words: list[str], name: str, number: int) -> FaultRule:
    point = words[0]
    key = _code_key(point)
    if key is None:
        raise _malformed(name, number, f"'{point}' is no function of verbs (ibv_) or CUDA (cu), nor a completion (wc.)")
    calls: tuple[int, int | None] | None = None
    code: int | None = None
    delay_us = 0
    for word in words[1:]:
        if word.startswith("call=") and calls is None:
            calls = _calls(word.removeprefix("call="))
            if calls is None:
                raise _malformed(name, number, f"'{word}': expected call=N, call=N-M or call=*")
        elif word.startswith(f"{key}=") and code is None:
            code = _code(word.removeprefix(f"{key}="), named=key == "errno")
            if code is None:
                raise _malformed(
                    name, number, f"'{word}': expected a name or number from 1 to {_CODE_MAX} after {key}="
                )
        elif word.startswith("delay_us=") and not delay_us:
            delay_us = _number(word.removeprefix("delay_us=")) or 0
            if not 1 <= delay_us <= _DELAY_US_MAX:
                raise _malformed(name, number, f"'{word}': expected a number from 1 to {_DELAY_US_MAX} after delay_us=")
        else:
            raise _malformed(name, number, f"'{word}' is not expected here")
    if calls is None or (code is None and not delay_us):
        raise _malformed(name, number, f"expected '{point} call=... {key}=... or delay_us=...'")
    return FaultRule(point=point, first=calls[0], last=calls[1], key=key, code=code, delay_us=delay_us)


def _code_key(point: str) -> str | None:
    if point in _COMPLETIONS:
        return "status"
    if point.startswith(("ibv_", "_ibv_")):
        return "errno"
    return "status" if point.startswith("cu") else None


def _calls(text: str) -> tuple[int, int | None] | None:
    if text == "*":
        return 1, None
    begin, dash, end = text.partition("-")
    first = _number(begin)
    last = _number(end) if dash else first
    if first is None or last is None or not 1 <= first <= last <= _CALL_MAX:
        return None
    return first, last


def _code(text: str, *, named: bool) -> int | None:
    if named and text in _ERRNO_NAMES:
        # The kernel's own ENOTSUPP is in no errno.h.
        return _ERRNO_ENOTSUPP if text == "ENOTSUPP" else int(getattr(errno, text))
    number = _number(text)
    return number if number is not None and 1 <= number <= _CODE_MAX else None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _malformed(name: str, line: int, detail: str) -> ApiError:
    return _error(errno.EINVAL, name, line=line, detail=detail, reason=Reason.MALFORMED)


def _error(number: int, name: str, *, line: int, detail: str, reason: Reason) -> ApiError:
    place = f"mend line {line} of the plan" if line else "name a file that can be read"
    return ApiError(
        api=Api.TWINS,
        operation="read fault plan",
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments={"path": name, "line": line} if line else {"path": name},
        reason=reason,
        what_to_do=f"{place}; a rule is 'FUNCTION call=N|N-M|* errno=E|status=S'",
        detail=detail,
    )
