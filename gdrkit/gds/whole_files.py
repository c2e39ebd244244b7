"""Transfers of several files: complete files by :func:`read_files`, parts of open files by :func:`transfer_ranges`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gdrkit.errors import ClosedResource, UsageError
from gdrkit.gds._native import native
from gdrkit.gds.buffer import describe_buffer
from gdrkit.gds.engine import engine_for
from gdrkit.gds.ranges import check_range, resolve_length_bytes
from gdrkit.gds.transfer import Transfer

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from gdrkit.gds.buffer import TransferBuffer
    from gdrkit.gds.file import File
    from gdrkit.gds.opening import Access

__all__ = ["read_files", "transfer_ranges"]


def read_files(
    paths: Sequence[str | os.PathLike[str]],
    buffer: object,
    lengths_bytes: Sequence[int],
    *,
    access: Access = "automatic",
) -> Transfer:
    """Start one transfer that reads many complete files into one buffer, and return it as a future.

    The files follow each other in memory. The copy engine opens, reads and closes many files at the same time.

    Parameters
    ----------
    paths : sequence
        Paths of the files.
    buffer : object
        See :func:`gdrkit.gds.describe_buffer`.
    lengths_bytes : sequence of int
        Number of bytes to read from each file, from its beginning.
    access : str
        See :class:`~gdrkit.gds.File`.

    Raises
    ------
    UsageError
        The number of lengths differs from the number of paths, or the files do not fit into the buffer.
    """
    paths = tuple(paths)
    encoded_paths = [os.fsencode(path) for path in paths]
    paths_count = len(encoded_paths)
    if paths_count != len(lengths_bytes):
        message = f"lengths_bytes must have one length for each of the {paths_count} paths, not {len(lengths_bytes)}"
        raise UsageError(message)
    memory = describe_buffer(buffer, writable=True)
    transfer = Transfer(memory, paths)
    try:
        next_address = memory.address
        extents: list[int] = []
        for index, length in enumerate(lengths_bytes):
            check_range("file range", 0, length)
            extents += (index, 0, next_address, length)
            next_address += length
        resolve_length_bytes(memory, 0, next_address - memory.address)
        transfer.extents = extents
        engine_for(memory.device_index).submit(
            write=False,
            device_index=memory.device_index,
            files=encoded_paths,
            extents=extents,
            access=access,
            flags=os.O_RDONLY,
            transfer=transfer,
        )
    except BaseException:
        transfer.discard()
        raise
    return transfer


def transfer_ranges(
    files: Sequence[File], extents: array[int], memory: TransferBuffer, *, write: bool = False
) -> Transfer:
    """Read or write ranges of several open files by the copy engine, as one transfer, and return its future.

    One call transfers any number of ranges between the files and any memory of one device, or of the host. The caller
    must pass valid addresses. This function does not check them, because the checks would take longer than starting the
    transfer.

    Parameters
    ----------
    files : sequence of File
        The files. The descriptor of each stays open until the transfer is over, even if the file is closed meanwhile.
    extents : array of int
        Four numbers for each range: index in `files`, offset in the file, address, length in bytes.
    memory : TransferBuffer
        Its `device_index` is the device of all ranges. Its `memory_owner` keeps the memory of the ranges alive until
        the transfer ends. Its address and length are not used.
    write : bool
        True: write from memory into the files. False: read from the files into memory.

    Raises
    ------
    ClosedResource
        A file was closed.
    UsageError
        The files do not have the same `access`, or with `write`, a file was opened for reading only.
    """
    files = tuple(files)
    transfer = Transfer(memory, files)
    try:
        _check_files(files, write=write)
        transfer.extents = extents[:]
        engine_for(memory.device_index).submit(
            write=write,
            device_index=memory.device_index,
            files=[file.native_file for file in files],
            extents=transfer.extents,
            access=files[0].access,
            transfer=transfer,
        )
    except native.FileClosed as error:
        transfer.discard()
        # The argument of FileClosed is the index of the closed file.
        raise ClosedResource(files[error.args[0]].path) from None
    except BaseException:
        transfer.discard()
        raise
    return transfer


def _check_files(files: Sequence[File], *, write: bool) -> None:
    """Raise :class:`~gdrkit.errors.UsageError` unless one transfer can use all of these files."""
    if len(accesses := {file.access for file in files}) != 1:
        message = f"all files of one transfer must have the same access, not {sorted(accesses)}"
        raise UsageError(message)
    if write and not all(file.writable for file in files):
        message = f"{next(file.path for file in files if not file.writable)} was opened for reading only"
        raise UsageError(message, what_to_do="open it with mode 'r+' or 'w'")
