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
    targets = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each entry has no benefit.
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:
            # The descriptor was closed meanwhile: it is that of the listing itself, or another thread closed it.
            continue
    return dict(sorted(targets.items()))


def device_nodes() -> tuple[DeviceNode, ...]:
    """Return the GPUs, NICs and accelerators that this process has open.

    A library can access a device only through such a descriptor.
    """
    nodes = {}
    for number, path in descriptors().items():
        if not path.startswith(_DEVICES):
            continue
        try:
            status = os.fstat(number)
        except OSError:
            # Another thread has closed the descriptor meanwhile.
            continue
        if stat.S_ISCHR(status.st_mode):
            nodes[status.st_rdev] = DeviceNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))
    return tuple(nodes[number] for number in sorted(nodes))
