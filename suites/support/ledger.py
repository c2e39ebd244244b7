"""Counters of a twin in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from gdrkit.errors import Api

__all__ = ["calls", "delayed_at_once", "traffic"]


def calls(api: Api) -> dict[str, int]:
    """Return the number of calls by function since the library was loaded."""
    return cast("dict[str, int]", _ledger(api)["calls"])


def traffic(api: Api) -> dict[str, dict[str, int]]:
    """Return the bytes and requests that each NIC sent, and those that it served (``served_...``)."""
    return cast("dict[str, dict[str, int]]", _ledger(api)["traffic"])


def delayed_at_once(api: Api) -> dict[str, int]:
    """Return, by function, the largest number of calls that the fault plan delayed at the same time."""
    return cast("dict[str, int]", _ledger(api)["delayed"])


def _ledger(api: Api) -> dict[str, object]:
    state = launch.twin_control().ledger(api.value)
    assert state is not None
    return state
