"""The names of ``hf3fs_fuse.io`` of 3FS, implemented by :mod:`gdrkit.usrbio`."""

from __future__ import annotations

# SGLang uses multiprocessing.shared_memory without importing it, because hf3fs_fuse.io of 3FS imports it. So this
# module imports it too.
import multiprocessing.shared_memory  # noqa: F401

import hf3fs_py_usrbio
from hf3fs_py_usrbio import (
    deregister_fd,
    extract_mount_point,
    force_fsync,
    hardlink,
    punch_hole,
    register_fd,
)

from gdrkit.usrbio import IorPriority, make_ioring, make_iovec, read_file

__all__ = [
    "IorPriority",
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "hardlink",
    "make_ioring",
    "make_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
]


def __getattr__(name: str) -> object:
    # iovec and ioring are native classes, which hf3fs_py_usrbio loads at their first use.
    return getattr(hf3fs_py_usrbio, name)
