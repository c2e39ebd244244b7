"""The shared libraries of a process, as found in its memory map.

Level 3. What a process was told to load is not evidence; what it has mapped is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError
from gdrkit.host import HostTree
from gdrkit.witness.elf import ElfNote, read_elf

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LoadedLibrary", "describe_library", "libraries"]

# address range, permissions, offset, device, inode, path (proc(5)).
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<permissions>\S{4}) \S+ \S+ (?P<inode>\d+)\s+(?P<path>/.*)$")
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """One file that is mapped executable.

    Attributes
    ----------
    path : str
        As the kernel names it.
    soname : str or None
        The name that it gives itself; None for a program.
    build_id : str or None
        The GNU build id in hexadecimal digits.
    notes : tuple of ElfNote
        All its notes.
    error : str or None
        Why the file could not be understood; then the other fields are empty.
    """

    path: str
    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]
    error: str | None


def libraries(tree: HostTree | None = None, *, process: str = "self") -> list[LoadedLibrary]:
    """The files that a process has mapped executable, in the order of its memory.

    Parameters
    ----------
    tree : HostTree or None
        Where /proc lies; this host when None.
    process : str
        A process number, or ``self``.
    """
    tree = HostTree() if tree is None else tree
    return [describe_library(path) for path in dict.fromkeys(_mapped(tree.text(f"/proc/{process}/maps") or ""))]


def describe_library(path: str) -> LoadedLibrary:
    """Read the file of a mapping; a file that is gone or damaged gives an entry with ``error``."""
    if path.endswith(_DELETED):
        return _failed(path, "the file was deleted since it was loaded")
    try:
        status = os.stat(path)  # noqa: PTH116 - Path would normalise what the kernel wrote.
    except OSError as error:
        return _failed(path, f"stat: {error.strerror}")
    return _described(path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _described(path: str, _device: int, _inode: int, _size_bytes: int, _changed_ns: int) -> LoadedLibrary:
    # Cached, since every case looks at the same files; the key says when one was replaced.
    try:
        found = read_elf(path)
    except ApiError as error:
        return _failed(path, str(error))
    return LoadedLibrary(path=path, soname=found.soname, build_id=found.build_id, notes=found.notes, error=None)


def _failed(path: str, error: str) -> LoadedLibrary:
    return LoadedLibrary(path=path, soname=None, build_id=None, notes=(), error=error)


def _mapped(text: str) -> Iterator[str]:
    for line in text.splitlines():
        found = _MAPPING.match(line)
        if found and "x" in found["permissions"] and found["inode"] != "0":
            yield found["path"]
