"""The pool of device memory of the client library: its statistics and limits.

`make_gpu_iovec` without `memory` takes memory from the pool, and closing the iovec returns the memory to the pool. So
the memory need not be allocated and registered again. ``hf3fs_usrbio_gdr.h`` describes which memory is used again.
"""

from __future__ import annotations

from dataclasses import dataclass

from gdrkit.errors import UsageError
from gdrkit.usrbio._library import native

__all__ = ["GpuPoolStatistics", "gpu_pool_statistics", "limit_gpu_pool", "trim_gpu_pool"]


@dataclass(frozen=True, slots=True)
class GpuPoolStatistics:
    """A snapshot of the pool of this process.

    Attributes
    ----------
    idle_bytes_max : int
        Limit of `idle_bytes`. 0: there is no pool.
    idle_blocks, idle_bytes : int
        Allocations that no iovec uses, and their bytes.
    in_use_blocks, in_use_bytes : int
        Allocations that iovecs use, and their bytes.
    hits, misses : int
        Number of new iovecs that got idle memory, and number of new iovecs for which the pool had no idle memory.
    trimmed_blocks : int
        Number of idle allocations that were freed.
    refused_blocks : int
        Number of closed iovecs whose memory could not be used again, because another process may have it mapped, or
        because the agent did not keep the registration.
    """

    idle_bytes_max: int
    idle_blocks: int
    idle_bytes: int
    in_use_blocks: int
    in_use_bytes: int
    hits: int
    misses: int
    trimmed_blocks: int
    refused_blocks: int


def gpu_pool_statistics() -> GpuPoolStatistics:
    """Return the statistics of the pool.

    Raises
    ------
    Unsupported
        The client library has no pool, or this process has no CUDA.
    """
    return GpuPoolStatistics(**native().gpu_pool_statistics())


def limit_gpu_pool(*, idle_bytes_max: int, idle_ms_max: int = 10_000) -> None:
    """Set the limits of the pool, and free the idle memory above them.

    Parameters
    ----------
    idle_bytes_max : int
        Limit of the bytes in the pool that no iovec uses. 0: there is no pool.
    idle_ms_max : int
        Time after which idle memory is freed, in milliseconds.

    Raises
    ------
    Unsupported
        See :func:`gpu_pool_statistics`.
    UsageError
        A limit is negative, or `idle_ms_max` is 2^31 or more.
    """
    if idle_bytes_max < 0 or not 0 <= idle_ms_max < 2**31:
        message = (
            "idle_bytes_max and idle_ms_max must not be negative, and idle_ms_max must be less than 2^31, "
            f"not {idle_bytes_max} and {idle_ms_max}"
        )
        raise UsageError(message)
    native().limit_gpu_pool(idle_bytes_max, idle_ms_max)


def trim_gpu_pool(*, idle_bytes_max: int = 0) -> None:
    """Free idle memory, the longest idle first, until at most `idle_bytes_max` bytes are idle."""
    if idle_bytes_max < 0:
        message = f"idle_bytes_max must not be negative, not {idle_bytes_max}"
        raise UsageError(message)
    native().trim_gpu_pool(idle_bytes_max)
