"""The client of the storage service: it opens files by name and moves their bytes to and from registered memory.

The server moves the bytes. The client registers memory and sends its address and key. The CPU verifies bytes in host
memory. It never touches bytes in device memory.
"""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeVar

import gdrkit
from gdrkit import verbs
from gdrkit.buffers import DeviceBuffer, check_range
from gdrkit.errors import BrokenResource, ClosedResource, DataMismatch, Reason, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.registration import RegionCache
from gdrkit.storage import messages as ask
from gdrkit.storage.connection import ControlConnection, Place
from gdrkit.storage.control import Request, pack_request, parse_reply
from gdrkit.storage.iobuffer import IOBuffer
from gdrkit.storage.transfers import Transfers, storage_error
from gdrkit.storage.wire import FrameType, Opcode, Operation, OperationFlag, Result, ResultFlag

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["IORequest", "StorageClient", "StorageFile", "Transferred"]

_R = TypeVar("_R")
# A larger transfer is split into chunks, which use all queue pairs in parallel.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class IORequest:
    """One transfer of a batch: as many bytes of `file` from `offset_bytes` as `buffer` holds."""

    file: StorageFile
    offset_bytes: int
    buffer: IOBuffer


@dataclass(frozen=True, slots=True)
class Transferred:
    """The result of a successful transfer.

    Attributes
    ----------
    length_bytes : int
        Bytes moved. It is less than requested at the end of the file.
    checksums : tuple of int
        CRC32C of each chunk as computed by the server, in order; empty if no checksum was requested.
    hole_bytes : int
        Bytes of holes that the device zeroed itself in a read into device memory.
    """

    length_bytes: int
    checksums: tuple[int, ...] = ()
    hole_bytes: int = 0


