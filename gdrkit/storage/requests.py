"""The handler that executes the control requests of a session, and that holds the open files of the session."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

from gdrkit.storage import messages
from gdrkit.storage.store import file_stat

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.storage.control import Request
    from gdrkit.storage.store import FileStore

__all__ = ["RequestHandler"]


class RequestHandler:
    """The handler of the control requests of one session. It owns the native session.

    Attributes
    ----------
    is_attached : bool
        Whether the session has a data connection.
    ended_fd : int
        A descriptor that becomes readable when the native session has ended.
    """

    def __init__(self, store: FileStore, native_session: Any, *, handles_max: int) -> None:  # noqa: ANN401 - native object.
        self._store = store
        self._native_session = native_session
        self._handles_max = handles_max
        self._file_by_handle: dict[int, Any] = {}
        self._last_handle = 0
        self._lock = threading.Lock()
        self._is_ended = False
        self.is_attached = False
        self.ended_fd: int = native_session.ended_fd
        self._handler_by_type: dict[type[Any], Callable[[Any], object]] = {
            messages.Close: self._close,
            messages.Stat: self._stat,
            messages.List: lambda request: store.list(request.path, request.after),
            messages.Mkdir: lambda request: store.mkdir(request.path, request.mode),
            messages.Rmdir: lambda request: store.rmdir(request.path),
            messages.Unlink: lambda request: store.unlink(request.path),
            messages.Rename: lambda request: store.rename(
                request.path, request.new_path, exclusive=request.exclusive, exchange=request.exchange
            ),
            messages.HardLink: lambda request: store.link(request.path, request.new_path),
            messages.Symlink: lambda request: store.symlink(request.path, request.target),
            messages.Readlink: lambda request: messages.ReadlinkReply(store.readlink(request.path)),
            messages.Open: self._open,
            messages.Truncate: self._truncate,
            messages.Sync: self._sync,
            messages.PunchHole: self._punch_hole,
            messages.Statfs: lambda _request: store.statfs(),
            messages.Chmod: lambda request: store.chmod(request.path, request.mode),
            messages.Utimens: lambda request: store.utimens(
                request.path,
                access_time_ns=request.access_time_ns,
                modification_time_ns=request.modification_time_ns,
            ),
            messages.Chown: lambda request: store.chown(request.path, request.uid, request.gid),
            messages.SetUser: store.set_user,
            messages.ReadStatistics: lambda _request: messages.StatisticsReply(dict(store.native.counters())),
        }

    def start(self, data_fd: int) -> None:
        """Serve the data connection. The native session owns `data_fd` from now on."""
        self._native_session.start(data_fd)

    def execute(self, request: Request, descriptors: list[int]) -> object:
        """Execute a request, which came with these descriptors, and return the reply.

        Raises
        ------
        OSError
            The request failed. The client gets the errno.
        """
        with self._lock:
            if self._is_ended:
                raise OSError(errno.ESTALE, "another session has replaced this one")
            return self._execute(request, descriptors)

    def end(self) -> None:
        """End the transfers and requests of this session. Any thread may call this method.

        When the method returns, no transfer is in progress and no request is being executed.
        """
        with self._lock:
            self._is_ended = True
        self._native_session.close()

    def close(self) -> None:
        """End the session and close its files."""
        self.end()
        self._file_by_handle.clear()
        # The handlers refer to this object. This reference cycle would keep the native session and its descriptors
        # until the garbage collector runs.
        self._handler_by_type.clear()

    def _execute(self, request: Request, descriptors: list[int]) -> object:
        if isinstance(request, messages.Adopt):
            if len(descriptors) != 1:
                raise OSError(errno.EBADF, f"adopt needs exactly one descriptor, not {len(descriptors)}")
            return self._add_file(self._store.adopt(descriptors[0], read=request.read, write=request.write))
        handler = self._handler_by_type.get(type(request))
        if handler is None:
            raise OSError(errno.EPROTO, "hello and attach are only valid as the first request of a connection")
        reply = handler(request)
        return messages.Done() if reply is None else reply

    def _add_file(self, file: Any) -> messages.OpenReply:  # noqa: ANN401 - native object.
        """Give an open file the next handle, and return the reply for it."""
        if len(self._file_by_handle) >= self._handles_max:
            raise OSError(errno.EMFILE, f"a session has at most {self._handles_max} open files")
        self._last_handle += 1
        self._file_by_handle[self._last_handle] = file
        self._native_session.add_file(self._last_handle, file)
        return messages.OpenReply(handle=self._last_handle, stat=file_stat(os.fstat(file.fd)))

    def _find_file(self, handle: int) -> Any:  # noqa: ANN401 - native object.
        """Return the file of a handle. Raise OSError (EBADF) if the handle is not open."""
        try:
            return self._file_by_handle[handle]
        except KeyError as error:
            raise OSError(errno.EBADF, f"handle {handle} is not open") from error

    def _find_writable_file(self, handle: int) -> Any:  # noqa: ANN401 - native object.
        """Return the file of a handle. Raise OSError (EBADF) if the file is not open for writing."""
        file = self._find_file(handle)
        if not file.may_write:
            raise OSError(errno.EBADF, f"file {handle} is not open for writing")
        return file

    def _open(self, request: messages.Open) -> messages.OpenReply:
        if not (request.read or request.write) or (request.truncate and not request.write):
            raise OSError(errno.EINVAL, "open needs read or write, and truncate needs write")
        flags = os.O_RDWR if request.read and request.write else os.O_WRONLY if request.write else os.O_RDONLY
        flags |= os.O_CREAT if request.create else 0
        flags |= os.O_EXCL if request.create and request.exclusive else 0
        flags |= os.O_TRUNC if request.truncate else 0
        return self._add_file(self._store.open(request.path, flags=flags, mode=request.mode))

    def _close(self, request: messages.Close) -> None:
        self._find_file(request.handle)
        del self._file_by_handle[request.handle]
        self._native_session.remove_file(request.handle)

    def _stat(self, request: messages.Stat) -> messages.FileStat:
        if request.handle is not None:
            return file_stat(os.fstat(self._find_file(request.handle).fd))
        return self._store.stat(request.path or "")

    def _truncate(self, request: messages.Truncate) -> messages.FileStat:
        if request.handle is not None:
            file = self._find_writable_file(request.handle)
        else:
            file = self._store.open(request.path or "", flags=os.O_RDWR)
        file.truncate(request.size_bytes)
        return file_stat(os.fstat(file.fd))

    def _sync(self, request: messages.Sync) -> None:
        descriptor = self._find_file(request.handle).fd
        if request.data_only:
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def _punch_hole(self, request: messages.PunchHole) -> None:
        file = self._find_writable_file(request.handle)
        for begin, end in request.ranges:
            file.punch(begin, end)
