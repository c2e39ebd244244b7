"""A context manager that maps memory pages, which may be read-only or partly unmapped."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING

from gdrkit.units import HOST_PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["map_pages"]

_MAP_FAILED = ctypes.c_void_p(-1).value


@contextlib.contextmanager
def map_pages(page_count: int, *, unmapped_from: int | None = None, writable: bool = True) -> Iterator[int]:
    """Map `page_count` pages, and yield the address of the first page.

    The pages from index `unmapped_from` on are unmapped again before the block runs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, page_count * HOST_PAGE_BYTES, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address not in {None, _MAP_FAILED}, ctypes.get_errno()
    mapped_page_count = page_count if unmapped_from is None else unmapped_from
    if mapped_page_count < page_count:
        unmapped_bytes = (page_count - mapped_page_count) * HOST_PAGE_BYTES
        assert libc.munmap(address + mapped_page_count * HOST_PAGE_BYTES, unmapped_bytes) == 0
    try:
        yield address
    finally:
        assert libc.munmap(address, mapped_page_count * HOST_PAGE_BYTES) == 0
