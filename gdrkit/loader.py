"""Check and import of shared libraries and extension modules, with advice if they cannot be loaded.

The dynamic loader reports failures only as text. This module turns that text, and the state of the file, into a
:class:`SetupMissing` error, whose ``errno`` is ENOENT (not found), ENOEXEC (damaged), ELIBBAD (another ABI) or EACCES
(not readable). A library is checked before the loader opens it, because the loader crashes with SIGBUS on a truncated
file.
The packages that wrap libraries of other projects (:mod:`gdrkit.cuda`, :mod:`gdrkit.verbs`, ...) use this module.
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
    "NEEDS_LIBIBVERBS",
    "LazyModule",
    "check_library",
    "find_library",
    "import_native",
    "import_package",
    "preserve_root_logger",
    "search_paths",
    "setup_missing",
]

NEEDS_LIBIBVERBS = "install libibverbs (rdma-core), and a gdrkit whose native parts were built"
_BUILD_NATIVE = "in a checkout, run `nox -s native`; elsewhere install a wheel of gdrkit for this Python and processor"

# Parts of the loader's messages (glibc, elf/dl-load.c and elf/dl-version.c), with the errno for each. The first part
# that occurs in a message selects the errno.
_ERRNO_BY_MESSAGE_PART: tuple[tuple[str, int], ...] = (
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

_REASON_BY_ERRNO = {
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

# The structures Elf64_Ehdr without its first field e_ident, and Elf64_Phdr (elf.h).
_ELF_HEADER = struct.Struct("<HHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_IDENT_BYTES = 16  # EI_NIDENT, the size of e_ident.
_PT_LOAD = 1  # The type of a segment that is mapped into memory.


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
        How to get the library. This advice is used if the library is missing or the message is unknown. For the other
        known messages this function has more specific advice.
    default_errno : int
        The errno for an unknown message.
    api : Api
        The source of the message: the dynamic loader, or an API whose library lacks a function.
    """
    lowercase_text = text.lower()
    known_errno = next(
        (error_number for message_part, error_number in _ERRNO_BY_MESSAGE_PART if message_part in lowercase_text), None
    )
    error_number = default_errno if known_errno is None else known_errno
    advice_by_errno = {
        errno.EACCES: "make the file readable for this user",
        errno.ENOEXEC: "the file is damaged: install its package again",
        errno.ELIBBAD: "the versions of the library and of its bindings differ: install versions that belong together",
    }
    return SetupMissing(
        api=api,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        reason=_REASON_BY_ERRNO.get(error_number, Reason.OTHER),
        what_to_do=what_to_do if known_errno is None and what_to_do else advice_by_errno.get(error_number, what_to_do),
        detail=text,
    )


def find_library(soname: str) -> Path | None:
    """Return the file that the loader would load for `soname`, or None if no known folder has it.

    The function uses ``LD_LIBRARY_PATH`` as it was at the start of this process, because the loader read it then.
    """
    return next(
        (path for path in map(Path, search_paths(soname, search_path=_read_search_folders())) if path.exists()), None
    )


def search_paths(soname: str, *, search_path: Iterable[str], cached: Iterable[str] = ()) -> Iterator[str]:
    """Yield the paths where the loader looks for `soname`, in the order of ld.so(8) for a program without a run path.

    Parameters
    ----------
    soname : str
        The name of the library, such as ``libibverbs.so.1``.
    search_path : iterable of str
        The folders of LD_LIBRARY_PATH.
    cached : iterable of str
        The paths of this name in the loader's cache (/etc/ld.so.cache), if the caller has read the cache.
    """
    # For the loader an empty entry means the current folder. This function skips it.
    yield from (f"{folder.rstrip('/')}/{soname}" for folder in search_path if folder)
    yield from cached
    yield from (f"{folder}/{soname}" for folder in _SYSTEM_FOLDERS)


def check_library(soname: str, *, operation: str) -> None:
    """Check the file of `soname` before the loader opens it.

    Raises
    ------
    SetupMissing
        ENOEXEC: the file is not an ELF file, or it is truncated. ELIBBAD: it is not a 64-bit little-endian ELF file.
        EACCES: it cannot be read. If no file is found, the function returns, because the loader searches more paths.
    """
    path = find_library(soname)
    if path is None:
        return
    try:
        fault = _find_elf_fault(path)
    except OSError as error:
        raise setup_missing(
            operation=operation, text=f"{path}: {error.strerror}", what_to_do="", default_errno=error.errno or errno.EIO
        ) from error
    if fault is not None:
        error_number, cause = fault
        raise setup_missing(operation=operation, text=f"{path}: {cause}", what_to_do="", default_errno=error_number)


