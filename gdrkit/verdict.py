"""The four words in which anything that was looked at ends.

Level 0. There are no others: what was not seen is never called good.
"""

from __future__ import annotations

import enum

__all__ = ["Verdict"]


class Verdict(enum.Enum):
    """What a case or a rule showed; never more than was observed."""

    PASS = "pass"  # noqa: S105 - a verdict and no password.
    FAIL = "fail"
    NOT_RUN = "not_run"
    UNPROVEN = "unproven"
