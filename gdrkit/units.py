"""Size units, page sizes and the text form of sizes.

"GPU page" has two meanings, so the term is never used alone: the RDMA page of CUDA with 64 KiB, and the host page, the
unit in which dma-buf ranges are exported and registered.
"""

from __future__ import annotations

import mmap

__all__ = ["GIB", "GPU_RDMA_PAGE_BYTES", "HOST_PAGE_BYTES", "KIB", "MIB", "align_down", "align_up", "format_bytes"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Largest distance from the next whole unit at which a size is printed as "4 KiB - 1 B", in bytes.
_NEAR_BYTES = 64

# Page size in which nvidia-peermem pins device memory, in bytes. A dma-buf only needs host pages.
GPU_RDMA_PAGE_BYTES = 64 * KIB
HOST_PAGE_BYTES = mmap.PAGESIZE


def align_down(value: int, *, alignment_bytes: int) -> int:
    """Return the largest multiple of `alignment_bytes` (a power of two) that is not above `value`."""
    return value & ~(alignment_bytes - 1)


def align_up(value: int, *, alignment_bytes: int) -> int:
    """Return the smallest multiple of `alignment_bytes` (a power of two) that is not below `value`."""
    return align_down(value + alignment_bytes - 1, alignment_bytes=alignment_bytes)


def format_bytes(length_bytes: int) -> str:
    """Return a size as text: ``64 MiB``, ``1 MiB + 3 B`` or ``17 B``.

    The text is exact, because a rounded size would hide the odd byte that a test case is about.
    """
    for unit_bytes, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        whole, rest = divmod(length_bytes, unit_bytes)
        if whole and not rest:
            return f"{whole} {name}"
        if whole and unit_bytes - rest < _NEAR_BYTES:
            return f"{whole + 1} {name} - {unit_bytes - rest} B"
        if whole and rest < KIB:
            return f"{whole} {name} + {rest} B"
    return f"{length_bytes} B"
