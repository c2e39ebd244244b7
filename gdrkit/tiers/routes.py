"""The route between a tier and device memory.

A route is reported only after it was observed in a transfer with device memory. Transfers with host memory do not show
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.cufile import Route, RouteState
from gdrkit.gds.transfer import DIRECT_ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.gds.transfer import Transferred

__all__ = ["UNOBSERVED", "TierRoute", "observed_route", "worst_route"]


@dataclass(frozen=True, slots=True)
class TierRoute:
    """The observation of the last transfer between a tier and device memory.

    Attributes
    ----------
    state : RouteState
        State of the direct route.
    route : str
        The route of the bytes: ``p2p``, ``nvfs``, ``engine`` ...; empty if no bytes moved.
    why : str
        The reason why the route was not direct.
    """

    state: RouteState
    route: str = ""
    why: str = ""


UNOBSERVED = TierRoute(RouteState.UNPROVEN, why="no transfer between this tier and device memory was observed yet")
_WORST_FIRST = (RouteState.FELL_BACK, RouteState.UNPROVEN, RouteState.PROVEN)


def observed_route(result: Transferred) -> TierRoute | None:
    """Return the route that a transfer showed. Return None if it used host memory, or if no direct route was wanted."""
    if not result.bytes:
        return None
    if result.route in DIRECT_ROUTES:
        return TierRoute(RouteState.PROVEN, result.route.value)
    if result.route is Route.UNKNOWN:
        return TierRoute(RouteState.UNPROVEN, result.route.value, "no counter shows the route of the bytes")
    if not result.why_not_direct:
        return None
    return TierRoute(RouteState.FELL_BACK, result.route.value, result.why_not_direct)


def worst_route(results: Iterable[Transferred]) -> TierRoute:
    """Return the worst route of several transfers: a fallback is worse than an unproven route, which is worse than a
    proven one.
    """
    routes = (observed_route(each) or UNOBSERVED for each in results)
    return min(routes, key=lambda route: _WORST_FIRST.index(route.state), default=UNOBSERVED)
