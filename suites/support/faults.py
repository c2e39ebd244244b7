"""Fault plans inside one case: which call of which function of a twin fails, and how."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit import launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.errors import Api

__all__ = ["faults"]


@contextlib.contextmanager
def faults(api: Api, *rules: str) -> Iterator[None]:
    """Have the calls of this process fail by these rules (the lines of a fault plan) until the block ends."""
    control = launch.twin_control()
    control.set_faults(api.value, "\n".join(["gdrkit-faults 1", *rules, ""]))
    try:
        yield
    finally:
        control.set_faults(api.value, "gdrkit-faults 1\n")
