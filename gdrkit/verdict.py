"""The four words in which anything that was looked at ends, and how far apart numbers must be to be called different.

Level 0. There are no other words: what was not seen is never called good.
"""

from __future__ import annotations

import enum

__all__ = ["NOISE_PERCENT", "Verdict"]

# What no number is believed to be better than; the scatter of its own rounds may ask for more: gdrkit.report.noise.
NOISE_PERCENT = 5.0


class Verdict(enum.Enum):
    """What a case or a rule showed; never more than was observed."""

    PASS = "pass"  # noqa: S105 - a verdict and no password.
    FAIL = "fail"
    NOT_RUN = "not_run"
    UNPROVEN = "unproven"
