"""The routes that the bytes of a tier take.

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

__all__ = ["UNSEEN", "TierRoute", "seen", "worst"]


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


UNSEEN = TierRoute(RouteState.UNPROVEN, why="no transfer between this tier and device memory was seen yet")


def seen(transferred: Transferred) -> TierRoute | None:
    """Return what a transfer showed, or None: it used host memory, or no direct route was wanted."""
    if not transferred.bytes:
        return None
    if transferred.route in DIRECT_ROUTES:
        return TierRoute(RouteState.PROVEN, transferred.route.value)
    if transferred.route is Route.UNKNOWN:
        return TierRoute(RouteState.UNPROVEN, transferred.route.value, "the way that the bytes took was not seen")
    if not transferred.why_not_direct:
        return None
    return TierRoute(RouteState.FELL_BACK, transferred.route.value, transferred.why_not_direct)


def worst(transfers: Iterable[Transferred]) -> TierRoute:
    """Return the worst of several results: a fallback is worse than an unproven route, and that than a proven one."""
    order = [RouteState.FELL_BACK, RouteState.UNPROVEN, RouteState.PROVEN]
    return min((seen(each) or UNSEEN for each in transfers), key=lambda found: order.index(found.state), default=UNSEEN)
