"""The kernel's log, as far as this process may read it.

Level 3. Best effort by nature: containers and ``kernel.dmesg_restrict`` forbid it. Then the answer says so, and does
not look like an empty log.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import errno_name

if TYPE_CHECKING:
    from gdrkit.host import HostTree

__all__ = ["KernelLog", "kernel_log"]

_RECORD_BYTES = 8192
# One expression: a log has thousands of records, and the doctor answers while somebody waits.
_WORDS = re.compile(rb"nvrm|nvidia|xid|peer_mem|mlx5|infiniband|rdma|iommu|dmar|pcieport|aer:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KernelLog:
    """What was read.

    Attributes
    ----------
    lines : tuple of str
        Messages that name a GPU, a NIC, the IOMMU or PCIe errors, oldest first.
    unreadable : str or None
        Why the log, or a part of it, could not be read.
    """

    lines: tuple[str, ...]
    unreadable: str | None


def kernel_log(tree: HostTree, *, records_max: int = 100_000) -> KernelLog:
    """Read /dev/kmsg from its beginning, without waiting for more."""
    try:
        descriptor = os.open(tree.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return KernelLog(lines=(), unreadable=f"/dev/kmsg: {errno_name(error.errno)}")
    try:
        return _read(descriptor, records_max)
    finally:
        os.close(descriptor)


def _read(descriptor: int, records_max: int) -> KernelLog:
    lines: list[str] = []
    unreadable = None
    for _ in range(records_max):
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            break  # All that there is now was read.
        except OSError as error:
            if error.errno == errno.EPIPE:
                unreadable = "/dev/kmsg: the oldest records were overwritten while reading"
                continue
            unreadable = f"/dev/kmsg: {errno_name(error.errno)}"
            break
        if not record:
            break
        # "6,1234,56789,-;message", then lines with a blank in front that carry dictionary values.
        message = record.partition(b";")[2].partition(b"\n")[0]
        if _WORDS.search(message):
            lines.append(message.decode("utf-8", "backslashreplace"))
    return KernelLog(lines=tuple(lines), unreadable=unreadable)
