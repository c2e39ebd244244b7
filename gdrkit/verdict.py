"""The four verdicts of cases and rules, and the smallest difference of numbers that counts.

There are no other verdicts. Something that was not observed is never reported as good.
"""

from __future__ import annotations

import enum

__all__ = ["NOISE_PERCENT", "Verdict"]

# Relative differences below this are noise, in percent. gdrkit.report.noise uses a larger limit if the rounds of a
# measurement scatter more.
NOISE_PERCENT = 5.0


class Verdict(enum.Enum):
    """The result of a case or a rule. It never claims more than was observed."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password.
    FAIL = "fail"
    NOT_RUN = "not_run"
    UNPROVEN = "unproven"
