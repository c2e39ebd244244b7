"""Checks of values in records.jsonl and run.json, in addition to the types of their fields.

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

_START_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SUBSTRATES = {substrate.value for substrate in Substrate}
# Largest exit code of a process (exit(3) keeps 8 bits).
_EXIT_CODE_MAX = 255


def check_started(text: str, value_path: str) -> None:
    """Check that `text` is a time in UTC, e.g. ``2026-11-20T12:00:00Z``. Texts of this form sort by time.

    Raises
    ------
    UsageError
        ``MALFORMED``: the text has another form, or is not a valid date.
    """
    expected = "a time such as 2026-11-20T12:00:00Z"
    if _START_TIME_PATTERN.fullmatch(text) is None:
        raise make_malformed_error(value_path, expected, text)
    try:
        dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise make_malformed_error(value_path, expected, text) from error


def check_substrate(substrate_by_api: Mapping[str, str], value_path: str) -> None:
    """Check that the substrate of each API is a value of :class:`Substrate`.

    Raises
    ------
    UsageError
        ``MALFORMED``: a substrate is unknown.
    """
    for api, substrate in substrate_by_api.items():
        if substrate not in _SUBSTRATES:
            substrate_path = f"{value_path}.{api}"
            raise make_malformed_error(substrate_path, "one of " + ", ".join(sorted(_SUBSTRATES)), substrate)


def check_exit_code(code: int, value_path: str) -> None:
    """Check that `code` is a possible exit code of a process.

    Raises
    ------
    UsageError
        ``MALFORMED``: the code is out of range.
    """
    if not 0 <= code <= _EXIT_CODE_MAX:
        expected = f"0 to {_EXIT_CODE_MAX}"
        raise make_malformed_error(value_path, expected, code)


def make_malformed_error(value_path: str, expected: str, actual: object) -> UsageError:
    """Return the error for an unexpected value. `value_path` is its file and field, such as ``run.json.started``."""
    return UsageError(f"{value_path}: expected {expected}, found {repr(actual)[:80]}", reason=Reason.MALFORMED)
