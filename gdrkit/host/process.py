"""Identity of a process that another process can check, and the descendants of a process.

The kernel reuses process IDs. A process ID together with the start time of the process and the boot ID of the machine
is unique.
"""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass

from gdrkit.host.tree import HostTree

__all__ = [
    "BOOT_ID_BYTES",
    "ProcessIdentity",
    "descendants",
    "is_running",
    "process_identity",
    "processor_wait_s",
    "this_process",
]

BOOT_ID_BYTES = 16

# Numbers of fields of /proc/<pid>/stat, counted from 1 as in proc(5). The first field after the name is the state.
_START_TIME_FIELD = 22
_FIRST_FIELD_AFTER_NAME = 3
_PARENT_FIELD = 4
_ENDED_STATES = frozenset("ZXx")  # A process in such a state (zombie, dead) has closed its descriptors.


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine.

    Attributes
    ----------
    boot_id : bytes
        16 random bytes that the kernel chooses at boot; zeros if this process cannot read them.
    process_id : int
        Process ID in its own PID namespace.
    pid_namespace : int
        Inode number of that namespace; 0 if it cannot be read.
    started_ticks : int
        Start time in clock ticks since the boot.
    """

    boot_id: bytes
    process_id: int
    pid_namespace: int
    started_ticks: int


def this_process(tree: HostTree | None = None) -> ProcessIdentity:
    """Return the identity of this process."""
    tree = HostTree() if tree is None else tree
    return ProcessIdentity(
        boot_id=_read_boot_id(tree),
        process_id=os.getpid(),
        pid_namespace=_read_pid_namespace(tree),
        started_ticks=_read_start_time_and_state(tree, "self")[0] or 0,
    )


def process_identity(process_id: int, tree: HostTree | None = None) -> ProcessIdentity | None:
    """Return the identity of a process of this PID namespace, or None if the process does not exist."""
    tree = HostTree() if tree is None else tree
    started_ticks, _state = _read_start_time_and_state(tree, str(process_id))
    if started_ticks is None:
        return None
    return ProcessIdentity(
        boot_id=_read_boot_id(tree),
        process_id=process_id,
        pid_namespace=_read_pid_namespace(tree),
        started_ticks=started_ticks,
    )


def is_running(identity: ProcessIdentity, tree: HostTree | None = None) -> bool | None:
    """Return whether the process still runs, or None if this process cannot see that.

    A process cannot see processes of another PID namespace, or processes that /proc hides from its user.
    """
    tree = HostTree() if tree is None else tree
    boot_id = _read_boot_id(tree)
    if boot_id != identity.boot_id and any(boot_id) and any(identity.boot_id):
        return False
    pid_namespace = _read_pid_namespace(tree)
    if not pid_namespace or pid_namespace != identity.pid_namespace:
        return None
    started_ticks, state = _read_start_time_and_state(tree, str(identity.process_id))
    if started_ticks is not None:
        return started_ticks == identity.started_ticks and state not in _ENDED_STATES
    return _check_by_signal(identity.process_id)


def descendants(tree: HostTree, process_id: int, *, marker: bytes | None = None) -> dict[int, str]:
    """Return the names of the programs of a process and of its descendants, by process ID, without the calling process.

    Parameters
    ----------
    tree : HostTree
        The host whose /proc is read.
    process_id : int
        The process. If it has ended, the result contains its descendants only if they have the marker.
    marker : bytes or None
        An entry of the environment, such as ``NAME=value``. A process with this entry counts as a descendant, so that a
        daemon that has left the tree is found.
    """
    program_by_process_id: dict[int, str] = {}
    # Parents come before their children in this order, because the kernel assigns process IDs in increasing order.
    # After the largest ID, the kernel starts again at low numbers. A child with such a number is found only by the
    # marker.
    for process_id_text in sorted(filter(str.isdecimal, tree.names("/proc")), key=int):
        stat_line = tree.text(f"/proc/{process_id_text}/stat") or ""
        program, _, remaining_fields = stat_line.partition("(")[2].rpartition(")")
        stat_fields = remaining_fields.split()
        if not stat_fields or int(process_id_text) == os.getpid():
            continue
        is_in_tree = (
            int(process_id_text) == process_id
            or int(stat_fields[_PARENT_FIELD - _FIRST_FIELD_AFTER_NAME]) in program_by_process_id
        )
        if is_in_tree or (
            marker is not None and marker in (tree.data(f"/proc/{process_id_text}/environ") or b"").split(b"\0")
        ):
            program_by_process_id[int(process_id_text)] = program
    return program_by_process_id


def processor_wait_s(process_id: int, tree: HostTree | None = None) -> float:
    """Return how long the threads of a process were ready to run but had no processor, in seconds.

    The result is the total of the thread that waited longest. It does not include a wait that has not ended. It is 0 if
    the process does not exist, or if the kernel does not count such waits.
    """
    tree = HostTree() if tree is None else tree
    folder = f"/proc/{process_id}/task"
    schedstat_texts = (tree.text(f"{folder}/{thread}/schedstat") for thread in tree.names(folder))
    # The fields of schedstat: time on a processor (ns), time in the queue of a processor (ns), number of time slices.
    thread_fields = [text.split() for text in schedstat_texts if text]
    return max(
        (int(fields[1]) * 1e-9 for fields in thread_fields if len(fields) > 1 and fields[1].isdecimal()), default=0.0
    )


def _check_by_signal(process_id: int) -> bool | None:
    """Return False if no process has this id, else None: a later process may have got the id."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return None
    return None


def _read_boot_id(tree: HostTree) -> bytes:
    boot_id_text = tree.text("/proc/sys/kernel/random/boot_id") or ""
    try:
        return uuid.UUID(boot_id_text).bytes
    except ValueError:
        return bytes(BOOT_ID_BYTES)


def _read_pid_namespace(tree: HostTree) -> int:
    match = re.fullmatch(r"pid:\[(\d+)\]", tree.link_name("/proc/self/ns/pid") or "")
    # The kernel stores the inode number of a namespace in 32 bits.
    return int(match[1]) & 0xFFFF_FFFF if match else 0


def _read_start_time_and_state(tree: HostTree, process: str) -> tuple[int | None, str]:
    """Return start time (clock ticks) and state of `process`, a process ID or ``self``; (None, "") on failure."""
    stat_line = tree.text(f"/proc/{process}/stat")
    if stat_line is None:
        return None, ""
    # The name of the program may contain blanks and parentheses. The last parenthesis of the line ends the name.
    fields = stat_line.rpartition(")")[2].split()
    if len(fields) <= _START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME:
        return None, ""
    return int(fields[_START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME]), fields[0]
