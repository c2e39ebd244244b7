"""Qualification of this machine, the implementation of ``gdrkit qualify``.

The steps are: collect facts about the machine, plan the cases, run them, and write the report. The cases run in child
processes, which either load the real libraries or the software twins (drop-in libraries that emulate hardware). This
package starts and supervises these processes, and derives the outcome from the records that they write.
"""

from __future__ import annotations

from gdrkit.exit_code import ExitCode
from gdrkit.qualify.check import CheckResult, check
from gdrkit.qualify.outcome import Outcome, decide
from gdrkit.qualify.plan import CasePlan, PlannedCase, list_nox_sessions
from gdrkit.qualify.run import Options, plan_only, qualify

__all__ = [
    "CasePlan",
    "CheckResult",
    "ExitCode",
    "Options",
    "Outcome",
    "PlannedCase",
    "check",
    "decide",
    "list_nox_sessions",
    "plan_only",
    "qualify",
]
