"""The open file descriptors of this process.

Level 3.
"""

from __future__ import annotations

import os

__all__ = ["descriptors"]


def descriptors() -> dict[int, str]:
    """Number and target of every open descriptor, e.g. ``{3: "socket:[4711]"}``; the one used for looking is left
    out.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each would be work for nothing.
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:
            # The descriptor of the listing itself, closed by now; or one that another thread has just closed.
            continue
    return dict(sorted(found.items()))
