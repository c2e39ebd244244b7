"""Reader of the kernel log, as far as this process may read it.

Containers and ``kernel.dmesg_restrict`` can forbid reading. The result then contains the reason, so that it differs
from the result for an empty log.
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

_RECORD_BYTES_MAX = 8192
# One regular expression is faster than a search for each word, and a log has thousands of records.
_RELEVANT_WORDS = re.compile(
    rb"nvrm|nvidia|xid|peer_mem|mlx[45]|infiniband|rdma|iommu|dmar|pcieport|aer:|hotplugged memory", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class KernelLog:
    """The result of reading the kernel log.

    Attributes
    ----------
    lines : tuple of str
        Messages about GPUs, NICs, the IOMMU, PCIe errors or hot-plugged memory, oldest first.
    unreadable : str or None
        The reason why the log, or a part of it, could not be read.
    """

    lines: tuple[str, ...]
    unreadable: str | None


def kernel_log(tree: HostTree, *, records_max: int = 100_000) -> KernelLog:
    """Read at most `records_max` records of /dev/kmsg from its beginning, without waiting for new records."""
    try:
        descriptor = os.open(tree.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return KernelLog(lines=(), unreadable=f"/dev/kmsg: {errno_name(error.errno)}")
    try:
        return _read_records(descriptor, records_max)
    finally:
        os.close(descriptor)


def _read_records(descriptor: int, records_max: int) -> KernelLog:
    lines: list[str] = []
    unreadable = None
    for _ in range(records_max):
        try:
            record = os.read(descriptor, _RECORD_BYTES_MAX)
        except BlockingIOError:
            break  # All existing records were read.
        except OSError as error:
            if error.errno == errno.EPIPE:
                unreadable = "/dev/kmsg: the oldest records were overwritten while reading"
                continue
            unreadable = f"/dev/kmsg: {errno_name(error.errno)}"
            break
        if not record:
            break
        # A record is "6,1234,56789,-;message", followed by lines that begin with a blank and hold dictionary values.
        message = record.partition(b";")[2].partition(b"\n")[0]
        if _RELEVANT_WORDS.search(message):
            lines.append(message.decode("utf-8", "backslashreplace"))
    return KernelLog(lines=tuple(lines), unreadable=unreadable)
