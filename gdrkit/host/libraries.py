"""Prediction of the file that the dynamic loader opens for a library name.

:func:`gdrkit.loader.search_paths` implements the order of the search. This module parses the loader's cache,
/etc/ld.so.cache (glibc, sysdeps/generic/dl-cache.h). It does not run ``ldconfig -p``, which cannot read the cache in a
capture.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from gdrkit import loader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.host.tree import HostTree

__all__ = ["cached_libraries", "find_libraries", "find_library"]

_CACHE_PATH = "/etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
# The fields are magic, count, length of the strings, flags, extension offset and three unused words.
_CACHE_HEADER = struct.Struct("<20sIIB3xI3I")
# The fields are flags, name, path, OS version, hardware capabilities. Name and path are offsets of strings
# from the beginning of the header.
_CACHE_ENTRY = struct.Struct("<iIIIQ")


def find_library(tree: HostTree, soname: str, *, search_path: Iterable[str] = ()) -> str | None:
    """Return the path of the file that the loader would open for `soname`, or None if it would not find one.

    Parameters
    ----------
    tree : HostTree
        The host to search.
    soname : str
        Name of the library, e.g. ``libibverbs.so.1``.
    search_path : iterable of str
        The folders of LD_LIBRARY_PATH, in order.
    """
    return find_libraries(tree, [soname], search_path=search_path)[soname]


def find_libraries(tree: HostTree, sonames: Iterable[str], *, search_path: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the result of :func:`find_library` for several names, with one read of the loader's cache."""
    cached_paths, search_folders = cached_libraries(tree), tuple(search_path)
    return {
        soname: next(
            filter(
                tree.exists,
                loader.search_paths(soname, search_path=search_folders, cached=cached_paths.get(soname, ())),
            ),
            None,
        )
        for soname in sonames
    }


def cached_libraries(tree: HostTree) -> dict[str, tuple[str, ...]]:
    """Return the paths of every name in the loader's cache, the preferred path first; empty if there is no cache."""
    file_data = tree.data(_CACHE_PATH) or b""
    header_offset = file_data.find(_CACHE_MAGIC)
    if header_offset < 0 or len(file_data) - header_offset < _CACHE_HEADER.size:
        return {}
    # A cache in the old format may come before the cache in the new format. The offsets count from the new header.
    data = file_data[header_offset:]
    entry_count = _CACHE_HEADER.unpack_from(data)[1]
    paths_by_name: dict[str, tuple[str, ...]] = {}
    for index in range(min(entry_count, (len(data) - _CACHE_HEADER.size) // _CACHE_ENTRY.size)):
        _flags, name_offset, path_offset, _version, _capabilities = _CACHE_ENTRY.unpack_from(
            data, _CACHE_HEADER.size + index * _CACHE_ENTRY.size
        )
        name, path = _read_c_string(data, name_offset), _read_c_string(data, path_offset)
        if name and path:
            paths_by_name[name] = (*paths_by_name.get(name, ()), path)
    return paths_by_name


def _read_c_string(data: bytes, begin_offset: int) -> str:
    end_offset = data.find(b"\0", begin_offset)
    return data[begin_offset:end_offset].decode("utf-8", "surrogateescape") if 0 <= begin_offset < end_offset else ""
