"""Open files of a storage client, and the requests and results of their transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.storage import messages

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.storage.client import StorageClient
    from gdrkit.storage.iobuffer import IOBuffer

__all__ = ["IORequest", "StorageFile", "StorageResult"]


@dataclass(frozen=True, slots=True)
class IORequest:
    """One transfer of a batch: between `buffer` and the bytes of `file` that begin at `offset_bytes`."""

    file: StorageFile
    offset_bytes: int
    buffer: IOBuffer


@dataclass(frozen=True, slots=True)
class StorageResult:
    """The result of a successful transfer.

    Attributes
    ----------
    length_bytes : int
        Number of bytes moved. It is less than requested at the end of the file.
    checksums : tuple of int
        CRC32C of the bytes of each operation into which the transfer was split, in order. The server computes them, if
        the client requested checksums.
    hole_bytes : int
        Number of bytes of holes in a read into device memory. The device zeroed them, and the server did not send them.
    """

    length_bytes: int
    checksums: tuple[int, ...] = ()
    hole_bytes: int = 0


class StorageFile:
    """An open file. :meth:`StorageClient.open` creates it."""

    def __init__(self, client: StorageClient, reply: messages.OpenReply) -> None:
        self.client = client
        self.handle = reply.handle
        self.inode = reply.stat.inode
        self._is_closed = False

    def stat(self) -> messages.FileStat:
        """Return the current attributes of the file."""
        return self.client.request(messages.Stat(handle=self.handle), messages.FileStat)

    def read(self, buffer: IOBuffer, *, offset_bytes: int, forbid_holes: bool = False) -> StorageResult:
        """Fill `buffer` from the file; see :meth:`StorageClient.batch_read`."""
        return self.client.batch_read([IORequest(self, offset_bytes, buffer)], forbid_holes=forbid_holes)[0]

    def write(self, buffer: IOBuffer, *, offset_bytes: int, checksum: bool = True) -> StorageResult:
        """Write all of `buffer` to the file; see :meth:`StorageClient.batch_write`."""
        return self.client.batch_write([IORequest(self, offset_bytes, buffer)], checksum=checksum)[0]

    def truncate(self, size_bytes: int) -> messages.FileStat:
        """Set the size of the file and return its attributes."""
        return self.client.request(messages.Truncate(size_bytes, handle=self.handle), messages.FileStat)

    def punch_hole(self, *ranges: tuple[int, int]) -> None:
        """Turn ranges of the file into holes. A range is (begin, end) in bytes."""
        self.client.request(messages.PunchHole(self.handle, tuple(ranges)), messages.Done)

    def sync(self) -> None:
        """Sync the file to the server's disk, so that the written data survives a power loss."""
        self.client.request(messages.Sync(self.handle), messages.Done)

    def close(self) -> None:
        """Close the file. Do nothing if the file or the client is closed. If close() raises, it can be called again."""
        if not self._is_closed:
            if not self.client.closed:
                self.client.request(messages.Close(self.handle), messages.Done)
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
