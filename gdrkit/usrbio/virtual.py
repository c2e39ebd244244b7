"""The ioctl requests of 3FS and the name of its virtual folder.

A request number has the layout of ``_IOC`` of Linux: direction (2 bits), size of the argument (14 bits), type (8 bits,
``h``) and number (8 bits).
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

# Result of GET_MAGIC, by which programs recognize a mount of 3FS.
MAGIC = 0x8F3F5FFF
# Result of GET_IOCTL_VERSION.
IOCTL_VERSION = 1
# Folder in the mount point, in which programs publish iovecs and rings by symbolic links.
VIRTUAL_FOLDER = "3fs-virt"
# Size of the result of GET_MOUNT_NAME: the name of the mount's folder, padded with zero bytes.
MOUNT_NAME_BYTES = 32
# Largest number of ranges of one PUNCH_HOLE.
PUNCH_HOLE_MAX = 1000
_NAME_MAX = 255

# A 0Q at the end of a format pads the size to a multiple of 8, as a C compiler does.
# The struct of HARDLINK: ino_t folder, char name[NAME_MAX].
HARDLINK_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX}s0Q")
# The struct of PUNCH_HOLE: int n, size_t flags, size_t start[1000], size_t end[1000].
PUNCH_HOLE_ARGUMENT = struct.Struct(f"@iQ{PUNCH_HOLE_MAX}Q{PUNCH_HOLE_MAX}Q")
# The struct of MOVE: uint64_t source folder, char source name[NAME_MAX + 1], uint64_t new folder, char new
# name[NAME_MAX + 1], bool move to trash.
MOVE_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX + 1}sQ{_NAME_MAX + 1}s?0Q")
# The struct of REMOVE: uint64_t folder, char name[NAME_MAX + 1], bool recursive.
REMOVE_ARGUMENT = struct.Struct(f"@Q{_NAME_MAX + 1}s?0Q")

# Directions of _IOC, as seen from the program: it writes the argument to the file system, or reads it from there.
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