def import_package(name: str, *, extension: str, folder: str, what_to_do: str) -> None:
    """Import a package of extension modules from Python's path, or else from `folder`.

    The package must have been built for this interpreter. `folder` is not added to Python's path, because the other
    packages in it do not belong to this environment.

    Parameters
    ----------
    name : str
        Name of the package.
    extension : str
        Name of one extension module of the package. The suffix of its file shows for which interpreter it was built.
    folder : str
        The folder in which the Linux distribution installs its Python packages.
    what_to_do : str
        How to install the package.

    Raises
    ------
    SetupMissing
        ENOENT: the package was not found. ELIBBAD: it was built for another interpreter.
    """
    spec = importlib.util.find_spec(name) or PathFinder.find_spec(name, [folder])
    operation = f"import {name}"
    if spec is None or spec.loader is None or not spec.submodule_search_locations:
        text = f"No module named {name!r}"
        raise setup_missing(operation=operation, text=text, what_to_do=what_to_do, default_errno=errno.ENOENT)
    package_folder = Path(spec.submodule_search_locations[0])
    if not any((package_folder / f"{extension}{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
        text = f"{package_folder} was built for another Python than {sys.executable} ({EXTENSION_SUFFIXES[0]})"
        advice = f"use the Python that it was built for, or: {what_to_do}"
        raise setup_missing(operation=operation, text=text, what_to_do=advice, default_errno=errno.ELIBBAD)
    if name not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def import_native(name: str, *, what_to_do: str = _BUILD_NATIVE) -> ModuleType:
    """Import a native module of gdrkit, such as ``gdrkit.usrbio._hf3fs``.

    Raises
    ------
    SetupMissing
        ENOENT: the module was not built. ELIBBAD: it was built for another interpreter, or from other sources than the
        native library that it uses. ENOEXEC: it is damaged.
    """
    operation = f"import {name}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package_name, _, module_name = name.rpartition(".")
        folder = Path(importlib.import_module(package_name).__path__[0])
        # The module was not found, so these files have the suffix of another interpreter.
        file_names = sorted(path.name for path in folder.glob(f"{module_name}.*.so"))
        error_number = errno.ELIBBAD if file_names else errno.ENOENT
        text = (
            f"{', '.join(file_names)} was built for another Python than {sys.executable}" if file_names else str(error)
        )
        raise setup_missing(
            operation=operation, text=text, what_to_do=what_to_do, default_errno=error_number
        ) from error
    except ImportError as error:
        raise setup_missing(
            operation=operation, text=str(error), what_to_do=what_to_do, default_errno=errno.ELIBBAD
        ) from error


class LazyModule:
    """A native module of gdrkit that is imported at the first use of one of its attributes.

    `import gdrkit` must work where a foreign library is missing. The first use raises :class:`SetupMissing` there.

    Parameters
    ----------
    name : str
        Full name of the module, such as ``gdrkit.gds._engine``.
    what_to_do : str
        Advice in the error.
    """

    def __init__(self, name: str, *, what_to_do: str = _BUILD_NATIVE) -> None:
        self._name = name
        self._what_to_do = what_to_do

    def __getattr__(self, attribute: str) -> object:
        """Import the module, and return one of its attributes."""
        # The modules copy, pickle and inspect read special names of every object. These reads do not import the native
        # module.
        if attribute.startswith("__"):
            raise AttributeError(name=attribute, obj=self)
        value: object = getattr(import_native(self._name, what_to_do=self._what_to_do), attribute)
        # Python calls __getattr__ only for attributes that the object does not have yet.
        setattr(self, attribute, value)
        return value


@contextlib.contextmanager
def preserve_root_logger() -> Iterator[None]:
    """Restore level and handlers of the root logger when the block ends, because some imports change them."""
    root = logging.getLogger()
    original_level, original_handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(original_level)
        for added_handler in [handler for handler in root.handlers if handler not in original_handlers]:
            root.removeHandler(added_handler)


def _find_elf_fault(path: Path) -> tuple[int, str] | None:
    """Return the errno and the cause if a file is not a 64-bit little-endian ELF file or is damaged, else None."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        elf_ident = file.read(_IDENT_BYTES)
        elf_header = file.read(_ELF_HEADER.size)
        if elf_ident[:4] != b"\x7fELF" or len(elf_header) < _ELF_HEADER.size:
            return errno.ENOEXEC, f"not an ELF file ({size_bytes} bytes)"
        if elf_ident[4:6] != b"\x02\x01":  # ELFCLASS64, ELFDATA2LSB
            return errno.ELIBBAD, "not a 64-bit little-endian ELF file"
        header_fields = _ELF_HEADER.unpack(elf_header)
        # The fields e_phoff, e_phentsize and e_phnum.
        table_offset, entry_bytes, entry_count = header_fields[4], header_fields[8], header_fields[9]
        file.seek(table_offset)
        program_table = file.read(entry_bytes * entry_count)
    if entry_bytes != _PROGRAM_HEADER.size or len(program_table) < entry_bytes * entry_count:
        return errno.ENOEXEC, "its program headers are cut off or malformed"
    for program_header in _PROGRAM_HEADER.iter_unpack(program_table):
        segment_type, _flags, offset, _vaddr, _paddr, file_bytes, _memory_bytes, _align = program_header
        if segment_type == _PT_LOAD and offset + file_bytes > size_bytes:
            return errno.ENOEXEC, f"it is cut off: {size_bytes} bytes of at least {offset + file_bytes}"
    return None


def _read_search_folders() -> list[str]:
    """Return the folders of LD_LIBRARY_PATH as they were at the start of this process."""
    prefix = b"LD_LIBRARY_PATH="
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except PermissionError:
        # The process has changed its user, so that the file belongs to root. The present value is used instead,
        # although the process may have changed it.
        entries = [prefix + os.environb.get(prefix[:-1], b"")]
    search_path = next((entry[len(prefix) :] for entry in entries if entry.startswith(prefix)), b"")
    return [os.fsdecode(folder) for folder in search_path.replace(b";", b":").split(b":")]
