"""The files of a store for a FUSE mount: a client of the storage service with buffers of its own.

Level 5. When the server goes, what is open gets EREMOTEIO, and the next request begins a new session.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from gdrkit.errors import ApiError
from gdrkit.storage import messages
from gdrkit.storage.client import StorageClient, StorageFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.storage.iobuffer import IOBuffer

__all__ = ["ServedFiles"]

_R = TypeVar("_R")
_BUFFER_BYTES = 1 << 20
# What is answered to a request that a mount asks for no answer of.
_REPLIES: dict[type, type] = {
    messages.Mkdir: messages.FileStat,
    messages.Rmdir: messages.Done,
    messages.Unlink: messages.Done,
    messages.Rename: messages.Done,
    messages.HardLink: messages.FileStat,
    messages.Symlink: messages.FileStat,
    messages.Truncate: messages.FileStat,
    messages.Sync: messages.Done,
    messages.PunchHole: messages.Done,
    messages.Chmod: messages.FileStat,
    messages.Utimens: messages.FileStat,
}


class ServedFiles:
    """What :class:`~gdrkit.usrbio.fuse.operations.StoreFiles` is, of a server.

    Parameters
    ----------
    connect : callable
        Begins a session.
    """

    def __init__(self, connect: Callable[[], StorageClient]) -> None:
        self._connect = connect
        # One request at a time: the client has one connection, and the buffer is one.
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._files: dict[int, StorageFile] = {}
        self._bytes = bytearray(_BUFFER_BYTES)
        self._client: StorageClient | None = None
        self._buffer: IOBuffer | None = None

    @overload
    def ask(self, request: object) -> object: ...

    @overload
    def ask(self, request: object, kind: type[_R]) -> _R: ...

    def ask(self, request: object, kind: type[object] = object) -> object:
        """Send a control message, and give its reply; handles are those of this object."""
        with self._lock:
            if isinstance(request, messages.Close):
                return self._close(request.handle)
            message = cast("Any", request)
            if getattr(message, "handle", None) is not None:
                message = replace(message, handle=self._file(message.handle).handle)
            wanted = _REPLIES[type(message)] if kind is object else kind
            reply: object = self._on_session(lambda client: client.request(message, wanted))
            if not isinstance(reply, messages.OpenReply) or self._client is None:
                return reply
            number = next(self._numbers)
            self._files[number] = StorageFile(self._client, reply)
            return replace(reply, handle=number)

    def read(self, handle: int, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Read bytes of an open file; fewer at its end."""
        found = []
        while length_bytes:
            part_bytes = min(length_bytes, _BUFFER_BYTES)
            with self._lock:
                moved = self._move(handle, part_bytes, offset_bytes, is_read=True)
                found.append(bytes(memoryview(self._bytes)[:moved]))
            if moved < part_bytes:
                break
            offset_bytes += moved
            length_bytes -= moved
        return b"".join(found)

    def write(self, handle: int, data: bytes, *, offset_bytes: int) -> int:
        """Write to an open file, and say how much was written."""
        for begin in range(0, len(data), _BUFFER_BYTES):
            part = data[begin : begin + _BUFFER_BYTES]
            with self._lock:
                self._bytes[: len(part)] = part
                self._move(handle, len(part), offset_bytes + begin, is_read=False)
        return len(data)

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._end()

    def _move(self, handle: int, length_bytes: int, offset_bytes: int, *, is_read: bool) -> int:
        file = self._file(handle)

        def move(_client: StorageClient) -> int:
            assert self._buffer is not None  # noqa: S101 - it is made with the session.
            part = self._buffer.subrange(offset_bytes=0, length_bytes=length_bytes)
            call = file.read if is_read else file.write
            return call(part, offset_bytes=offset_bytes).length_bytes

        return self._on_session(move)

    def _file(self, handle: int) -> StorageFile:
        found = self._files.get(handle)
        if found is None or found.client is not self._client:
            number = errno.EBADF if found is None else errno.EREMOTEIO
            raise OSError(number, os.strerror(number))
        return found

    def _close(self, handle: int) -> messages.Done:
        file = self._files.pop(handle, None)
        if file is not None and file.client is self._client:
            self._on_session(lambda _client: file.close())
        return messages.Done()

    def _on_session(self, act: Callable[[StorageClient], _R]) -> _R:
        if self._client is None:
            self._client = self._connect()
            self._buffer = self._client.register(self._bytes)
        try:
            return act(self._client)
        except ApiError as error:
            if error.errno == errno.EREMOTEIO:
                self._end()
            raise

    def _end(self) -> None:
        client, self._client = self._client, None
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()
        if client is not None:
            client.close()
