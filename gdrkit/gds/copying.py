"""A file copied by way of memory of a device or of the host.

Level 4. Reading a piece and writing the one before it overlap. The new file gets its name when all of it is there: who
looks meanwhile finds the old one or none, and a copy that failed leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, pattern
from gdrkit.errors import DataMismatch, UsageError
from gdrkit.gds.file import File
from gdrkit.gds.opening import os_error
from gdrkit.gds.target import HOST
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.gds.file import Access, Direct
    from gdrkit.gds.transfer import Transfer, Transferred

__all__ = ["PIECE_BYTES", "Copied", "Half", "copy_file", "pieces_of"]

PIECE_BYTES = 256 * MIB
_PIECES_COUNT = 2
_CHECK_BYTES = 16 * MIB
_SHOWN_BYTES = 16


@dataclass(slots=True)
class Half:
    """What the reads, or the writes, of a copy came to.

    Attributes
    ----------
    routes : dict of str to int
        Bytes by the way that they took.
    direct_io_bytes : int
        How many of them passed the page cache by.
    why_not_direct : str
        Why they did not go directly, where that was wanted.
    """

    routes: dict[str, int] = field(default_factory=dict)
    direct_io_bytes: int = 0
    why_not_direct: str = ""

    def add(self, result: Transferred) -> None:
        """Count one transfer."""
        if result.bytes:
            self.routes[result.route.value] = self.routes.get(result.route.value, 0) + result.bytes
        self.direct_io_bytes += result.direct_io_bytes
        self.why_not_direct = self.why_not_direct or result.why_not_direct


@dataclass(slots=True)
class Copied:
    """What a copy came to."""

    source: str
    destination: str
    bytes: int = 0
    duration_s: float = 0.0
    read: Half = field(default_factory=Half)
    write: Half = field(default_factory=Half)
    is_checked: bool = False


def copy_file(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    device_index: int = 0,
    piece_bytes: int = PIECE_BYTES,
    access: Access = "automatic",
    direct: Direct = "preferred",
    durable: bool = False,
    check: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Copy a file.

    Parameters
    ----------
    source : path
        A regular file; its size when this begins is what is copied.
    destination : path
        The new file, or the folder where it goes. A file of that name is replaced.
    device_index : int
        Through whose memory; :data:`~gdrkit.gds.HOST` for the host's.
    piece_bytes : int
        How much goes at a time; two such pieces of memory are needed.
    access, direct : str
        As for :class:`~gdrkit.gds.File`.
    durable : bool
        It is over when the disk has it.
    check : bool
        Compare both files byte by byte before the new one gets its name.
    on_progress : callable or None
        Called with the bytes that were read and the bytes of the file. What it raises ends the copy.

    Raises
    ------
    TransferFailed
        A read or a write failed; see :class:`~gdrkit.gds.Transfer`.
    ApiError
        A file cannot be opened, or memory cannot be had.
    UsageError
        Source and destination are one file, or a size cannot be.
    DataMismatch
        The check found a byte that differs; the new file is removed.
    """
    if piece_bytes < 1:
        message = f"no piece of {piece_bytes} bytes"
        raise UsageError(message)
    place = Path(destination)
    place = place / Path(source).name if place.is_dir() else place
    began = time.monotonic()
    copied = Copied(os.fspath(source), str(place))
    with File(source, access=access, direct=direct) as old:
        if place.exists() and place.samefile(source):
            message = f"{source} and {place} are one file"
            raise UsageError(message)
        with _new_file(place, access=access, direct=direct) as new:
            copied.bytes = old.size_bytes
            length = min(piece_bytes, max(copied.bytes, 1))
            with pieces_of(device_index, length, _PIECES_COUNT) as pieces:
                _move(old, new, pieces, copied, on_progress)
            if durable:
                new.sync()
            shutil.copymode(source, new.path)
            copied.duration_s = time.monotonic() - began
            if check:
                _compare(old.fileno(), new.fileno(), copied.bytes)
                copied.is_checked = True
    return copied


def _move(
    old: File, new: File, pieces: list[Any], copied: Copied, on_progress: Callable[[int, int], None] | None
) -> None:
    writing: list[Transfer | None] = [None] * len(pieces)
    length = len(pieces[0]) if isinstance(pieces[0], bytearray) else pieces[0].length_bytes

    def told(at: int) -> Callable[[int, int], None] | None:
        return None if on_progress is None else lambda done, _whole: on_progress(at + done, copied.bytes)

    for number, at in enumerate(range(0, copied.bytes, length)):
        slot = number % len(pieces)
        if (before := writing[slot]) is not None:
            copied.write.add(before.result())
        count = min(length, copied.bytes - at)
        copied.read.add(old.read_into(pieces[slot], file_offset_bytes=at, length_bytes=count, on_progress=told(at)))
        writing[slot] = new.start_write_from(pieces[slot], file_offset_bytes=at, length_bytes=count)
    for each in writing:
        if each is not None:
            # With a word now and then, so that Ctrl-C is heard.
            copied.write.add(each.result(on_progress=lambda _done, _whole: None))


@contextlib.contextmanager
def pieces_of(device_index: int, length_bytes: int, count: int) -> Iterator[list[Any]]:
    """So many pieces of memory of a device, or (:data:`~gdrkit.gds.HOST`) of the host."""
    if device_index == HOST:
        yield [bytearray(length_bytes) for _ in range(count)]
        return
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(cuda.Device(device_index))
        yield [stack.enter_context(device.allocate(length_bytes)) for _ in range(count)]


@contextlib.contextmanager
def _new_file(place: Path, *, access: Access, direct: Direct) -> Iterator[File]:
    """A file that gets its name at the end, and is removed when it does not come to that."""
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    with contextlib.ExitStack() as undo:
        with File(part, "x", access=access, direct=direct) as file:
            undo.callback(part.unlink, missing_ok=True)
            yield file
        try:
            part.replace(place)
        except OSError as error:
            raise os_error("rename", str(place), error) from error


def _compare(old: int, new: int, length_bytes: int) -> None:
    for at in range(0, length_bytes, _CHECK_BYTES):
        count = min(_CHECK_BYTES, length_bytes - at)
        one, other = (os.pread(fd, count, at) for fd in (old, new))
        where = pattern.find_mismatch(one, other)
        if where is not None:
            shown = slice(where, where + _SHOWN_BYTES)
            raise DataMismatch(
                first_offset_bytes=at + where, expected=one[shown], actual=other[shown], length_bytes=length_bytes
            )
