"""Which file the dynamic loader would open for a library name.

Level 2. Where it looks says :func:`gdrkit.loader.places`. Its cache is read by its layout (glibc,
sysdeps/generic/dl-cache.h), since ``ldconfig -p`` knows no other root than this host's.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from gdrkit import loader

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.host.tree import HostTree

__all__ = ["cached_libraries", "find_libraries", "find_library"]

_CACHE = "/etc/ld.so.cache"
_MAGIC = b"glibc-ld.so.cache1.1"
# magic, count, length of the strings, flags, extension offset, three unused words.
_HEADER = struct.Struct("<20sIIB3xI3I")
# flags, name, path, OS version, hardware capabilities; the offsets count from the header.
_ENTRY = struct.Struct("<iIIIQ")


def find_library(tree: HostTree, soname: str, *, search_path: Iterable[str] = ()) -> str | None:
    """The path, as the host names it, of the file for `soname`; None when the loader would find none.

    Parameters
    ----------
    tree : HostTree
        Where to look.
    soname : str
        E.g. ``libibverbs.so.1``.
    search_path : iterable of str
        The folders of LD_LIBRARY_PATH, in order.
    """
    return find_libraries(tree, [soname], search_path=search_path)[soname]


def find_libraries(tree: HostTree, sonames: Iterable[str], *, search_path: Iterable[str] = ()) -> dict[str, str | None]:
    """As :func:`find_library` for several, by one look into the loader's cache."""
    cached, folders = cached_libraries(tree), tuple(search_path)
    return {
        soname: next(
            filter(tree.exists, loader.places(soname, search_path=folders, cached=cached.get(soname, ()))), None
        )
        for soname in sonames
    }


def cached_libraries(tree: HostTree) -> dict[str, tuple[str, ...]]:
    """Every name in the loader's cache with its paths, first choice first; nothing when there is no readable cache."""
    data = tree.data(_CACHE) or b""
    begin = data.find(_MAGIC)
    if begin < 0 or len(data) - begin < _HEADER.size:
        return {}
    # An old-format cache may stand in front of the new one; offsets count from the new one's header.
    data = data[begin:]
    count = _HEADER.unpack_from(data)[1]
    found: dict[str, tuple[str, ...]] = {}
    for index in range(min(count, (len(data) - _HEADER.size) // _ENTRY.size)):
        _flags, name_at, path_at, _version, _capabilities = _ENTRY.unpack_from(data, _HEADER.size + index * _ENTRY.size)
        name, path = _string(data, name_at), _string(data, path_at)
        if name and path:
            found[name] = (*found.get(name, ()), path)
    return found


def _string(data: bytes, begin: int) -> str:
    end = data.find(b"\0", begin)
    return data[begin:end].decode("utf-8", "surrogateescape") if 0 <= begin < end else ""
