"""The number and the bytes of all file transfers of this process, by the route that they took."""

from __future__ import annotations

import sys
from typing import NamedTuple

from gdrkit import forks
from gdrkit.cufile import Route

__all__ = ["RouteTotals", "count_transfer", "transfer_totals"]


class RouteTotals(NamedTuple):
    """The transfers of one route that are over, and the bytes that they moved."""

    transfers_count: int
    moved_bytes: int


_cufile_totals_lock = forks.ForkSafeLock(reentrant=True)
# For each route: the number of the transfers by cuFile, and the bytes that they moved. The native engine counts its own
# transfers.
_cufile_totals: dict[Route, list[int]] = {}


def count_transfer(route: Route, moved_bytes: int) -> None:
    """Count a cuFile transfer that has ended. A failed transfer counts too, with the bytes that it moved."""
    with _cufile_totals_lock:
        totals = _cufile_totals.setdefault(route, [0, 0])
        totals[0] += 1
        totals[1] += moved_bytes


def transfer_totals() -> dict[Route, RouteTotals]:
    """Return the totals of this process for each route that a transfer took."""
    with _cufile_totals_lock:
        totals_by_route = {route: RouteTotals(*totals) for route, totals in _cufile_totals.items()}
    # If the native module is not loaded, the engine has transferred nothing, so this function does not load it.
    engine_module = sys.modules.get("gdrkit.gds._engine")
    if engine_module is not None and RouteTotals(*engine_module.totals()).transfers_count:
        totals_by_route[Route.ENGINE] = RouteTotals(*engine_module.totals())
    return totals_by_route
