"""The files of a store for a FUSE mount: a client of the storage server that reconnects.

If the session with the server ends, requests for open files fail with EREMOTEIO. The next request for a path begins a
new session.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gdrkit.errors import ApiError
from gdrkit.storage import messages
from gdrkit.storage.client import StorageClient, StorageFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.storage.control import Request
    from gdrkit.storage.iobuffer import IOBuffer

__all__ = ["StoreFiles"]

_Result = TypeVar("_Result")
_BUFFER_BYTES = 1 << 20
# An unprivileged user, with which the agent checks that the server can act as another user than root.
_OTHER_USER = messages.SetUser(uid=65534, gid=65534)


class StoreFiles:
    """The files of a store. It can be used by any number of threads, and executes one request at a time.

    Errors are OSError, or errors of gdrkit with an errno.

    Parameters
    ----------
    connect : callable
        A function that returns a new client of the storage server.
    user_of_request : callable or None
        A function that returns the user for whom this thread sends a request. The server uses the paths in requests
        with the rights of this user. If `user_of_request` is None, the server uses its own rights.
    """

    def __init__(
        self, connect: Callable[[], StorageClient], *, user_of_request: Callable[[], messages.SetUser] | None = None
    ) -> None:
        self._connect = connect
        # The function returns the user for whom this thread sends a request, or None if the mount has only one user.
        self.user_of_request: Callable[[], messages.SetUser | None] = user_of_request or (lambda: None)
        # The user that was last sent to the server in this session.
        self._session_user: messages.SetUser | None = None
        # One request at a time uses the client's connection and the buffer.
        self._lock = threading.Lock()
        self._next_handles = itertools.count(1)
        # The open files by the handles of this object.
        self._files: dict[int, StorageFile] = {}
        self._buffer_memory = bytearray(_BUFFER_BYTES)
        self._client: StorageClient | None = None
        self._buffer: IOBuffer | None = None

    def request(self, request: Request, reply_type: type[_Result]) -> _Result:
        """Send a request of :mod:`gdrkit.storage.messages` and return its reply, which is a `reply_type`.

        The handles in requests and replies are valid in this object; the server has other handles.
        """
        message = cast("Any", request)
        user = None
        if getattr(message, "path", None) is not None:
            user = self.user_of_request()
        with self._lock:
            if getattr(message, "handle", None) is not None:
                message = replace(message, handle=self._find_file(message.handle).handle)
            reply: Any = self._call_with_client(lambda client: self._send_request(client, user, message, reply_type))
            if isinstance(reply, messages.OpenReply):
                assert self._client is not None  # noqa: S101 - it has just replied.
                handle = next(self._next_handles)
                self._files[handle] = StorageFile(self._client, reply)
                reply = replace(reply, handle=handle)
            return cast("_Result", reply)

    def check_impersonation(self) -> None:
        """Check that the server can act as other users.

        Raises
        ------
        ApiError
            EPERM: the server does not run as root, or has no CAP_SETUID. EREMOTEIO: the server is of a version that
            does not know the request.
        """
        with self._lock:
            self._call_with_client(lambda client: client.request(_OTHER_USER, messages.Done))

    def read(self, handle: int, *, offset_bytes: int, length_bytes: int) -> bytes:
        """Read bytes of an open file. At the end of the file, the result is shorter."""
        chunks = []
        while length_bytes:
            chunk_bytes = min(length_bytes, _BUFFER_BYTES)
            with self._lock:
                read_bytes = self._transfer(handle, chunk_bytes, offset_bytes, is_read=True)
                chunks.append(bytes(memoryview(self._buffer_memory)[:read_bytes]))
            if read_bytes < chunk_bytes:
                break
            offset_bytes += read_bytes
            length_bytes -= read_bytes
        return b"".join(chunks)

    def write(self, handle: int, data: bytes, *, offset_bytes: int) -> int:
        """Write all of `data` to an open file, and return its length."""
        for begin in range(0, len(data), _BUFFER_BYTES):
            chunk = data[begin : begin + _BUFFER_BYTES]
            with self._lock:
                self._buffer_memory[: len(chunk)] = chunk
                self._transfer(handle, len(chunk), offset_bytes + begin, is_read=False)
        return len(data)

    def remove_tree(self, path: str, mode: int) -> None:
        """Remove a file, or a folder with its contents. `mode` has the file type of `path`."""
        if not stat.S_ISDIR(mode):
            self.request(messages.Unlink(path=path), messages.Done)
            return
        while True:
            reply = self.request(messages.List(path=path), messages.ListReply)
            for entry in reply.entries:
                self.remove_tree(f"{path}/{entry.name}", entry.kind)
            if not reply.more:
                break
        self.request(messages.Rmdir(path=path), messages.Done)

    def close_file(self, handle: int) -> None:
        """Close an open file. Do nothing for a file of an earlier session, which the server has already closed."""
        with self._lock:
            file = self._files.pop(handle, None)
            if file is not None and file.client is self._client:
                try:
                    self._call_with_client(lambda _client: file.close())
                except ApiError as error:
                    # EREMOTEIO: the session has ended, so the server has closed the file already.
                    if error.errno != errno.EREMOTEIO:
                        raise

    def close(self) -> None:
        """End the session."""
        with self._lock:
            self._end_session()

    def _send_request(
        self, client: StorageClient, user: messages.SetUser | None, request: Request, reply_type: type[_Result]
    ) -> _Result:
        """Send a request with the rights of `user`. None: the request names no path, or the mount has only one user."""
        if user is not None and user != self._session_user:
            client.request(user, messages.Done)
            self._session_user = user
        return client.request(request, reply_type)

    def _transfer(self, handle: int, length_bytes: int, offset_bytes: int, *, is_read: bool) -> int:
        file = self._find_file(handle)

        def transfer_chunk(_client: StorageClient) -> int:
            assert self._buffer is not None  # noqa: S101 - it is registered when the session begins.
            buffer = self._buffer.subrange(offset_bytes=0, length_bytes=length_bytes)
            read_or_write = file.read if is_read else file.write
            return read_or_write(buffer, offset_bytes=offset_bytes).length_bytes

        return self._call_with_client(transfer_chunk)

    def _find_file(self, handle: int) -> StorageFile:
        """Return the open file of a handle. Raise EBADF if there is none, and EREMOTEIO if its session has ended."""
        file = self._files.get(handle)
        if file is None or file.client is not self._client:
            error_number = errno.EBADF if file is None else errno.EREMOTEIO
            raise OSError(error_number, os.strerror(error_number))
        return file

    def _call_with_client(self, action: Callable[[StorageClient], _Result]) -> _Result:
        """Call `action` with a connected client and return its result. If the server is gone, end the session."""
        if self._client is None:
            self._client = self._connect()
            self._buffer = self._client.register(self._buffer_memory)
        try:
            return action(self._client)
        except ApiError as error:
            if error.errno == errno.EREMOTEIO:
                self._end_session()
            raise

    def _end_session(self) -> None:
        client, self._client = self._client, None
        self._session_user = None
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()
        if client is not None:
            client.close()
