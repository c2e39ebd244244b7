"""Qualification of this machine, the implementation of ``gdrkit qualify``: probe, plan, run, records, report.

The suites run in child processes, whose environment selects the substrate. This package starts and supervises these
processes, and derives the outcome from their records.
"""

from __future__ import annotations

from gdrkit.exit_code import ExitCode
from gdrkit.qualify.outcome import Outcome, decide
from gdrkit.qualify.plan import CasePlan, PlannedCase, fitting_sessions
from gdrkit.qualify.run import Options, plan_only, qualify

__all__ = [
    "CasePlan",
    "ExitCode",
    "Options",
    "Outcome",
    "PlannedCase",
    "decide",
    "fitting_sessions",
    "plan_only",
    "qualify",
]
