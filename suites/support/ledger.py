"""The counters of a software twin that this process has loaded: calls by function, and traffic by NIC.

A software twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from gdrkit.errors import Api

__all__ = ["calls", "delayed_at_once", "traffic"]


def calls(api: Api) -> dict[str, int]:
    """Return the number of calls of each function since the twin was loaded."""
    return cast("dict[str, int]", _ledger(api)["calls"])


def traffic(api: Api) -> dict[str, dict[str, int]]:
    """Return the bytes and requests that each NIC sent, and (``served_...``) that each NIC served for peers."""
    return cast("dict[str, dict[str, int]]", _ledger(api)["traffic"])


def delayed_at_once(api: Api) -> dict[str, int]:
    """Return, for each function, the largest number of its calls that the fault plan delayed at the same time."""
    return cast("dict[str, int]", _ledger(api)["delayed"])


def _ledger(api: Api) -> dict[str, object]:
    counters = launch.twin_control().ledger(api.value)
    assert counters is not None
    return counters
