"""Identity of a process that another process can check.

The kernel reuses process IDs. Together with its start time and the boot ID of the machine, a process ID names one
process for ever.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass

from gdrkit.host.tree import HostTree

__all__ = ["BOOT_ID_BYTES", "ProcessIdentity", "is_running", "process_identity", "starved_s", "this_process"]

BOOT_ID_BYTES = 16

_START_FIELD = 22  # The field of /proc/<pid>/stat, counted from 1 as in proc(5).
_AFTER_NAME = 3  # The state is the first field after the name.
_GONE = frozenset("ZXx")  # A process in such a state has closed its descriptors.


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine.

    Attributes
    ----------
    boot_id : bytes
        16 random bytes that the kernel draws at boot; zeros if they are not readable.
    process_id : int
        Process ID in its own PID namespace.
    namespace : int
        Inode number of that namespace; 0 if it is not readable.
    started_ticks : int
        Start time in clock ticks since the boot.
    """

    boot_id: bytes
    process_id: int
    namespace: int
    started_ticks: int


def this_process(tree: HostTree | None = None) -> ProcessIdentity:
    """Return the identity of this process."""
    tree = HostTree() if tree is None else tree
    return ProcessIdentity(
        boot_id=_boot_id(tree),
        process_id=os.getpid(),
        namespace=_namespace(tree),
        started_ticks=_started(tree, "self")[0] or 0,
    )


def process_identity(process_id: int, tree: HostTree | None = None) -> ProcessIdentity | None:
    """Return the identity of a process of this PID namespace, or None if the process does not exist."""
    tree = HostTree() if tree is None else tree
    started, _state = _started(tree, str(process_id))
    if started is None:
        return None
    return ProcessIdentity(
        boot_id=_boot_id(tree), process_id=process_id, namespace=_namespace(tree), started_ticks=started
    )


def is_running(identity: ProcessIdentity, tree: HostTree | None = None) -> bool | None:
    """Return whether the process still runs, or None if that is not visible from here.

    It is not visible from another PID namespace, or if /proc hides the processes of other users.
    """
    tree = HostTree() if tree is None else tree
    boot_id = _boot_id(tree)
    if boot_id != identity.boot_id and any(boot_id) and any(identity.boot_id):
        return False
    namespace = _namespace(tree)
    if not namespace or namespace != identity.namespace:
        return None
    started, state = _started(tree, str(identity.process_id))
    if started is not None:
        return started == identity.started_ticks and state not in _GONE
    return _exists(identity.process_id)


def starved_s(process_id: int, tree: HostTree | None = None) -> float:
    """Return the longest time, in seconds, that one thread of the process waited for a processor.

    It is 0 if the process does not exist or the kernel does not account for waits. A wait counts when it is over.
    """
    tree = HostTree() if tree is None else tree
    folder = f"/proc/{process_id}/task"
    texts = (tree.text(f"{folder}/{thread}/schedstat") for thread in tree.names(folder))
    # schedstat has the time on a processor and the time in its queue, both in ns, and a count.
    rows = [text.split() for text in texts if text]
    return max((int(fields[1]) * 1e-9 for fields in rows if len(fields) > 1 and fields[1].isdecimal()), default=0.0)


def _exists(process_id: int) -> bool | None:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return None


def _boot_id(tree: HostTree) -> bytes:
    text = tree.text("/proc/sys/kernel/random/boot_id") or ""
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        return bytes(BOOT_ID_BYTES)


def _namespace(tree: HostTree) -> int:
    matched = re.fullmatch(r"pid:\[(\d+)\]", tree.link_name("/proc/self/ns/pid") or "")
    return int(matched[1]) & 0xFFFF_FFFF if matched else 0


def _started(tree: HostTree, process: str) -> tuple[int | None, str]:
    text = tree.text(f"/proc/{process}/stat")
    if text is None:
        return None, ""
    # The name may contain blanks and brackets; the last bracket ends it.
    fields = text.rpartition(")")[2].split()
    if len(fields) <= _START_FIELD - _AFTER_NAME:
        return None, ""
    return int(fields[_START_FIELD - _AFTER_NAME]), fields[0]
