"""Size units, page sizes and the text form of sizes.

"GPU page" has two meanings, so names and texts say which one they mean. ``nvidia-peermem`` pins CUDA memory in GPU
pages of 64 KiB. A dma-buf is exported and registered in host pages.
"""

from __future__ import annotations

import mmap

__all__ = [
    "GIB",
    "GPU_RDMA_PAGE_BYTES",
    "HOST_PAGE_BYTES",
    "KIB",
    "MIB",
    "align_down",
    "align_up",
    "format_bytes",
    "rounded_bytes",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# A size that is less than this number of bytes below a multiple of a unit is printed in the form "4 KiB - 1 B".
_NEAR_BYTES = 64

# Page size in which nvidia-peermem pins device memory, in bytes.
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

    The text is exact, because test cases use sizes that differ by one byte from a multiple of a unit.
    """
    for unit_bytes, unit_name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        unit_count, remainder_bytes = divmod(length_bytes, unit_bytes)
        if unit_count and not remainder_bytes:
            return f"{unit_count} {unit_name}"
        if unit_count and unit_bytes - remainder_bytes < _NEAR_BYTES:
            return f"{unit_count + 1} {unit_name} - {unit_bytes - remainder_bytes} B"
        if unit_count and remainder_bytes < KIB:
            return f"{unit_count} {unit_name} + {remainder_bytes} B"
    return f"{length_bytes} B"


def rounded_bytes(length_bytes: int) -> str:
    """Return a size in decimal units with three digits, such as ``1.34 GB``."""
    value = float(length_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        # 999.5 and more have four digits when they are rounded.
        if abs(value) < 999.5:  # noqa: PLR2004 - the next unit.
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
