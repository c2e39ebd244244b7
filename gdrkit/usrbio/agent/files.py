"""The files that a client registered: their access rights, and their handles on the storage server.

A client proves its access to a file by a descriptor of the file. If the storage server runs on this host, the agent
sends the descriptor to the server. To a remote server the agent sends the path. The file that the server opens must
have the same inode as the descriptor.

In a FUSE mount, fstat(2) of a descriptor reports the file that has the path now. This may be another file than the one
that the client opened, so a descriptor proves no access. For a shared agent, the server therefore opens the path with
the rights of the client's user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gdrkit.storage import messages
from gdrkit.storage._native import engine
from gdrkit.usrbio.agent.agent_error import AgentError

if TYPE_CHECKING:
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["DescriptorAccess", "FileAccess", "PathAccess", "RegisteredFile", "open_at_server"]


class DescriptorAccess:
    """The access to a file that a descriptor of the file grants: reading, writing or both.

    Parameters
    ----------
    descriptor : int
        A descriptor of the file. The access owns it from now on, also if the constructor raises.
    store : Path
        The store's folder.

    Raises
    ------
    AgentError
        EBADF: the descriptor is not of a regular file that is open for reading or writing. EXDEV: the file is not in
        the store.
    """

    def __init__(self, descriptor: int, store: Path) -> None:
        self.descriptor = descriptor
        try:
            status, access_mode = _check_regular_file(descriptor)
            if status.st_dev != store.stat().st_dev:
                _refuse(errno.EXDEV, f"the file is not in the store {store}")
        except BaseException:
            self.close()
            raise
        self.inode = status.st_ino
        self.readable = access_mode in {os.O_RDONLY, os.O_RDWR}
        self.writable = access_mode in {os.O_WRONLY, os.O_RDWR}

    def open(self, session: AgentSession) -> messages.OpenReply:
        """Send the descriptor to the server. The server checks whether the file is inside the store."""
        request = messages.Adopt(read=self.readable, write=self.writable)
        return session.call(request, messages.OpenReply, descriptors=(self.descriptor,))

    def open_local(self, _store: Path, _session: AgentSession, _handle: int) -> int:
        """Open the file again for reading, without the flags of the client such as O_DIRECT. Return the descriptor."""
        return _open_for_local_reads(self.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class PathAccess:
    """The access to a file below a FUSE mount. The server opens the file by `path`, with the rights of `user`.

    If `user` is None, the mount is not shared, and the server opens the file with its own rights.
    """

    def __init__(self, path: str, *, inode: int, readable: bool, writable: bool, user: messages.SetUser | None) -> None:
        self.path = path
        self.inode = inode
        self.readable = readable
        self.writable = writable
        self.user = user

    def open(self, session: AgentSession) -> messages.OpenReply:
        """Open the file at the server."""
        request = messages.Open(path=self.path, read=self.readable, write=self.writable)
        return session.call(request, messages.OpenReply, user=self.user)

    def open_local(self, store: Path, session: AgentSession, handle: int) -> int:
        """Open the file of `handle` in the store for reading, and return the descriptor.

        The server has opened the file of `handle` with the rights of the user. Its reply to the request Stat shows that
        the file is still open. As long as it is open, no other file of the device can have its inode number. So the
        opened file is the file of `handle` if the device and the inode number are equal.

        Raises
        ------
        AgentError
            ESTALE: the path now belongs to another file. Other errors have the errno of the server's reply.
        OSError
            The file cannot be opened. ELOOP, EXDEV: another user has replaced a folder of the path by a symbolic link
            or a mount. An open that followed the link or mount could block until a process of that user answers.
        """
        store_fd = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path_fd = engine.open_beneath(store_fd, os.fsencode(self.path), os.O_PATH)
        finally:
            os.close(store_fd)
        try:
            status = os.fstat(path_fd)
            reply = session.call(messages.Stat(handle=handle), messages.FileStat)
            is_same_file = (status.st_dev, status.st_ino) == (store.stat().st_dev, reply.inode)
            if not is_same_file or not stat.S_ISREG(status.st_mode):
                _refuse(errno.ESTALE, "the path now belongs to another file")
            return _open_for_local_reads(path_fd)
        finally:
            os.close(path_fd)

    def close(self) -> None:
        """Do nothing: the access has no descriptor."""

    @classmethod
    def of_descriptor(cls, descriptor: int, mount: Path, user: messages.SetUser | None) -> PathAccess:
        """Return the access of `user` to the file of a descriptor below `mount`, and close the descriptor.

        Raises
        ------
        AgentError
            EBADF: the descriptor is not of a regular file that is open for reading or writing. EXDEV: the file is not
            below `mount`.
        """
        try:
            status, access_mode = _check_regular_file(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            # The path alone proves nothing: in a mount namespace, a user can mount another file system on this path.
            if not path.is_relative_to(mount) or status.st_dev != mount.stat().st_dev:
                _refuse(errno.EXDEV, f"{path} is not below {mount}")
        finally:
            os.close(descriptor)
        return cls(
            str(path.relative_to(mount)),
            inode=status.st_ino,
            readable=access_mode in {os.O_RDONLY, os.O_RDWR},
            writable=access_mode in {os.O_WRONLY, os.O_RDWR},
            user=user,
        )


FileAccess = DescriptorAccess | PathAccess


class RegisteredFile:
    """A file of one client. Every registration adds access rights, and all rights stay until the last deregistration.

    Attributes
    ----------
    inode : int
        Inode of the file. Ring entries name the file by this number.
    is_closing : bool
        Whether the file is being deregistered. ``AgentContext.files_lock`` guards it.
    """

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.is_closing = False
        self._registration_count = 0
        # Each access with a handle of the file at the server, and the session of that handle. The handle is 0 if the
        # session ended before the file was reopened.
        self._open_handles: list[tuple[FileAccess, int, AgentSession]] = []

    def add(self, access: FileAccess, session: AgentSession) -> None:
        """Register the file once more. If `access` grants a new permission, open the file with it.

        The file owns `access` from now on, unless this method raises.

        Raises
        ------
        AgentError
            The error has the errno of the server's reply. ESTALE: the path now belongs to another file.
        """
        grants_new_permission = not all(
            any(getattr(opened_access, permission) for opened_access, handle, _ in self._open_handles if handle)
            or not getattr(access, permission)
            for permission in ("readable", "writable")
        )
        if grants_new_permission:
            self._open_handles.append((access, open_at_server(access, session), session))
        else:
            access.close()
        self._registration_count += 1

    def deregister(self) -> bool:
        """Undo one registration. Return whether no registration is left. Then the caller has to call :meth:`close`.

        Until the last deregistration, the client keeps all access rights, because a deregistration does not name a
        registration.
        """
        self._registration_count -= 1
        return self._registration_count <= 0

    def reopen(self, session: AgentSession) -> None:
        """Open the file at a new session with every access. An access that the server refuses is closed.

        A refused access is not tried again at a later session: the file may have been deleted, and another file may
        have its inode number by then.
        """
        reopened_handles: list[tuple[FileAccess, int, AgentSession]] = []
        for access, _old_handle, _old_session in self._open_handles:
            try:
                reopened_handles.append((access, open_at_server(access, session), session))
            except AgentError as error:
                if error.errno == errno.EREMOTEIO:  # This session has ended. The next session opens the file.
                    reopened_handles.append((access, 0, session))
                else:  # The server refused. Operations now use the rights of the other accesses, or fail with EBADF.
                    access.close()
        self._open_handles = reopened_handles

    def update_loop(self, loop: AgentLoop, client_number: int, local_store: Path | None) -> None:
        """Set the current handles and access rights of the file in the loop.

        `local_store` is the store, if the loop itself may read bytes of the file from the page cache, else None.
        """
        read_handle = next((handle for access, handle, _ in self._open_handles if handle and access.readable), 0)
        write_handle = next((handle for access, handle, _ in self._open_handles if handle and access.writable), 0)
        descriptor = -1 if local_store is None else self._open_local(local_store)
        try:
            loop.set_file(
                client_number,
                self.inode,
                read_handle=read_handle,
                write_handle=write_handle,
                readable=bool(read_handle),
                writable=bool(write_handle),
                file_fd=descriptor,
            )
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open_local(self, local_store: Path) -> int:
        """Return a descriptor for reading, or -1 if no access grants reads, or the file cannot be opened."""
        for access, handle, session in self._open_handles:
            if handle and access.readable:
                with contextlib.suppress(OSError, AgentError):
                    return access.open_local(local_store, session, handle)
        return -1

    def close(self) -> None:
        """Close every access, and its handle at the server."""
        open_handles, self._open_handles = self._open_handles, []
        for access, handle, session in open_handles:
            _close_access(access, handle, session)


def _check_regular_file(descriptor: int) -> tuple[os.stat_result, int]:
    """Return the status and the access mode (O_RDONLY, O_WRONLY or O_RDWR) of the descriptor of a regular file."""
    status = os.fstat(descriptor)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not stat.S_ISREG(status.st_mode) or flags & os.O_PATH:
        _refuse(errno.EBADF, "the descriptor is not of a regular file that is open for reading or writing")
    return status, flags & os.O_ACCMODE


def _open_for_local_reads(descriptor: int) -> int:
    """Open the file of a descriptor again for reading, and return the new descriptor.

    With O_NOATIME, a read does not wait for the disk to store the access time of the file. Only root and the owner of
    the file may use this flag.
    """
    path, flags = f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:
        return os.open(path, flags)


def _refuse(error_number: int, message: str) -> NoReturn:
    raise AgentError(error_number, message)


def open_at_server(access: FileAccess, session: AgentSession) -> int:
    """Open a file at the storage server and return the handle.

    Raises
    ------
    AgentError
        The error has the errno of the server's reply. ESTALE: the path now belongs to another file.
    """
    reply = access.open(session)
    if reply.stat.inode != access.inode:
        session.call(messages.Close(handle=reply.handle), messages.Done)
        raise AgentError(errno.ESTALE, "the path now belongs to another file")
    return reply.handle


def _close_access(access: FileAccess, handle: int, session: AgentSession) -> None:
    access.close()
    if handle:
        try:
            session.call(messages.Close(handle=handle), messages.Done)
        except AgentError as error:
            # EREMOTEIO: the session has ended, so the server has closed the file already.
            if error.errno != errno.EREMOTEIO:
                raise
