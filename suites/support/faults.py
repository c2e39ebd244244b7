"""Fault plans of the twins for the duration of a block."""

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
    """Let calls of this process fail by these rules, which are lines of a fault plan, until the block ends."""
    control = launch.twin_control()
    control.set_faults(api.value, "\n".join(["gdrkit-faults 1", *rules, ""]))
    try:
        yield
    finally:
        control.set_faults(api.value, "gdrkit-faults 1\n")
