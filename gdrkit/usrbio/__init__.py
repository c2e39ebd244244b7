"""The user-space I/O interface of 3FS (hf3fs) for Python programs, and the agent that serves it.

The names are the same as in 3FS's ``hf3fs_fuse.io``. Importing this package opens no library. The first call opens the
client library: gdrkit's own, or the library that ``GDRKIT_USRBIO_LIBRARY`` names.
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
from gdrkit.usrbio.gpu_pool import GpuPoolStatistics, gpu_pool_statistics, limit_gpu_pool, trim_gpu_pool
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
    trim_host_pool,
)

__all__ = [
    "GpuPoolStatistics",
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
    "gpu_pool_statistics",
    "hardlink",
    "import_gpu_iovec",
    "ioring",
    "iovec",
    "is_hf3fs",
    "limit_gpu_pool",
    "make_gpu_iovec",
    "make_ioring",
    "make_iovec",
    "open_gpu_iovec",
    "open_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
    "trim_gpu_pool",
    "trim_host_pool",
]


def __getattr__(name: str) -> Any:
    # These are native classes. native() opens the client library, which the import of this package must not do.
    if name in {"iovec", "ioring"}:
        return getattr(native(), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
