"""What the form of records and runs asks of a value beyond its type.

Level 5, pure. What is read from a file is checked where its bytes are parsed, so that nothing behind it meets a time
that is none or a substrate that does not exist.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError
from gdrkit.report.substrate import Substrate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_exit_code", "check_started", "check_substrate", "malformed"]

_STARTED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SUBSTRATES = {substrate.value for substrate in Substrate}
_EXIT_CODE_MAX = 255


def check_started(text: str, where: str) -> None:
    """See that `text` is a time in UTC, e.g. ``2026-11-20T12:00:00Z``; times of this form also sort as text.

    Raises
    ------
    UsageError
        ``MALFORMED``: it is none, or one that no calendar has.
    """
    expected = "a time such as 2026-11-20T12:00:00Z"
    if _STARTED.fullmatch(text) is None:
        raise malformed(where, expected, text)
    try:
        dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise malformed(where, expected, text) from error


def check_substrate(names: Mapping[str, str], where: str) -> None:
    """See that each API ran on something that there is.

    Raises
    ------
    UsageError
        ``MALFORMED``: one did not.
    """
    for api, name in names.items():
        if name not in _SUBSTRATES:
            place = f"{where}.{api}"
            raise malformed(place, "one of " + ", ".join(sorted(_SUBSTRATES)), name)


def check_exit_code(code: int, where: str) -> None:
    """See that a process can have ended with `code`.

    Raises
    ------
    UsageError
        ``MALFORMED``: none can.
    """
    if not 0 <= code <= _EXIT_CODE_MAX:
        expected = f"0 to {_EXIT_CODE_MAX}"
        raise malformed(where, expected, code)


def malformed(where: str, expected: str, found: object) -> UsageError:
    """The typed error of a value that is not as it must be."""
    return UsageError(f"{where}: expected {expected}, found {repr(found)[:80]}", reason=Reason.MALFORMED)
