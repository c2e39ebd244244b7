"""Diagnosis of foreign libraries that cannot be loaded: an errno and advice.

The dynamic loader reports failures only as text. This module turns that text, and the state of the file, into one
:class:`SetupMissing`. Its ``errno`` is ENOENT (not found), ENOEXEC (damaged), ELIBBAD (another ABI) or EACCES (not
readable). The file is checked before it is opened, because the loader itself dies of SIGBUS on a truncated library.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import struct
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import Api, Reason, SetupMissing, errno_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

__all__ = [
    "check_library",
    "find_library",
    "import_native",
    "import_package",
    "preserve_root_logger",
    "search_paths",
    "setup_missing",
]

_BUILD_NATIVE = (
    "in a checkout, run `nox -s native`; elsewhere install gdrkit again with a C++20 compiler and libibverbs-dev there"
)

# The messages of the loader (glibc, elf/dl-load.c and elf/dl-version.c) and their errnos. The first match counts.
_MEANINGS: tuple[tuple[str, int], ...] = (
    ("permission denied", errno.EACCES),
    ("wrong elf class", errno.ELIBBAD),
    ("cannot open shared object file", errno.ENOENT),
    ("file too short", errno.ENOEXEC),
    ("invalid elf header", errno.ENOEXEC),
    ("elf load command", errno.ENOEXEC),
    ("object file has no", errno.ENOEXEC),
    ("cannot read file data", errno.ENOEXEC),
    ("not found (required by", errno.ELIBBAD),  # version `X' not found
    ("undefined symbol", errno.ELIBBAD),
)

_REASONS = {
    errno.EACCES: Reason.NO_PERMISSION,
    errno.ENOENT: Reason.LIBRARY_MISSING,
    errno.ENOEXEC: Reason.LIBRARY_DAMAGED,
    errno.ELIBBAD: Reason.LIBRARY_WRONG_ABI,
}

_SYSTEM_FOLDERS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)

# Elf64_Ehdr without e_ident, and Elf64_Phdr (elf.h).
_ELF_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_IDENT_BYTES = 16
_PT_LOAD = 1


def setup_missing(
    *, operation: str, text: str, what_to_do: str, default_errno: int, api: Api = Api.LOADER
) -> SetupMissing:
    """Return the error for a message of the loader.

    Parameters
    ----------
    operation : str
        The failed operation, such as ``dlopen libcuda.so.1`` or ``import pyverbs``.
    text : str
        The message of the loader. It becomes the detail of the error.
    what_to_do : str
        How to get the library, if the library is missing or the message is unknown. Known causes have their own advice.
    default_errno : int
        The errno for an unknown message.
    api : Api
        The source of the message: the dynamic loader, or an API whose library lacks a function.
    """
    lowered = text.lower()
    known_errno = next((number for words, number in _MEANINGS if words in lowered), None)
    number = default_errno if known_errno is None else known_errno
    advice = {
        errno.EACCES: "make the file readable for this user",
        errno.ENOEXEC: "the file is damaged: install its package again",
        errno.ELIBBAD: "library and bindings are of different versions: install those that belong together",
    }
    return SetupMissing(
        api=api,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        reason=_REASONS.get(number, Reason.OTHER),
        what_to_do=what_to_do if known_errno is None and what_to_do else advice.get(number, what_to_do),
        detail=text,
    )


def find_library(soname: str) -> Path | None:
    """Return the file that the loader would load for `soname`, or None if no known folder has it.

    ``LD_LIBRARY_PATH`` is taken as it was at the start of this process, because the loader read it then.
    """
    return next((path for path in map(Path, search_paths(soname, search_path=_loader_path())) if path.exists()), None)


def search_paths(soname: str, *, search_path: Iterable[str], cached: Iterable[str] = ()) -> Iterator[str]:
    """Yield the paths where the loader looks for `soname`, in the order of ld.so(8) for a program without a run path.

    Parameters
    ----------
    soname : str
        The name of the library, such as ``libibverbs.so.1``.
    search_path : iterable of str
        The folders of LD_LIBRARY_PATH.
    cached : iterable of str
        The paths of this name in the loader's cache, if the cache was read.
    """
    # An empty entry means the current folder to the loader. It is skipped here.
    yield from (f"{folder.rstrip('/')}/{soname}" for folder in search_path if folder)
    yield from cached
    yield from (f"{folder}/{soname}" for folder in _SYSTEM_FOLDERS)


def check_library(soname: str, *, operation: str) -> None:
    """Check the file of `soname` before the loader opens it.

    Raises
    ------
    SetupMissing
        ENOEXEC: it is not an ELF file, or it is truncated. ELIBBAD: it has another class or byte order. EACCES: it
        cannot be read. A file that is not found raises nothing, because the loader searches more paths.
    """
    path = find_library(soname)
    if path is None:
        return
    try:
        fault = _find_fault(path)
    except OSError as error:
        raise setup_missing(
            operation=operation, text=f"{path}: {error.strerror}", what_to_do="", default_errno=error.errno or errno.EIO
        ) from error
    if fault is not None:
        number, cause = fault
        raise setup_missing(operation=operation, text=f"{path}: {cause}", what_to_do="", default_errno=number)


def import_package(name: str, *, extension: str, folder: str, what_to_do: str) -> None:
    """Import a package of extension modules from Python's path, or else from `folder`.

    The package must have been built for this interpreter. Only this package is imported from `folder`: the other
    packages of a distribution do not belong to this environment.

    Parameters
    ----------
    name : str
        Name of the package.
    extension : str
        Name of one of its extension modules. Its file name shows the interpreter that it was built for.
    folder : str
        The folder of the distribution's Python packages.
    what_to_do : str
        How to install the package.

    Raises
    ------
    SetupMissing
        ENOENT: it was not found. ELIBBAD: it was built for another interpreter.
    """
    spec = importlib.util.find_spec(name) or PathFinder.find_spec(name, [folder])
    operation = f"import {name}"
    if spec is None or spec.loader is None or not spec.submodule_search_locations:
        text = f"No module named {name!r}"
        raise setup_missing(operation=operation, text=text, what_to_do=what_to_do, default_errno=errno.ENOENT)
    package = Path(spec.submodule_search_locations[0])
    if not any((package / f"{extension}{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        text = f"{package} was built for another Python than {sys.executable} ({EXTENSION_SUFFIXES[0]})"
        advice = f"use the Python that it was built for, or: {what_to_do}"
        raise setup_missing(operation=operation, text=text, what_to_do=advice, default_errno=errno.ELIBBAD)
    if name not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def import_native(name: str) -> ModuleType:
    """Import a native module of gdrkit, such as ``gdrkit.usrbio._hf3fs``.

    Raises
    ------
    SetupMissing
        ENOENT: it was not built. ELIBBAD: it was built for another interpreter, or from other sources than its library.
        ENOEXEC: it is damaged.
    """
    operation = f"import {name}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package, _, module = name.rpartition(".")
        folder = Path(importlib.import_module(package).__path__[0])
        files = sorted(path.name for path in folder.glob(f"{module}.*.so"))
        number = errno.ELIBBAD if files else errno.ENOENT
        text = f"{', '.join(files)} was built for another Python than {sys.executable}" if files else str(error)
        raise setup_missing(operation=operation, text=text, what_to_do=_BUILD_NATIVE, default_errno=number) from error
    except ImportError as error:
        raise setup_missing(
            operation=operation, text=str(error), what_to_do=_BUILD_NATIVE, default_errno=errno.ELIBBAD
        ) from error


@contextlib.contextmanager
def preserve_root_logger() -> Iterator[None]:
    """Restore the root logger of the program after an import that may change it."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)


