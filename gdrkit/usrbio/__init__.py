"""The user-space I/O path of hf3fs: its Python interface for applications, and the agent that serves it.

Level 5. Importing this package opens no library; the first call opens the client library, ours or the one that
``GDRKIT_USRBIO_LIBRARY`` names. Programs that import ``hf3fs_fuse.io`` find the same names here.
"""

from __future__ import annotations

from typing import Any

from gdrkit.usrbio._library import UsrbioError, UsrbioUnsupported, capabilities, native
from gdrkit.usrbio.gpu import (
    GpuSharedBuffer,
    gdr_available,
    gdr_device_count,
    import_gpu_iovec,
    make_gpu_iovec,
    open_gpu_iovec,
)
from gdrkit.usrbio.io import (
    IorPriority,
    create_iovec,
    deregister_fd,
    extract_mount_point,
    force_fsync,
    hardlink,
    is_hf3fs,
    make_ioring,
    make_iovec,
    open_iovec,
    punch_hole,
    read_file,
    register_fd,
)

__all__ = [
    "GpuSharedBuffer",
    "IorPriority",
    "UsrbioError",
    "UsrbioUnsupported",
    "capabilities",
    "create_iovec",
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "gdr_available",
    "gdr_device_count",
    "hardlink",
    "import_gpu_iovec",
    "ioring",
    "iovec",
    "is_hf3fs",
    "make_gpu_iovec",
    "make_ioring",
    "make_iovec",
    "open_gpu_iovec",
    "open_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
]


def __getattr__(name: str) -> Any:
    # The native classes; to name them opens the library, and to import this package must not.
    if name in {"iovec", "ioring"}:
        return getattr(native(), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
