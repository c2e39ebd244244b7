"""The route of transfers between a tier and device memory: direct, or through host memory.

A route is reported only after a transfer to or from device memory has used it. Transfers with host memory have no such
route.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.cufile import Route, RouteState
from gdrkit.gds.result import DIRECT_ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.gds.result import TransferResult

__all__ = ["UNOBSERVED", "TierRoute", "observed_route", "worst_route"]


@dataclass(frozen=True, slots=True)
class TierRoute:
    """The route of the last transfer between a tier and device memory, as it was observed.

    Attributes
    ----------
    state : RouteState
        State of the direct route.
    route : str
        The route of the bytes, for example ``p2p``, ``nvfs`` or ``engine``; empty if no bytes were transferred.
    why : str
        The reason why the route was not direct.
    """

    state: RouteState
    route: str = ""
    why: str = ""


UNOBSERVED = TierRoute(RouteState.UNPROVEN, why="no transfer between this tier and device memory was observed yet")
_WORST_FIRST = (RouteState.FELL_BACK, RouteState.UNPROVEN, RouteState.PROVEN)


def observed_route(result: TransferResult) -> TierRoute | None:
    """Return the route that a transfer showed.

    Return None if the transfer moved no bytes or used host memory, or if the caller did not want a direct route.
    """
    if not result.bytes:
        return None
    if result.route in DIRECT_ROUTES:
        return TierRoute(RouteState.PROVEN, result.route.value)
    if result.route is Route.UNKNOWN:
        return TierRoute(RouteState.UNPROVEN, result.route.value, "no counter shows the route of the bytes")
    if not result.why_not_direct:
        return None
    return TierRoute(RouteState.FELL_BACK, result.route.value, result.why_not_direct)


def worst_route(results: Iterable[TransferResult]) -> TierRoute:
    """Return the worst route of several transfers.

    A fallback is worse than an unproven route, and an unproven route is worse than a proven one.
    """
    routes = (observed_route(result) or UNOBSERVED for result in results)
    return min(routes, key=lambda route: _WORST_FIRST.index(route.state), default=UNOBSERVED)
