"""Which way the bytes of a tier really go.

Level 4. A route is what was seen of transfers, and nothing is said of a tier before one was. Transfers to and from host
memory show nothing of it.
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
    """What the last transfer between a tier and device memory showed.

    Attributes
    ----------
    state : RouteState
        Of the direct route.
    route : str
        The way the bytes took: ``p2p``, ``nvfs``, ``engine`` ...; empty when there were none.
    why : str
        Why that was no direct one.
    """

    state: RouteState
    route: str = ""
    why: str = ""


UNSEEN = TierRoute(RouteState.UNPROVEN, why="no transfer between this tier and device memory was seen yet")


def seen(transferred: Transferred) -> TierRoute | None:
    """What a transfer showed; None when it showed nothing: host memory, or nobody wanted a direct route."""
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
    """What several showed together: one that fell back outweighs one that shows nothing, and that one a proven one."""
    order = [RouteState.FELL_BACK, RouteState.UNPROVEN, RouteState.PROVEN]
    return min((seen(each) or UNSEEN for each in transfers), key=lambda found: order.index(found.state), default=UNSEEN)
