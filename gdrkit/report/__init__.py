"""Records of test cases, and the reports that are made from them.

A record says what one case observed. Facts describe the machine. Every report is derived from records and facts, and
no part of a report is written by hand. Only :mod:`gdrkit.report.substrate` decides what executed the operations of a
loaded library: hardware, software in the kernel or a software twin (a drop-in library that emulates hardware).
"""

from __future__ import annotations

from gdrkit.report.record import (
    CaseReason,
    ClaimedFile,
    ClaimedRoute,
    Record,
    SeenLibrary,
    Verdict,
    append_record,
    parse_records,
    read_records,
)
from gdrkit.report.routes import RouteOutcome, RouteStatus, route_name, route_statuses
from gdrkit.report.run import Run, RunFolder, RunState
from gdrkit.report.substrate import Substrate, substrate_of, weakest_substrate

__all__ = [
    "CaseReason",
    "ClaimedFile",
    "ClaimedRoute",
    "Record",
    "RouteOutcome",
    "RouteStatus",
    "Run",
    "RunFolder",
    "RunState",
    "SeenLibrary",
    "Substrate",
    "Verdict",
    "append_record",
    "parse_records",
    "read_records",
    "route_name",
    "route_statuses",
    "substrate_of",
    "weakest_substrate",
]
