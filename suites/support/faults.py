"""Error injection: a fault plan makes calls of a software twin in this process fail for the duration of a block.

A software twin is a library that emulates the hardware below an API. A fault plan is a text that tells the twins which
calls to fail or to delay.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit import launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.errors import Api

__all__ = ["inject_faults"]


@contextlib.contextmanager
def inject_faults(api: Api, *rules: str) -> Iterator[None]:
    """Set the fault plan of the twin of `api` to these rules until the block ends. Each rule is a line of the plan."""
    control = launch.twin_control()
    # The first line of a plan is its format version. A plan without rules lets all calls succeed.
    control.set_faults(api.value, "\n".join(["gdrkit-faults 1", *rules, ""]))
    try:
        yield
    finally:
        control.set_faults(api.value, "gdrkit-faults 1\n")
