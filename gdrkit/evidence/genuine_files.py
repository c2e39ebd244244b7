"""Functions that open device nodes and files of sysfs and procfs, and detect that another file was put in their place.

A mount can put another file over a file of /sys, /proc or /dev. Each function here checks the file system type or the
device number of the open descriptor, and raises MissingEvidence with a sentence for the user if the check fails.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import errno_name
from gdrkit.host import file_system_type

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PROC_MAGIC",
    "SYSFS_MAGIC",
    "DeviceNode",
    "MissingEvidence",
    "failure_text",
    "open_checked",
    "open_node",
    "read_at",
    "read_majors",
    "stat_node",
]

# include/uapi/linux/magic.h
SYSFS_MAGIC, PROC_MAGIC = 0x62656572, 0x9FA0
_FILE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A character device: its path and its device numbers."""

    path: str
    major: int
    minor: int


class MissingEvidence(Exception):
    """A piece of evidence is missing. The text of the exception is the sentence for the user."""


def read_majors() -> dict[int, set[str]]:
    """Return the names of character device drivers by major number, from /proc/devices."""
    with open_checked("/proc/devices", os.O_RDONLY, magic=PROC_MAGIC) as descriptor:
        text = os.read(descriptor, _FILE_BYTES_MAX).decode("utf-8", "backslashreplace")
    drivers_by_major: dict[int, set[str]] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        major_text, _, driver_name = line.strip().partition(" ")
        if major_text.isdecimal() and driver_name:
            drivers_by_major.setdefault(int(major_text), set()).add(driver_name)
    return drivers_by_major


@contextlib.contextmanager
def open_node(
    path: str, drivers_by_major: dict[int, set[str]], driver_names: frozenset[str]
) -> Iterator[tuple[int, DeviceNode]]:
    """Open a character device, and check that /proc/devices lists its major number for one of `driver_names`.

    `drivers_by_major` is the result of :func:`read_majors`.
    """
    with open_checked(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY) as descriptor:
        yield descriptor, _read_device_node(path, os.fstat(descriptor), drivers_by_major, driver_names)


def stat_node(path: str, drivers_by_major: dict[int, set[str]], driver_names: frozenset[str]) -> DeviceNode:
    """Return the character device at `path`, checked like in :func:`open_node`. The device itself is not opened."""
    with open_checked(path, os.O_PATH) as descriptor:
        return _read_device_node(path, os.fstat(descriptor), drivers_by_major, driver_names)


def _read_device_node(
    path: str, stat_result: os.stat_result, drivers_by_major: dict[int, set[str]], driver_names: frozenset[str]
) -> DeviceNode:
    """Return the device that `stat_result` describes, if it is a character device of one of `driver_names`."""
    if not stat.S_ISCHR(stat_result.st_mode):
        message = f"{path} is not a character device"
        raise MissingEvidence(message)
    node = DeviceNode(path=path, major=os.major(stat_result.st_rdev), minor=os.minor(stat_result.st_rdev))
    if not drivers_by_major.get(node.major, set()) & driver_names:
        message = f"{path} has major number {node.major}, which /proc/devices does not list for {min(driver_names)}"
        raise MissingEvidence(message)
    return node


@contextlib.contextmanager
def open_checked(path: str, flags: int, *, magic: int | None = None) -> Iterator[int]:
    """Open a file and check that it is on a file system of the type `magic`. Without `magic`, nothing is checked."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise MissingEvidence(failure_text(f"open {path}", error)) from error
    try:
        _check_file_system(descriptor, path, magic)
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(folder_fd: int, name: str, folder_path: str, *, magic: int) -> str:
    """Read the small file `name` in the folder of the open descriptor `folder_fd`, and check its file system.

    The check of the folder is not sufficient, because a mount can cover a single file. `folder_path` is only used in
    errors.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except OSError as error:
        raise MissingEvidence(failure_text(f"open {folder_path}/{name}", error)) from error
    try:
        _check_file_system(descriptor, f"{folder_path}/{name}", magic)
        return os.read(descriptor, _FILE_BYTES_MAX).decode("utf-8", "backslashreplace").strip()
    except OSError as error:
        raise MissingEvidence(failure_text(f"read {folder_path}/{name}", error)) from error
    finally:
        os.close(descriptor)


def _check_file_system(descriptor: int, path: str, magic: int | None) -> None:
    if magic is not None and (actual_magic := file_system_type(descriptor)) != magic:
        expected_file_system = {SYSFS_MAGIC: "sysfs", PROC_MAGIC: "procfs"}[magic]
        message = (
            f"{path} is not on {expected_file_system}: something is mounted there (file system type {actual_magic:#x})"
        )
        raise MissingEvidence(message)


def failure_text(operation: str, error: OSError) -> str:
    """Return a sentence that names the operation that failed and the error."""
    return f"{operation} failed: {error.strerror} ({errno_name(error.errno)})"
