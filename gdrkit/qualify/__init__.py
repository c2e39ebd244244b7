"""Qualification of this machine: probe, plan, run, records, report.

The suites run in child processes. The substrate is chosen before they start. This package starts the processes,
supervises them, and derives an outcome from their records.
"""

from __future__ import annotations

from gdrkit.exit_code import ExitCode
from gdrkit.qualify.outcome import Outcome, decide
from gdrkit.qualify.plan import Plan, PlannedCase, fitting_sessions
from gdrkit.qualify.run import Options, plan_only, qualify

__all__ = [
    "ExitCode",
    "Options",
    "Outcome",
    "Plan",
    "PlannedCase",
    "decide",
    "fitting_sessions",
    "plan_only",
    "qualify",
]
