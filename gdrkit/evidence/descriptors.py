"""Reader of the open file descriptors of a process, and of the dma-bufs among them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.evidence.genuine_files import DeviceNode

if TYPE_CHECKING:
    from gdrkit.host import HostTree

__all__ = ["HeldDmabuf", "descriptors", "device_nodes", "held_dmabufs"]

# The target of a descriptor of a dma-buf is "/dmabuf:" and the name that its exporter or user gave it.
_DMABUF_PREFIX = "/dmabuf:"
_FDINFO_FIELD = re.compile(r"^(?P<name>size|exp_name|ino):\s*(?P<value>\S+)\s*$", re.MULTILINE)
_DEVICE_PREFIXES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")


@dataclass(frozen=True, slots=True)
class HeldDmabuf:
    """A dma-buf of which a process has an open descriptor.

    Attributes
    ----------
    inode : int
        Number that identifies the dma-buf on this machine, also in other processes. 0 before Linux 5.3.
    exporter : str
        Name of the exporting driver, e.g. ``nvidia``.
    size_bytes : int
        Size of the dma-buf.
    """

    inode: int
    exporter: str
    size_bytes: int


def descriptors(process: str = "self") -> dict[int, str]:
    """Return the target of every open descriptor by its number, e.g. ``{3: "socket:[4711]"}``.

    `process` is a process ID or ``self``. The result for ``self`` does not contain the descriptor that this function
    opens to list the others.

    Raises
    ------
    OSError
        ENOENT: the process does not exist. EACCES: it belongs to another user.
    """
    targets = {}
    folder = f"/proc/{process}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 - a Path for each entry has no benefit.
        try:
            targets[int(name)] = os.readlink(f"{folder}/{name}")  # noqa: PTH115
        except FileNotFoundError:
            # The descriptor was closed meanwhile: os.listdir() closed its descriptor, or another thread closed one.
            continue
    return dict(sorted(targets.items()))


def held_dmabufs(tree: HostTree, process: str, targets: dict[int, str]) -> tuple[HeldDmabuf, ...]:
    """Return the dma-bufs among the open descriptors of a process, each once.

    Parameters
    ----------
    tree : HostTree
        The host whose /proc is read.
    process : str
        A process ID, or ``self``.
    targets : dict
        The result of :func:`descriptors` for the process.
    """
    dmabuf_by_inode = {}
    for number, target in targets.items():
        if not target.startswith(_DMABUF_PREFIX):
            continue
        # The descriptor may have been closed meanwhile. The text is then None.
        values = dict(_FDINFO_FIELD.findall(tree.text(f"/proc/{process}/fdinfo/{number}") or ""))
        if values.get("size", "").isdecimal() and "exp_name" in values:
            inode = int(values["ino"]) if values.get("ino", "").isdecimal() else 0
            # Without an inode number, two descriptors of one dma-buf cannot be told from two dma-bufs.
            dmabuf_by_inode[inode or -number] = HeldDmabuf(inode, values["exp_name"], int(values["size"]))
    return tuple(dmabuf_by_inode.values())


def device_nodes() -> tuple[DeviceNode, ...]:
    """Return the GPUs, NICs and accelerators that this process has open.

    A library can access a device only through such a descriptor.
    """
    nodes = {}
    for descriptor, path in descriptors().items():
        if not path.startswith(_DEVICE_PREFIXES):
            continue
        try:
            status = os.fstat(descriptor)
        except OSError:
            # Another thread has closed the descriptor meanwhile.
            continue
        if stat.S_ISCHR(status.st_mode):
            nodes[status.st_rdev] = DeviceNode(path, os.major(status.st_rdev), os.minor(status.st_rdev))
    return tuple(nodes[device_number] for device_number in sorted(nodes))
