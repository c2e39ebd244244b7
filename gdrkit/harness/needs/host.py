"""Needs about the host and this process.

Level 7.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from gdrkit.harness.needs.base import Need
    from gdrkit.inventory import Facts

__all__ = ["memlock", "module"]


@dataclass(frozen=True, slots=True)
class _Memlock:
    bytes_min: int

    @property
    def name(self) -> str:
        return f"host.memlock(bytes_min={self.bytes_min})"

    def check(self, facts: Facts) -> str | None:
        limits = facts.limits
        if "CAP_IPC_LOCK" in limits.capabilities:
            return None
        if not limits.memlock_known:
            return "the limit of locked memory cannot be read"
        if limits.memlock_bytes is None or limits.memlock_bytes >= self.bytes_min:
            return None
        return (
            f"{format_bytes(self.bytes_min)} of locked memory needed, the limit is {format_bytes(limits.memlock_bytes)}"
        )


def memlock(bytes_min: int) -> Need:
    """RLIMIT_MEMLOCK of at least `bytes_min`, or CAP_IPC_LOCK, which lifts it."""
    return _Memlock(bytes_min)


@dataclass(frozen=True, slots=True)
class _Module:
    module_name: str

    @property
    def name(self) -> str:
        return f"host.module({self.module_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - what Python can import is no fact of the host.
        if importlib.util.find_spec(self.module_name) is not None:
            return None
        return f"the Python module {self.module_name} is not installed"


def module(name: str) -> Need:
    """A Python module that is no dependency of gdrkit, such as torch."""
    return _Module(name)
