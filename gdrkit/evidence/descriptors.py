"""Reader of the open file descriptors of this process."""

from __future__ import annotations

import os
import stat

from gdrkit.evidence.genuine_files import DeviceNode

__all__ = ["descriptors", "device_nodes"]

_DEVICES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")


def descriptors() -> dict[int, str]:
    """Return number and target of every open descriptor, e.g. ``{3: "socket:[4711]"}``.

    The descriptor that this function opens for the listing is left out.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each entry has no benefit.
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:
            # This is the descriptor of the listing itself, which is closed by now, or one that another thread has just
            # closed.
            continue
    return dict(sorted(found.items()))


def device_nodes() -> tuple[DeviceNode, ...]:
    """Return the GPUs, NICs and accelerators that this process has open.

    A library cannot access a device without this.
    """
    found = {}
    for number, path in descriptors().items():
        if not path.startswith(_DEVICES):
            continue
        try:
            status = os.fstat(number)
        except OSError:
            # Another thread has closed the descriptor meanwhile.
            continue
        if stat.S_ISCHR(status.st_mode):
            found[status.st_rdev] = DeviceNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))
    return tuple(found[number] for number in sorted(found))
