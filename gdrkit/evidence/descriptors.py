"""Reader of the open file descriptors of this process."""

from __future__ import annotations

import os
import stat

from gdrkit.evidence.genuine_files import DeviceNode

__all__ = ["descriptors", "device_nodes"]

_DEVICES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")


def descriptors() -> dict[int, str]:
    """Return the target of every open descriptor by its number, e.g. ``{3: "socket:[4711]"}``.

    The result does not contain the descriptor that this function opens to list the others.
    """
    targets = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a Path for each entry has no benefit.
        try:
            targets[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except FileNotFoundError:
            # The descriptor was closed meanwhile: os.listdir() closed its descriptor, or another thread closed one.
            continue
    return dict(sorted(targets.items()))


def device_nodes() -> tuple[DeviceNode, ...]:
    """Return the GPUs, NICs and accelerators that this process has open.

    A library can access a device only through such a descriptor.
    """
    nodes = {}
    for descriptor, path in descriptors().items():
        if not path.startswith(_DEVICES):
            continue
        try:
            status = os.fstat(descriptor)
        except OSError:
            # Another thread has closed the descriptor meanwhile.
            continue
        if stat.S_ISCHR(status.st_mode):
            nodes[status.st_rdev] = DeviceNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))
    return tuple(nodes[device_number] for device_number in sorted(nodes))
