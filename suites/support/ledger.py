"""What a twin has counted in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from gdrkit.errors import Api

__all__ = ["calls", "delayed_at_once", "traffic"]


def calls(api: Api) -> dict[str, int]:
    """Calls by function since the library was loaded."""
    return cast("dict[str, int]", _ledger(api)["calls"])


def traffic(api: Api) -> dict[str, dict[str, int]]:
    """What each NIC has carried: bytes and requests that it sent, and (``served_...``) that it served."""
    return cast("dict[str, dict[str, int]]", _ledger(api)["traffic"])


def delayed_at_once(api: Api) -> dict[str, int]:
    """By function, how many of its calls were held up by the plan at the same time, at most, since the plan was set."""
    return cast("dict[str, int]", _ledger(api)["delayed"])


def _ledger(api: Api) -> dict[str, object]:
    state = launch.twin_control().ledger(api.value)
    assert state is not None
    return state
