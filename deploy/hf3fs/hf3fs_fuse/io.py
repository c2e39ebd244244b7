"""The names of ``hf3fs_fuse.io`` of 3FS, implemented by :mod:`gdrkit.usrbio`."""

from __future__ import annotations

# SGLang uses this module without importing it, because the module of 3FS imports it.
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
    # The native classes iovec and ioring.
    return getattr(hf3fs_py_usrbio, name)
