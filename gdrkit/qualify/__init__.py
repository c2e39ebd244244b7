"""Qualify this machine: probe, plan, run, records, report.

Level 6. The suites run in child processes on the substrate that was chosen before they start; this room starts them,
watches them, and decides what their records amount to.
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
