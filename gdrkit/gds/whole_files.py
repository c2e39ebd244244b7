"""Reads of many whole files as one transfer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.gds.buffer import describe_buffer
from gdrkit.gds.engine import engine_for
from gdrkit.gds.ranges import check_range, part_length, released_on_error
from gdrkit.gds.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.gds.file import Access

__all__ = ["read_files"]


def read_files(
    paths: Sequence[str | os.PathLike[str]],
    buffer: object,
    lengths_bytes: Sequence[int],
    *,
    access: Access = "automatic",
) -> Transfer:
    """Read many whole files into one memory, as one transfer, and return its future.

    The files follow each other in memory. The engine opens and closes the files, many at a time. A file is open only
    while the engine reads it.

    Parameters
    ----------
    paths : sequence
        Paths of the files.
    buffer : object
        See :func:`gdrkit.gds.describe_buffer`.
    lengths_bytes : sequence of int
        Bytes to read from each file.
    access : str
        See :class:`File`.

    Raises
    ------
    UsageError
        The lengths do not fit the paths or the memory.
    """
    names = [os.fsencode(path) for path in paths]
    if len(names) != len(lengths_bytes):
        message = f"lengths_bytes must have one length for each of the {len(names)} paths, not {len(lengths_bytes)}"
        raise UsageError(message)
    memory = describe_buffer(buffer, writable=True)
    with released_on_error(memory):
        address = memory.address
        extents: list[int] = []
        for index, length in enumerate(lengths_bytes):
            check_range("file range", 0, length)
            extents += (index, 0, address, length)
            address += length
        total_bytes = part_length(memory, 0, address - memory.address)
        job = engine_for(memory.device_index).submit(
            write=False,
            device_index=memory.device_index,
            files=names,
            extents=extents,
            access=access,
            flags=os.O_RDONLY,
        )
    return Transfer(job, lengths_bytes, memory, {"files_count": len(names), "length_bytes": total_bytes})