class StorageFile:
    """An open file. :meth:`StorageClient.open` creates it."""

    def __init__(self, client: StorageClient, opened: ask.OpenReply) -> None:
        self.client = client
        self.handle = opened.handle
        self.inode = opened.stat.inode
        self._closed = False

    def stat(self) -> ask.FileStat:
        """Return the current attributes of the file."""
        return self.client.request(ask.Stat(handle=self.handle), ask.FileStat)

    def read(self, buffer: IOBuffer, *, offset_bytes: int, forbid_holes: bool = False) -> Transferred:
        """Fill `buffer` from the file; see :meth:`StorageClient.batch_read`."""
        return self.client.batch_read([IORequest(self, offset_bytes, buffer)], forbid_holes=forbid_holes)[0]

    def write(self, buffer: IOBuffer, *, offset_bytes: int, checksum: bool = True) -> Transferred:
        """Write all of `buffer` to the file; see :meth:`StorageClient.batch_write`."""
        return self.client.batch_write([IORequest(self, offset_bytes, buffer)], checksum=checksum)[0]

    def truncate(self, size_bytes: int) -> ask.FileStat:
        """Set the size of the file and return its attributes."""
        return self.client.request(ask.Truncate(size_bytes, handle=self.handle), ask.FileStat)

    def punch_hole(self, *ranges: tuple[int, int]) -> None:
        """Turn these ranges, each (begin, end), into holes."""
        self.client.request(ask.PunchHole(self.handle, tuple(ranges)), ask.Done)

    def sync(self) -> None:
        """Sync the file to the server's disk, so that the written data survives a power loss."""
        self.client.request(ask.Sync(self.handle), ask.Done)

    def close(self) -> None:
        """Close the file. A failed close can be repeated; a second close, or one after the client's, does nothing."""
        if not self._closed:
            if not self.client.closed:
                self.client.request(ask.Close(self.handle), ask.Done)
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StorageClient:
    """A session with a storage server. It is thread-safe; calls run one after the other.

    Parameters
    ----------
    place : str or Place
        Address of the server: ``HOST:PORT`` or ``unix:PATH``.
    token : str or None
        Token of the store, which is needed over TCP; see :func:`gdrkit.storage.store.read_token`.
    nics : sequence of Nic or None
        NICs that the server can reach, with one queue pair each. The caller owns them. None: this object opens all NICs
        that have an active port.
    timeout_ms : float
        Longest time without an answer of the server, in milliseconds.

    Raises
    ------
    ApiError
        The service failed: EACCES (wrong token), EPROTONOSUPPORT (other version) or EREMOTEIO (no server).
    """

    def __init__(
        self,
        place: str | Place,
        *,
        token: str | None = None,
        nics: Sequence[verbs.Nic] | None = None,
        timeout_ms: float = 30_000,
    ) -> None:
        self._place = place if isinstance(place, Place) else Place.parse(place)
        self._timeout_s = timeout_ms / 1000
        self._lock = threading.RLock()
        self._parts = ReleaseStack()
        self._sequence = itertools.count(1)
        self._closed = False
        self._gone = ""
        self._turn = 0
        try:
            self.nics = self._open_nics() if nics is None else tuple(nics)
            self._cache = RegionCache(self.nics)
            self._parts.push(self._cache.close)
            self._begin(token)
        except BaseException as error:
            self._parts.run_after(error)
            raise
        self._handle = Handle("storage.client")

    @property
    def closed(self) -> bool:
        """Whether the client was closed."""
        return self._closed

    def open(
        self,
        path: str,
        *,
        read: bool = True,
        write: bool = False,
        create: bool = False,
        truncate: bool = False,
        exclusive: bool = False,
        mode: int = 0o644,
    ) -> StorageFile:
        """Open a file of the store, as open(2) does."""
        asked = ask.Open(path, read, write, create, truncate, exclusive, mode)
        return StorageFile(self, self.request(asked, ask.OpenReply))

    def stat(self, path: str) -> ask.FileStat:
        """Return the attributes of a path. A symbolic link is not followed."""
        return self.request(ask.Stat(path), ask.FileStat)

    def list_folder(self, path: str = "") -> tuple[ask.Entry, ...]:
        """Return all names of a folder, sorted by their bytes."""
        found: list[ask.Entry] = []
        while True:
            page = self.request(ask.List(path, found[-1].name if found else None), ask.ListReply)
            found += page.entries
            if not page.more or not page.entries:
                return tuple(found)

    def register(self, memory: bytearray | mmap.mmap | memoryview | DeviceBuffer) -> IOBuffer:
        """Register memory with all NICs for the server. The caller closes the buffer before memory and client."""
        if isinstance(memory, DeviceBuffer):
            return IOBuffer.of_device(memory, self._cache)
        return IOBuffer.of_host(memory, self.nics)

    def batch_read(self, requests: Sequence[IORequest], *, forbid_holes: bool = False) -> list[Transferred]:
        """Fill buffers from files and return the results.

        Raises
        ------
        ApiError
            The first transfer that failed, with the errno of the server. EIO: the file's bytes differ from those
            written. ENODATA: a hole, although holes are forbidden. EREMOTEIO: the server is gone, or could not access
            the memory.
        DataMismatch
            Bytes that arrived in host memory differ from those that the server sent.
        """
        return self._batch(requests, Opcode.READ, forbid_holes=forbid_holes, checksum=True)

    def batch_write(self, requests: Sequence[IORequest], *, checksum: bool = True) -> list[Transferred]:
        """Write buffers to files and return the results.

        With `checksum`, the CPU computes the checksum of host memory, and the server refuses other bytes (EBADMSG). For
        device memory, the server computes the checksum of the bytes that it received.
        """
        return self._batch(requests, Opcode.WRITE, forbid_holes=False, checksum=checksum)

    def statistics(self) -> dict[str, int]:
        """Return the counters of the server."""
        return self.request(ask.Statistics(), ask.StatisticsReply).counters

    def request(self, request: Request, kind: type[_R], *, descriptor: int | None = None) -> _R:
        """Send a request of :mod:`gdrkit.storage.messages` and return its reply, which is a `kind`.

        Raises
        ------
        ApiError
            The server replied with this errno. EREMOTEIO: the server is gone.
        """
        name = type(request).__name__.lower()
        with self._lock:
            self._check_open()
            return self._ask(self._control, name, request, kind, descriptor)

    def close(self) -> None:
        """End the session. The server then closes its files. Buffers must be closed before."""
        with self._lock:
            if self._closed:
                return
            self._parts.run()
            self._closed = True
            self._handle.release()

    def _open_nics(self) -> tuple[verbs.Nic, ...]:
        opened = []
        for info in verbs.list_nics():
            port = next((port.number for port in info.ports if port.active), None)
            if port is not None:
                opened.append(verbs.Nic.open(info.name, port=port))
                self._parts.push(opened[-1].close)
        if not opened:
            message = "no NIC has an active port"
            raise UsageError(message, reason=Reason.NO_DEVICE)
        return tuple(opened)

    def _begin(self, token: str | None) -> None:
        self._pairs: list[verbs.QueuePair] = []
        pairs = self._pairs
        for nic in self.nics:
            queue = nic.completion_queue(depth=1)
            self._parts.push(queue.close)
            pairs.append(nic.queue_pair(queue, sends_max=1, receives_max=1))
            self._parts.push(pairs[-1].close)
        self._control = self._connect()
        lanes = tuple(pair.endpoint().to_dict() for pair in pairs)
        hello = ask.Hello(ask.PROTOCOL_VERSION, f"gdrkit {gdrkit.__version__}", lanes, token)
        answer = self._ask(self._control, "hello", hello, ask.HelloReply)
        if len(answer.lanes) != len(pairs):
            raise storage_error("hello", errno.EREMOTEIO, detail="the server answered with other lanes")
        for pair, lane in zip(pairs, answer.lanes, strict=True):
            access = verbs.Access.REMOTE_READ | verbs.Access.REMOTE_WRITE | verbs.Access.LOCAL_WRITE
            pair.connect(verbs.Endpoint.from_dict(lane), access=access, reads_max=answer.limits.reads_max)
        self.limits, self.chunk_bytes, self.server = answer.limits, answer.chunk_bytes, answer.server
        data = self._connect()
        self._ask(data, "attach", ask.Attach(answer.session), ask.Done)
        self._transfers = Transfers(data.take(), outstanding_max=answer.limits.outstanding_max)
        self._parts.push(self._transfers.close)

    def _connect(self) -> ControlConnection:
        try:
            connection = ControlConnection(self._place.connect(self._timeout_s))
        except OSError as error:
            raise storage_error("connect", errno.EREMOTEIO, detail=str(error), place=str(self._place)) from error
        self._parts.push(connection.close)
        return connection

    def _ask(
        self,
        connection: ControlConnection,
        name: str,
        request: Request,
        kind: type[_R],
        descriptor: int | None = None,
    ) -> _R:
        if self._gone:
            raise storage_error(name, errno.EREMOTEIO, detail=self._gone)
        sequence = next(self._sequence)
        payload = pack_request(request)
        try:
            connection.send(FrameType.CONTROL_REQUEST, payload, sequence=sequence, descriptor=descriptor)
            received = connection.receive(FrameType.CONTROL_REPLY)
            answer = parse_reply(_expected(received, sequence), kind)
        except (OSError, UsageError, BrokenResource) as error:
            # After any failure, replies can no longer be matched to requests, so the connection is unusable.
            self._gone = str(error)
            raise storage_error(name, errno.EREMOTEIO, detail=str(error)) from error
        if isinstance(answer, ask.ErrorReply):
            raise storage_error(name, answer.errno, detail=answer.message)
        return answer

    def _batch(
        self, requests: Sequence[IORequest], opcode: Opcode, *, forbid_holes: bool, checksum: bool
    ) -> list[Transferred]:
        operations: list[Operation] = []
        pieces: list[list[IOBuffer]] = []
        with self._lock:
            self._check_open()
            for request in requests:
                mine = self._pieces(request.buffer, opcode, checksum=checksum)
                pieces.append(mine)
                offset_bytes = request.offset_bytes
                for piece in mine:
                    flags, given = self._flags(piece, opcode, forbid_holes=forbid_holes, checksum=checksum)
                    part = IORequest(request.file, offset_bytes, piece)
                    operations.append(self._operation(part, opcode, flags, given))
                    offset_bytes += piece.length_bytes
            try:
                results = iter(self._transfers.run(operations, timeout_s=self._timeout_s))
            except BaseException:
                # The server may have transfers in progress. Once the queue pairs are in the error state, none of them
                # can arrive.
                for pair in self._pairs:
                    pair.fail()
                raise
            return [
                self._joined(request, mine, [next(results) for _ in mine], opcode)
                for request, mine in zip(requests, pieces, strict=True)
            ]

    def _pieces(self, buffer: IOBuffer, opcode: Opcode, *, checksum: bool) -> list[IOBuffer]:
        most = _PIECE_BYTES
        if opcode is Opcode.WRITE and checksum and not buffer.is_device_memory:
            most = min(most, self.limits.checksum_given_bytes_max)
        most = min(most, self.limits.length_bytes_max)
        return [
            buffer.subrange(offset_bytes=begin, length_bytes=min(most, buffer.length_bytes - begin))
            for begin in range(0, buffer.length_bytes, most)
        ]

    @staticmethod
    def _flags(piece: IOBuffer, opcode: Opcode, *, forbid_holes: bool, checksum: bool) -> tuple[OperationFlag, int]:
        flags = OperationFlag.FORBID_HOLES if forbid_holes else OperationFlag(0)
        if opcode is Opcode.READ:
            if not piece.is_device_memory:
                return flags | OperationFlag.CHECKSUM_WANTED, 0
            # The device zeroes holes itself, so that the zeros need not be sent.
            return flags | (OperationFlag.REPORT_HOLES if piece.can_zero else OperationFlag(0)), 0
        if not checksum:
            return flags, 0
        if piece.is_device_memory:
            return flags | OperationFlag.CHECKSUM_WANTED, 0
        return flags | OperationFlag.CHECKSUM_GIVEN, piece.checksum(length_bytes=piece.length_bytes)

    def _operation(self, part: IORequest, opcode: Opcode, flags: OperationFlag, given: int) -> Operation:
        length_bytes = part.buffer.length_bytes
        check_range(offset_bytes=part.offset_bytes, length_bytes=length_bytes, size_bytes=1 << 63)
        self._turn = (self._turn + 1) % len(self.nics)
        remote = part.buffer.remote(self.nics[self._turn])
        return Operation(
            tag=0,
            handle=part.file.handle,
            file_offset=part.offset_bytes,
            length=length_bytes,
            remote_address=remote.address,
            rkey=remote.rkey,
            lane=self._turn,
            opcode=opcode,
            flags=flags,
            checksum=given,
        )

    def _joined(self, request: IORequest, pieces: list[IOBuffer], results: list[Result], opcode: Opcode) -> Transferred:
        name = opcode.name.lower()
        length_bytes, hole_bytes, checksums, is_whole = 0, 0, [], True
        for piece, result in zip(pieces, results, strict=True):
            if result.result < 0:
                raise storage_error(
                    name,
                    -result.result,
                    handle=request.file.handle,
                    offset_bytes=request.offset_bytes,
                    length_bytes=request.buffer.length_bytes,
                )
            if result.result > piece.length_bytes:
                raise storage_error(name, errno.EREMOTEIO, detail="the server moved more than was asked for")
            for hole in result.holes:
                piece.zero(offset_bytes=hole.offset, length_bytes=hole.length)
                hole_bytes += hole.length
            if result.flags & ResultFlag.CHECKSUM_VALID:
                checksums.append(result.checksum)
                if opcode is Opcode.READ and not piece.is_device_memory:
                    _verify(piece, result)
            # Bytes behind the first short chunk are behind the end of the file.
            length_bytes += result.result if is_whole else 0
            is_whole = is_whole and result.result == piece.length_bytes
        return Transferred(length_bytes, tuple(checksums), hole_bytes)

    def _check_open(self) -> None:
        if self._closed:
            what = "storage client"
            raise ClosedResource(what)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _expected(received: tuple[bytes, int] | None, sequence: int) -> bytes:
    if received is None or received[1] != sequence:
        message = "the server ended the connection" if received is None else "the server lost count"
        raise BrokenResource(message, reason=Reason.PEER_GONE)
    return received[0]


def _verify(piece: IOBuffer, result: Result) -> None:
    found = piece.checksum(length_bytes=result.result)
    if found != result.checksum:
        raise DataMismatch(
            first_offset_bytes=0,
            expected=result.checksum.to_bytes(4, "little"),
            actual=found.to_bytes(4, "little"),
            length_bytes=result.result,
        )
