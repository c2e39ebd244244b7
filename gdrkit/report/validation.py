"""Checks of values in records.jsonl and run.json that the types of their fields do not express.

The readers of both files call these checks. Later code can therefore rely on a valid time and a known substrate.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import TYPE_CHECKING

from gdrkit.errors import Reason, UsageError
from gdrkit.report.substrate import Substrate

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_exit_code", "check_started", "check_substrate", "make_malformed_error"]

_START_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SUBSTRATES = {substrate.value for substrate in Substrate}
# Largest exit code of a process (exit(3) keeps 8 bits).
_EXIT_CODE_MAX = 255


def check_started(text: str, where: str) -> None:
    """Check that `text` is a time in UTC, e.g. ``2026-11-20T12:00:00Z``. Times of this form also sort as text.

    Raises
    ------
    UsageError
        ``MALFORMED``: the text has another form, or is not a valid date.
    """
    expected = "a time such as 2026-11-20T12:00:00Z"
    if _START_TIME.fullmatch(text) is None:
        raise make_malformed_error(where, expected, text)
    try:
        dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise make_malformed_error(where, expected, text) from error


def check_substrate(names: Mapping[str, str], where: str) -> None:
    """Check that the substrate of each API is a known one.

    Raises
    ------
    UsageError
        ``MALFORMED``: a substrate is unknown.
    """
    for api, name in names.items():
        if name not in _SUBSTRATES:
            path = f"{where}.{api}"
            raise make_malformed_error(path, "one of " + ", ".join(sorted(_SUBSTRATES)), name)


def check_exit_code(code: int, where: str) -> None:
    """Check that `code` is a possible exit code of a process.

    Raises
    ------
    UsageError
        ``MALFORMED``: the code is out of range.
    """
    if not 0 <= code <= _EXIT_CODE_MAX:
        expected = f"0 to {_EXIT_CODE_MAX}"
        raise make_malformed_error(where, expected, code)


def make_malformed_error(where: str, expected: str, actual: object) -> UsageError:
    """Return the error for a value with the path `where` that is not as expected."""
    return UsageError(f"{where}: expected {expected}, found {repr(actual)[:80]}", reason=Reason.MALFORMED)
