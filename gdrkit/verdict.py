"""Verdicts of test cases and of the doctor's rules, states of routes, and the limit below which a difference is noise.

There are no other verdicts and states. A result that was not observed is never reported as a pass.
"""

from __future__ import annotations

import enum

__all__ = ["NOISE_PERCENT", "RouteOutcome", "Verdict"]

# Two measurements that differ by less than this percentage differ only by noise. gdrkit.report.noise uses a larger
# limit if the rounds of a measurement differ more from each other.
NOISE_PERCENT = 5.0


class Verdict(enum.Enum):
    """The result of a test case or of a rule of the doctor.

    NOT_RUN: the machine lacks something that the case needs. UNPROVEN: the data is correct, but no evidence shows that
    the bytes took the required path.
    """

    PASS = "pass"  # noqa: S105 - a verdict, not a password.
    FAIL = "fail"
    NOT_RUN = "not_run"
    UNPROVEN = "unproven"


class RouteOutcome(enum.Enum):
    """The state of a route on this machine.

    PROVEN: the correct bytes arrived, and counters show that they took the route. UNPROVEN: no counter shows which
    route the bytes took. FELL_BACK: the bytes took another route. NOT_POSSIBLE: an attempt failed, and the cause is
    known.
    """

    PROVEN = "proven"
    UNPROVEN = "unproven"
    FELL_BACK = "fell_back"
    NOT_POSSIBLE = "not_possible"
