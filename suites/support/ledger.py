"""Counters of a software twin that this process has loaded: calls of each function, and traffic of each NIC.

A software twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from gdrkit import launch

if TYPE_CHECKING:
    from gdrkit.errors import Api

__all__ = ["read_call_counts", "read_peak_delayed_calls", "read_traffic"]


def read_call_counts(api: Api) -> dict[str, int]:
    """Return the number of calls of each function since the twin was loaded."""
    return cast("dict[str, int]", _read_counters(api)["calls"])


def read_traffic(api: Api) -> dict[str, dict[str, int]]:
    """Return the counters of each NIC: sent bytes and requests, and (``served_...``) those served for its peers."""
    return cast("dict[str, dict[str, int]]", _read_counters(api)["traffic"])


def read_peak_delayed_calls(api: Api) -> dict[str, int]:
    """Return, for each function, the largest number of its calls that the fault plan delayed at the same time."""
    return cast("dict[str, int]", _read_counters(api)["delayed"])


def _read_counters(api: Api) -> dict[str, object]:
    counters = launch.twin_control().ledger(api.value)
    assert counters is not None
    return counters
