"""Reads of many whole files as one transfer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gdrkit.errors import UsageError
from gdrkit.gds.engine import EngineWork, engine_for
from gdrkit.gds.ranges import check_range, length_in, released_on_error
from gdrkit.gds.target import target_of
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
    """Read many whole files into one memory, one after the other, as one transfer, and return its future.

    The engine opens and closes the files, many at a time. Each is open only while the engine reads it.

    Parameters
    ----------
    paths : sequence
        Paths of the files.
    buffer : object
        See :func:`gdrkit.gds.target_of`.
    lengths_bytes : sequence of int
        Bytes to read from each file.
    access : str
        See :class:`File`.
    """
    names = [os.fsencode(path) for path in paths]
    if len(names) != len(lengths_bytes):
        message = f"{len(names)} paths have {len(lengths_bytes)} lengths"
        raise UsageError(message)
    target = target_of(buffer, writable=True)
    with released_on_error(target):
        where = target.address
        extents: list[int] = []
        for index, length in enumerate(lengths_bytes):
            check_range("length", 0, length)
            extents += (index, 0, where, length)
            where += length
        length_in(target, 0, where - target.address)
        work: EngineWork = engine_for(target.device_index).submit(
            write=False,
            device_index=target.device_index,
            files=names,
            extents=extents,
            access=access,
            flags=os.O_RDONLY,
        )
    arguments = {"files_count": len(names), "length_bytes": where - target.address}
    return Transfer(work, lengths_bytes, (target,), arguments, must_fill=True)
