"""The four verdicts of test cases and of the doctor's rules, and the limit below which a difference is noise.

There are no other verdicts. A result that was not observed is never reported as a pass.
"""

from __future__ import annotations

import enum

__all__ = ["NOISE_PERCENT", "Verdict"]

# A smaller relative difference of two measurements is noise, in percent. gdrkit.report.noise uses a larger limit if the
# rounds of a measurement differ more from each other.
NOISE_PERCENT = 5.0


class Verdict(enum.Enum):
    """The result of a test case or of a rule.

    NOT_RUN: the machine lacks something that the case needs. UNPROVEN: the data is right, but it was not observed that
    the bytes took the required path.
    """

    PASS = "pass"  # noqa: S105 - a verdict, not a password.
    FAIL = "fail"
    NOT_RUN = "not_run"
    UNPROVEN = "unproven"
