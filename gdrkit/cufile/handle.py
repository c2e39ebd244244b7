"""Files that are registered with cuFile, and transfers between them and memory.

Each method is one call of cuFile. As with pread, a count below the requested one means the end of the file, or a full
disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, _layout, _results
from gdrkit.cufile.buffer import check_memory
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.cufile.buffer import Memory
    from gdrkit.cufile.driver import Driver
    from gdrkit.cufile.stream import Pending, Stream

__all__ = ["FileHandle", "Piece"]

# The largest value of off_t and ssize_t.
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of memory, for transfers with several parts. `length_bytes` None: up to the end of the memory."""

    memory: Memory
    offset_bytes: int = 0
    length_bytes: int | None = None


class FileHandle:
    """A file that is registered with cuFile; a context manager.

    Parameters
    ----------
    driver : Driver
        The open driver. It deregisters the file when it closes, at the latest.
    fd : int
        Descriptor of an open regular file. The caller owns it and closes it after the handle. Direct transfers require
        O_DIRECT.

    Raises
    ------
    ApiError
        The library failed. CU_FILE_HANDLE_NOT_REGISTERED (5027) is the error for a file on tmpfs, or on a machine
        without udev's database; :func:`gdrkit.cufile.obstacles` tells which.
    """

    def __init__(self, driver: Driver, fd: int) -> None:
        driver.check_open()
        if fd < 0:
            message = f"no descriptor: {fd}"
            raise UsageError(message, reason=Reason.BAD_DESCRIPTOR)
        self.driver = driver
        self.fd = fd
        self._number = _cufile.register_file(fd)
        self._handle = Handle("cufile.file")
        self._leave = driver.on_close(self.close)
        self._pending: set[Pending] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the file was deregistered."""
        return self._closed

    @property
    def number(self) -> int:
        """The CUfileHandle_t of the file."""
        if self._closed:
            what = "the cuFile handle"
            raise ClosedResource(what)
        return self._number

    def read(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> int:
        """Read into memory and return the bytes that arrived.

        Parameters
        ----------
        memory : Memory
            Memory to read into.
        file_offset_bytes : int
            Offset in the file, in bytes.
        offset_bytes, length_bytes : int
            Part of the memory; length None: up to its end.

        Raises
        ------
        ApiError
            The file system failed (``errno``), or cuFile did (a CUfileOpError as status).
        UsageError
            A value is negative, too large, or not inside the memory.
        """
        return self._move(
            ("cuFileRead", "read"), Piece(memory, offset_bytes, length_bytes), file_offset_bytes=file_offset_bytes
        )

    def write(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> int:
        """Write from memory and return the bytes written; see :meth:`read`."""
        return self._move(
            ("cuFileWrite", "write"), Piece(memory, offset_bytes, length_bytes), file_offset_bytes=file_offset_bytes
        )

    def readv(self, pieces: Sequence[Piece], *, file_offset_bytes: int = 0) -> int:
        """Read a contiguous range of the file into several parts of memory (cuFile 1.19); see :meth:`read`."""
        return self._move_vectors(("cuFileReadv", "readv"), pieces, file_offset_bytes=file_offset_bytes)

    def writev(self, pieces: Sequence[Piece], *, file_offset_bytes: int = 0) -> int:
        """Write several parts of memory to a contiguous range (cuFile 1.19); see :meth:`readv`."""
        return self._move_vectors(("cuFileWritev", "writev"), pieces, file_offset_bytes=file_offset_bytes)

    def read_async(
        self,
        stream: Stream,
        memory: Memory,
        *,
        file_offset_bytes: int = 0,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> Pending:
        """Queue a read on a CUDA stream; see :meth:`read`."""
        from gdrkit.cufile.stream import Pending

        piece = Piece(memory, offset_bytes, length_bytes)
        return Pending.begin(("cuFileReadAsync", "read_async"), self, stream, piece, file_offset_bytes)

    def write_async(
        self,
        stream: Stream,
        memory: Memory,
        *,
        file_offset_bytes: int = 0,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
    ) -> Pending:
        """Queue a write on a CUDA stream; see :meth:`read_async`."""
        from gdrkit.cufile.stream import Pending

        piece = Piece(memory, offset_bytes, length_bytes)
        return Pending.begin(("cuFileWriteAsync", "write_async"), self, stream, piece, file_offset_bytes)

    def hold(self, pending: Pending) -> None:
        """Keep a transfer that a stream still uses alive."""
        self._pending.add(pending)

    def let_go(self, pending: Pending) -> None:
        """Drop a transfer that is over."""
        self._pending.discard(pending)

    def close(self) -> None:
        """Deregister the file; a second close does nothing.

        Raises
        ------
        UsageError
            ``BUSY``: a stream has not completed one of the transfers.
        """
        if self._closed:
            return
        waiting = [pending for pending in self._pending if not pending.done]
        if waiting:
            message = f"{len(waiting)} transfers of streams are not done"
            raise UsageError(message, reason=Reason.BUSY, what_to_do="synchronize the streams first")
        self._pending.clear()
        _cufile.call("cuFileHandleDeregister", "handle_deregister", fh=self._number)
        self._closed = True
        self._leave()
        self._handle.release()

    def _move(self, names: tuple[str, str], piece: Piece, *, file_offset_bytes: int) -> int:
        length_bytes = check_piece(piece, file_offset_bytes=file_offset_bytes)
        operation, function = names
        with piece.memory.current():
            return _cufile.transfer(
                operation,
                function,
                fh=self.number,
                bufPtr_base=piece.memory.address,
                size=length_bytes,
                file_offset=file_offset_bytes,
                bufPtr_offset=piece.offset_bytes,
            )

    def _move_vectors(self, names: tuple[str, str], pieces: Sequence[Piece], *, file_offset_bytes: int) -> int:
        operation, function = names
        if _cufile.library_version() < _layout.VECTORS_SINCE:
            raise _results.missing_function(operation, version=_cufile.version_text(), since="1.19")
        if not pieces:
            message = "no piece of memory was given"
            raise UsageError(message)
        parts = [
            (piece.memory.address + piece.offset_bytes, check_piece(piece, file_offset_bytes=file_offset_bytes))
            for piece in pieces
        ]
        vectors = _cufile.vectors(parts)
        with pieces[0].memory.current():
            return _cufile.transfer(
                operation, function, fh=self.number, iov=vectors, file_offset=file_offset_bytes, flags=0
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_piece(piece: Piece, *, file_offset_bytes: int) -> int:
    """Return the length of the part of memory.

    Raises
    ------
    UsageError
        The part is not inside the memory, or the range is too large for a file.
    """
    length_bytes = check_memory(piece.memory, offset_bytes=piece.offset_bytes, length_bytes=piece.length_bytes)
    if not 0 <= file_offset_bytes <= _OFFSET_MAX - length_bytes:
        message = f"{length_bytes} bytes at {file_offset_bytes} are in no file"
        raise UsageError(message)
    return length_bytes
