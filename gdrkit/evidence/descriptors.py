"""Readers of the open file descriptors of a process, and of the dma-bufs and device nodes among them."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.evidence.genuine_files import DeviceNode

if TYPE_CHECKING:
    from gdrkit.host import HostTree

__all__ = ["HeldDmabuf", "descriptor_targets", "device_nodes", "held_dmabufs"]

# The link /proc/PID/fd/N of a dma-buf points to "/dmabuf:" and the name that DMA_BUF_SET_NAME gave the dma-buf, if any.
_DMABUF_PREFIX = "/dmabuf:"
_FDINFO_FIELD_PATTERN = re.compile(r"^(?P<name>size|exp_name|ino):\s*(?P<value>\S+)\s*$", re.MULTILINE)
_DEVICE_PATH_PREFIXES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")


@dataclass(frozen=True, slots=True)
class HeldDmabuf:
    """A dma-buf of which a process has an open descriptor.

    Attributes
    ----------
    inode : int
        Number that identifies the dma-buf on this machine, also in other processes. 0 before Linux 5.14, because older
        kernels do not print it in /proc/PID/fdinfo.
    exporter : str
        Name of the exporting driver, e.g. ``nvidia``.
    size_bytes : int
        Size of the dma-buf.
    """

    inode: int
    exporter: str
    size_bytes: int


def descriptor_targets(process: str = "self") -> dict[int, str]:
    """Map the number of each open descriptor to the target of its link in /proc, e.g. ``{3: "socket:[4711]"}``.

    `process` is a process ID or ``self``. The result for ``self`` does not contain the descriptor that this function
    opens to list the others.

    Raises
    ------
    OSError
        ENOENT: the process does not exist. EACCES: it belongs to another user.
    """
    target_by_descriptor = {}
    folder = f"/proc/{process}/fd"
    for fd_text in os.listdir(folder):  # noqa: PTH208 - a Path for each entry has no benefit.
        try:
            target_by_descriptor[int(fd_text)] = os.readlink(f"{folder}/{fd_text}")  # noqa: PTH115
        except FileNotFoundError:
            # The descriptor was closed meanwhile: os.listdir() closed its descriptor, or another thread closed one.
            continue
    return dict(sorted(target_by_descriptor.items()))


def held_dmabufs(tree: HostTree, process: str, target_by_descriptor: dict[int, str]) -> tuple[HeldDmabuf, ...]:
    """Return the dma-bufs among the open descriptors of a process, each once.

    Parameters
    ----------
    tree : HostTree
        The host whose /proc is read.
    process : str
        A process ID, or ``self``.
    target_by_descriptor : dict
        The result of :func:`descriptor_targets` for the process.
    """
    dmabuf_by_inode = {}
    for fd, target in target_by_descriptor.items():
        if not target.startswith(_DMABUF_PREFIX):
            continue
        # If the descriptor was closed meanwhile, tree.text() returns None.
        fdinfo = dict(_FDINFO_FIELD_PATTERN.findall(tree.text(f"/proc/{process}/fdinfo/{fd}") or ""))
        if fdinfo.get("size", "").isdecimal() and "exp_name" in fdinfo:
            inode = int(fdinfo["ino"]) if fdinfo.get("ino", "").isdecimal() else 0
            # Without an inode number, each descriptor counts as a dma-buf of its own: its key is -fd.
            dmabuf_by_inode[inode or -fd] = HeldDmabuf(inode, fdinfo["exp_name"], int(fdinfo["size"]))
    return tuple(dmabuf_by_inode.values())


def device_nodes() -> tuple[DeviceNode, ...]:
    """Return the device nodes of GPUs, NICs and accelerators of which this process has an open descriptor.

    A library can access a device only through such a descriptor.
    """
    node_by_device_number = {}
    for fd, path in descriptor_targets().items():
        if not path.startswith(_DEVICE_PATH_PREFIXES):
            continue
        try:
            stat_result = os.fstat(fd)
        except OSError:
            # Another thread has closed the descriptor meanwhile.
            continue
        if stat.S_ISCHR(stat_result.st_mode):
            device_number = stat_result.st_rdev
            node_by_device_number[device_number] = DeviceNode(path, os.major(device_number), os.minor(device_number))
    return tuple(node_by_device_number[device_number] for device_number in sorted(node_by_device_number))
