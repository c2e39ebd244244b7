"""The ioctl requests of 3FS and the name of its virtual folder.

A request has the layout of ``_IOC`` of Linux: direction, size, type (``h``) and number.
"""

from __future__ import annotations

import struct

__all__ = [
    "FSYNC",
    "GET_IOCTL_VERSION",
    "GET_MAGIC",
    "GET_MOUNT_NAME",
    "GET_PATH_OFFSET",
    "HARDLINK",
    "HARDLINK_ARGUMENT",
    "IOCTL_VERSION",
    "MAGIC",
    "MOUNT_NAME_BYTES",
    "MOVE",
    "MOVE_ARGUMENT",
    "PUNCH_HOLE",
    "PUNCH_HOLE_ARGUMENT",
    "PUNCH_HOLE_MAX",
    "RECURSIVE_RM",
    "REMOVE",
    "REMOVE_ARGUMENT",
    "VIRTUAL_FOLDER",
]

MAGIC = 0x8F3F5FFF
IOCTL_VERSION = 1
VIRTUAL_FOLDER = "3fs-virt"
MOUNT_NAME_BYTES = 32
# Largest number of ranges of one PUNCH_HOLE.
PUNCH_HOLE_MAX = 1000
_NAME_MAX = 255

# The struct of HARDLINK: ino_t folder, char name[NAME_MAX]. Its size is a multiple of 8.
HARDLINK_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX}s0Q")
# The struct of PUNCH_HOLE: int n, size_t flags, size_t start[1000], size_t end[1000].
PUNCH_HOLE_ARGUMENT = struct.Struct(f"@iQ{PUNCH_HOLE_MAX}Q{PUNCH_HOLE_MAX}Q")
# The struct of MOVE: uint64_t source folder, char source name[NAME_MAX + 1], uint64_t new folder, char new
# name[NAME_MAX + 1], bool move to trash.
MOVE_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX + 1}sQ{_NAME_MAX + 1}s?0Q")
# The struct of REMOVE: uint64_t folder, char name[NAME_MAX + 1], bool recursive.
REMOVE_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX + 1}s?0Q")

# Directions of _IOC: the argument is written to, or read from, the file system.
_WRITE, _READ = 1, 2


def _make_ioctl_request(direction: int, number: int, length_bytes: int) -> int:
    return direction << 30 | length_bytes << 16 | ord("h") << 8 | number


GET_MOUNT_NAME = _make_ioctl_request(_READ, 0, MOUNT_NAME_BYTES)
GET_PATH_OFFSET = _make_ioctl_request(_READ, 1, 4)
GET_MAGIC = _make_ioctl_request(_READ, 2, 4)
GET_IOCTL_VERSION = _make_ioctl_request(_READ, 3, 4)
RECURSIVE_RM = _make_ioctl_request(_READ, 10, 4)
FSYNC = _make_ioctl_request(_READ, 11, 4)
HARDLINK = _make_ioctl_request(_WRITE, 12, HARDLINK_ARGUMENT.size)
PUNCH_HOLE = _make_ioctl_request(_WRITE, 13, PUNCH_HOLE_ARGUMENT.size)
MOVE = _make_ioctl_request(_WRITE, 14, MOVE_ARGUMENT.size)
REMOVE = _make_ioctl_request(_WRITE, 15, REMOVE_ARGUMENT.size)
