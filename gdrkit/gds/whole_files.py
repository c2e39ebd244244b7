"""The function :func:`read_files`, which reads many complete files into one memory as one transfer."""

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
    """Read many complete files into one memory, as one transfer, and return its future.

    The files follow each other in memory. The copy engine opens, reads and closes many files at the same time.

    Parameters
    ----------
    paths : sequence
        Paths of the files.
    buffer : object
        See :func:`gdrkit.gds.describe_buffer`.
    lengths_bytes : sequence of int
        Bytes to read from each file.
    access : str
        See :class:`~gdrkit.gds.File`.

    Raises
    ------
    UsageError
        There is not one length for each path, or the files do not fit into the memory.
    """
    encoded_paths = [os.fsencode(path) for path in paths]
    paths_count = len(encoded_paths)
    if paths_count != len(lengths_bytes):
        message = f"lengths_bytes must have one length for each of the {paths_count} paths, not {len(lengths_bytes)}"
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
            files=encoded_paths,
            extents=extents,
            access=access,
            flags=os.O_RDONLY,
        )
    return Transfer(job, lengths_bytes, memory, {"files_count": paths_count, "length_bytes": total_bytes})
