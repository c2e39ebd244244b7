"""Reader of the shared libraries of a process from its memory map.

A library that a process has mapped is evidence. A library that the process is expected to load is not.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError
from gdrkit.evidence.elf import ElfNote, read_elf
from gdrkit.host import HostTree

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LoadedLibrary", "describe_library", "libraries"]

# The fields of a line: address range, permissions, offset, device, inode, path (proc(5)).
_MAPPING_PATTERN = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<permissions>\S{4}) \S+ \S+ (?P<inode>\d+)\s+(?P<path>/.*)$")
_DELETED_SUFFIX = " (deleted)"


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A file that a process has mapped with execute permission: a shared library or a program.

    Attributes
    ----------
    path : str
        The path as the kernel reports it.
    soname : str or None
        The SONAME of the library; None for a program.
    build_id : str or None
        The GNU build id in hexadecimal digits.
    notes : tuple of ElfNote
        All ELF notes of the file.
    error : str or None
        The reason why the file could not be parsed. All fields except `path` are then empty.
    """

    path: str
    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]
    error: str | None


def libraries(tree: HostTree | None = None, *, process: str = "self") -> list[LoadedLibrary]:
    """Return the files that a process has mapped with execute permission, in the order of its memory map.

    Parameters
    ----------
    tree : HostTree or None
        The host whose /proc is read; this host if None. The libraries themselves are read on this host.
    process : str
        A process id, or ``self``.
    """
    tree = HostTree() if tree is None else tree
    return [
        describe_library(path)
        for path in dict.fromkeys(_list_executable_paths(tree.text(f"/proc/{process}/maps") or ""))
    ]


def describe_library(path: str) -> LoadedLibrary:
    """Read a mapped file and return its description. If it was deleted or is damaged, the result has an ``error``."""
    if path.endswith(_DELETED_SUFFIX):
        return _make_unread_library(path, "the file was deleted since it was loaded")
    try:
        stat_result = os.stat(path)  # noqa: PTH116 - Path would normalise the path from the kernel.
    except OSError as error:
        return _make_unread_library(path, f"stat: {error.strerror}")
    return _read_library(path, stat_result.st_dev, stat_result.st_ino, stat_result.st_size, stat_result.st_mtime_ns)


@lru_cache(maxsize=1024)
def _read_library(path: str, _device: int, _inode: int, _size_bytes: int, _modified_ns: int) -> LoadedLibrary:
    # The result is cached, because every case examines the same files. The unused parameters belong to the key of the
    # cache, so that a replaced file is read again.
    try:
        elf = read_elf(path)
    except ApiError as error:
        return _make_unread_library(path, str(error))
    return LoadedLibrary(path=path, soname=elf.soname, build_id=elf.build_id, notes=elf.notes, error=None)


def _make_unread_library(path: str, error: str) -> LoadedLibrary:
    return LoadedLibrary(path=path, soname=None, build_id=None, notes=(), error=error)


def _list_executable_paths(maps_text: str) -> Iterator[str]:
    for line in maps_text.splitlines():
        mapping = _MAPPING_PATTERN.match(line)
        if mapping and "x" in mapping["permissions"] and mapping["inode"] != "0":
            yield mapping["path"]
