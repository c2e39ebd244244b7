"""The names of the native module hf3fs_py_usrbio of 3FS, implemented by :mod:`gdrkit.usrbio`.

This is a module of gdrkit-hf3fs, not the module of 3FS.
"""

from __future__ import annotations

from gdrkit import usrbio
from gdrkit.usrbio import deregister_fd, extract_mount_point, force_fsync, hardlink, punch_hole, register_fd

__all__ = [
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "hardlink",
    "punch_hole",
    "register_fd",
]


def __getattr__(name: str) -> object:
    # These are native classes. The first access opens the client library, which an import must not do.
    if name in {"iovec", "ioring"}:
        return getattr(usrbio, name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
