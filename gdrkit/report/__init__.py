"""Records, and the documents that are made of them for people and machines.

A record says what one case observed. Everything else in a report is derived from records and facts, never written by
hand. Only :mod:`gdrkit.report.substrate` decides what a loaded library stands for.
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
from gdrkit.report.substrate import Substrate, substrate_of, weakest

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
    "weakest",
]