def _find_fault(path: Path) -> tuple[int, str] | None:
    """Return the errno and the cause if an ELF file is damaged or has another class or byte order, else None."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        ident = file.read(_IDENT_BYTES)
        elf_header = file.read(_ELF_HEADER.size)
        if ident[:4] != b"\x7fELF" or len(elf_header) < _ELF_HEADER.size:
            return errno.ENOEXEC, f"not an ELF file ({size_bytes} bytes)"
        if ident[4:6] != b"\x02\x01":
            return errno.ELIBBAD, "not a 64-bit little-endian ELF file"
        fields = _ELF_HEADER.unpack(elf_header)
        table_offset, entry_bytes, entry_count = fields[4], fields[8], fields[9]
        file.seek(table_offset)
        table = file.read(entry_bytes * entry_count)
    if entry_bytes != _PROGRAM_HEADER.size or len(table) < entry_bytes * entry_count:
        return errno.ENOEXEC, "its program headers are cut off or malformed"
    for header in _PROGRAM_HEADER.iter_unpack(table):
        segment_type, _flags, offset, _vaddr, _paddr, file_bytes, _memory_bytes, _align = header
        if segment_type == _PT_LOAD and offset + file_bytes > size_bytes:
            return errno.ENOEXEC, f"it is cut off: {size_bytes} bytes of at least {offset + file_bytes}"
    return None


def _loader_path() -> list[str]:
    """Return the folders of LD_LIBRARY_PATH as they were at the start of this process."""
    environment = Path("/proc/self/environ").read_bytes().split(b"\0")
    name = b"LD_LIBRARY_PATH="
    value = next((entry[len(name) :] for entry in environment if entry.startswith(name)), b"")
    return [os.fsdecode(folder) for folder in value.replace(b";", b":").split(b":")]
