"""A client of an agent, and all objects that it owns: its publications, borrowed iovs and files.

A publication is an I/O ring or an iov, which is a buffer for I/O. The operations in the rings of a client can use only
the client's own iovs, borrowed iovs and files. All these objects are released when the client is closed.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import GdrkitError
from gdrkit.handles import ReleaseStack
from gdrkit.storage import messages
from gdrkit.usrbio.agent.agent_error import AgentError, as_agent_error
from gdrkit.usrbio.agent.files import RegisteredFile, open_at_server
from gdrkit.usrbio.agent.kept import KeptRegistrations
from gdrkit.usrbio.agent.link_names import parse_name
from gdrkit.usrbio.agent.publication import Publication

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host import ProcessIdentity
    from gdrkit.usrbio.agent.borrowers import Borrowers
    from gdrkit.usrbio.agent.context import AgentContext
    from gdrkit.usrbio.agent.files import FileAccess
    from gdrkit.usrbio.agent.link_names import LinkName
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["Client", "PeerProcess"]

_PUBLICATIONS_MAX = 65536
_TARGET_CHARACTERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """The process of a client, as the kernel reports it.

    Attributes
    ----------
    uid : int
        User of the process.
    process_id : int
        Process id, as the agent sees it.
    identity : ProcessIdentity or None
        Identity of the process. None if the process has ended, or if the agent cannot see it.
    user : SetUser or None
        User and groups of the process. If a request of the process names a path, the storage server executes it with
        the rights of this user and these groups. None if the agent is not shared.
    """

    uid: int
    process_id: int
    identity: ProcessIdentity | None = None
    user: messages.SetUser | None = None


class Client:
    """A client of the agent. It can be used by any number of threads.

    Requests that fail raise :class:`~gdrkit.usrbio.agent.agent_error.AgentError`. The function of the C interface that
    sent the request fails with the same errno.

    Attributes
    ----------
    number : int
        Number by which the loop identifies the client.
    process : PeerProcess
        The process of the client.
    connection_count : int
        Number of connections of the client. :class:`Service` updates it.
    """

    def __init__(self, context: AgentContext, number: int, process: PeerProcess) -> None:
        """Create a client with one connection. Callers use :meth:`Service.open_client` instead."""
        self.number = number
        self.process = process
        self.connection_count = 1
        self._context = context
        self._lock = threading.Lock()
        self._publications: dict[str, Publication] = {}
        self._borrowers_by_name: dict[str, Borrowers] = {}
        self._kept_registrations = KeptRegistrations()
        self._files: dict[int, RegisteredFile] = {}
        self._is_closed = False

    def publish(self, name: str, target: str, *, share_handle: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Publish an iov or a ring: register its memory, then create the link. This method owns the descriptors.

        For device memory, `share_handle` is the share handle, if there is one, and `descriptors` belong to it. For host
        memory without a name in /dev/shm, `descriptors` has one descriptor of this memory. For other host memory,
        `descriptors` is empty, and `target` is the path of the memory.

        Raises
        ------
        AgentError
            The publication failed, and no link was created.
        """
        unused_descriptors = list(descriptors)
        try:
            with self._lock:
                link_name = self._check_publication(name, target, share_handle=share_handle, descriptors=descriptors)
                self._context.reserve_name(name, self.number)
                try:
                    # The descriptors of device memory belong to the share handle. Without a handle they are closed
                    # unused. The descriptor of host memory needs no handle.
                    used_descriptors: list[int] = []
                    if share_handle or link_name.device_index is None:
                        used_descriptors, unused_descriptors = unused_descriptors, []
                    publication = Publication.create(
                        link_name,
                        target,
                        client_number=self.number,
                        uid=self.process.uid,
                        owner=self.process.identity,
                        share_handle=share_handle,
                        descriptors=used_descriptors,
                        nics=self._context.nics,
                        memory_quota=self._context.memory_quota,
                        kept_registrations=self._kept_registrations,
                        loop=self._context.loop,
                        links=self._context.links,
                        drain=self._context.drain,
                    )
                except BaseException:
                    self._context.release_name(name)
                    raise
                self._publications[name] = publication
                if publication.borrowers is not None:
                    self._context.add_borrowers(name, publication.borrowers)
        except (GdrkitError, OSError) as error:
            raise as_agent_error(error) from error
        finally:
            for descriptor in unused_descriptors:
                os.close(descriptor)

    def unpublish(self, name: str, *, keep: bool = False) -> bool:
        """Remove a publication after its operations in flight have ended.

        Parameters
        ----------
        name : str
            The name of the link.
        keep : bool
            Whether to keep the registration for the next publication of the same dma-buf or file of /dev/shm.

        Returns
        -------
        bool
            Whether the registration is kept.

        Raises
        ------
        AgentError
            ENOENT: this client has not published the name. EBUSY: operations are in flight and do not end.
        """
        with self._lock:
            if name not in self._publications:
                raise AgentError(errno.ENOENT, f"{name} is not published by this client")
            return self._remove_publication(name, kept_registrations=self._kept_registrations if keep else None)

    def drop_kept_registration(self, descriptor: int) -> None:
        """End the kept registrations of a dma-buf or a file of /dev/shm. The caller still owns the descriptor.

        Raises
        ------
        AgentError
            ENOENT: the agent keeps no registration of this memory. Other errors: the memory could not be
            deregistered.
        """
        try:
            self._kept_registrations.drop(descriptor)
        except (GdrkitError, OSError) as error:
            raise as_agent_error(error) from error

    def drop_kept_host_memory(self) -> None:
        """End the kept registrations of host memory, to release their share of the quota and of the pinned memory."""
        self._kept_registrations.drop_host_memory()

    def borrow(self, name: str, target: str) -> None:
        """Allow operations of the client on an iov that another client of the same user published.

        Raises
        ------
        AgentError
            ENOENT: no iov with this name is published. EINVAL: the link of the iov has another target. EACCES: the iov
            belongs to another user. EEXIST: the client has a buffer with the same id. ENOSPC: the client has borrowed
            too many iovs.
        """
        with self._lock:
            self._check_open()
            borrowers = self._context.find_borrowers(name)
            if name not in self._borrowers_by_name and len(self._borrowers_by_name) >= _PUBLICATIONS_MAX:
                raise AgentError(errno.ENOSPC, f"a client can borrow at most {_PUBLICATIONS_MAX} iovs")
            try:
                borrowers.borrow(self.number, uid=self.process.uid, target=target)
            except OSError as error:
                raise as_agent_error(error) from error
            self._borrowers_by_name[name] = borrowers

    def return_borrowed(self, name: str) -> None:
        """Undo one :meth:`borrow` of an iov. Before the last borrow ends, wait for the operations in flight on the iov.

        Raises
        ------
        AgentError
            ENOENT: the client has not borrowed the name, or the owner has unpublished it. EBUSY: operations are in
            flight and do not end.
        """
        with self._lock:
            borrowers = self._borrowers_by_name.get(name)
            if borrowers is None or not borrowers.return_buffer(self.number):
                self._borrowers_by_name.pop(name, None)
                raise AgentError(errno.ENOENT, f"{name} is not borrowed by this client")

    def register_file(self, descriptor: int) -> int:
        """Allow operations of the client on the file of a descriptor, with the descriptor's rights. Return the inode.

        This method owns the descriptor.

        Raises
        ------
        AgentError
            EBADF, EXDEV or ESTALE: the descriptor is not of a file of the store. EMFILE: the user has registered too
            many files. EBUSY: the file is being deregistered. EREMOTEIO: the agent has no session with the server.
        """
        access = self._open_file_access(descriptor)
        self.add_file(access)
        return access.inode

    def add_file(self, access: FileAccess) -> None:
        """Allow operations of the client on the file of `access`. This method owns `access`.

        Raises
        ------
        AgentError
            See :meth:`register_file`.
        """
        try:
            with self._lock:
                self._check_open()
                self._context.server.with_session(lambda session: self._add_file(access, session))
        except BaseException:
            access.close()
            raise

    def deregister_file(self, inode: int) -> None:
        """Undo one registration of a file. Raise AgentError (ENOENT) if the client has not registered the file."""
        with self._lock:
            file = self._files.get(inode)
            if file is None:
                raise AgentError(errno.ENOENT, f"the client has registered no file with inode {inode}")
            if file.deregister():
                self._remove_file(inode)

    def punch_hole(self, descriptor: int, flags: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Punch holes into a file. This method owns the descriptor, which must be open for writing.

        Parameters
        ----------
        descriptor : int
            A descriptor of the file.
        flags : int
            Must be 0.
        ranges : sequence of (int, int)
            Begin and end of each hole, in bytes.

        Raises
        ------
        AgentError
            EINVAL: `flags` is not 0, or a range ends before it begins. EBADF: the descriptor is not open for writing.
            Other errors have the errno of the server.
        """
        access = self._open_file_access(descriptor)
        try:
            if flags:
                raise AgentError(errno.EINVAL, f"flags must be 0, not {flags}")
            if any(begin > end for begin, end in ranges):
                raise AgentError(errno.EINVAL, "a range ends before it begins")
            if not access.writable:
                raise AgentError(errno.EBADF, "the descriptor is not open for writing")

            def punch_at_server(session: AgentSession) -> None:
                handle = open_at_server(access, session)
                try:
                    session.call(messages.PunchHole(handle=handle, ranges=tuple(ranges)), messages.Done)
                finally:
                    session.call(messages.Close(handle=handle), messages.Done)

            self._context.server.with_session(punch_at_server)
        finally:
            access.close()

    def hard_link(self, file_fd: int, folder_fd: int, name: str) -> None:
        """Create a hard link to a file of the store, in a folder of the store. This method owns both descriptors.

        Raises
        ------
        AgentError
            EPERM: the client has another user than the agent. A descriptor of a folder does not prove that its sender
            may change the folder. EXDEV: the file or the folder is not in the store. EINVAL: `name` is not a single
            path component, or the descriptors are not of a regular file and of a folder. ESTALE: the file was renamed
            meanwhile. Other errors have the errno of the server.
        """
        try:
            if self.process.uid != os.geteuid():
                raise AgentError(errno.EPERM, "a shared agent makes no hard links for other users: call link(2)")
            if not name or "/" in name or name in {".", ".."}:
                raise AgentError(errno.EINVAL, f"the name of a link must be one path component, not {name!r}")
            if not stat.S_ISREG(os.fstat(file_fd).st_mode) or not stat.S_ISDIR(os.fstat(folder_fd).st_mode):
                raise AgentError(errno.EINVAL, "the descriptors must be of a regular file and of a folder")
            path, folder_path = self._find_path_below_root(file_fd), self._find_path_below_root(folder_fd)
            new_path = f"{folder_path}/{name}" if folder_path else name
            inode = os.fstat(file_fd).st_ino
            attempt_numbers = itertools.count(1)
            user = self.process.user

            def link_at_server(session: AgentSession) -> None:
                is_retry = next(attempt_numbers) > 1
                try:
                    request = messages.HardLink(path=path, new_path=new_path)
                    linked_stat = session.call(request, messages.FileStat, user=user)
                except AgentError as error:
                    if not is_retry or error.errno != errno.EEXIST:
                        raise
                    # The previous attempt may have created the link although its reply was lost with the session.
                    linked_stat = session.call(messages.Stat(path=new_path), messages.FileStat, user=user)
                    if linked_stat.inode != inode:
                        raise
                if linked_stat.inode != inode:  # Another file had `path` when the server created the link.
                    session.call(messages.Unlink(path=new_path), messages.Done, user=user)
                    raise AgentError(errno.ESTALE, "the file was renamed meanwhile")

            self._context.server.with_session(link_at_server)
        except OSError as error:
            raise as_agent_error(error) from error
        finally:
            os.close(file_fd)
            os.close(folder_fd)

    def reopen(self, session: AgentSession) -> None:
        """Reopen all files of the client at a new session."""
        for file in tuple(self._files.values()):
            if file.is_closing:  # The loop no longer uses the file, or will soon stop using it.
                continue
            file.reopen(session)
            file.update_loop(self._context.loop, self.number, self._context.local_store)

    def remove_ring(self, ring_id: bytes) -> None:
        """Remove the publication of a broken ring. The client has to publish a new ring."""
        with self._lock:
            name = next(
                (name for name, publication in self._publications.items() if publication.link_name.id == ring_id), None
            )
            if name is not None:
                self._remove_publication(name)

    def has_published(self, name: str) -> bool:
        """Return whether the client has published a name."""
        return name in self._publications

    def published_names(self) -> list[str]:
        """Return the names of the client's publications."""
        return list(self._publications)

    def remove_if_unlinked(self, name: str) -> None:
        """Remove a publication whose link was removed. Do nothing if this client has no such publication.

        Raises
        ------
        AgentError
            EBUSY: operations are in flight and do not end.
        """
        with self._lock:
            publication = self._publications.get(name)
            if publication is not None and not self._context.links.has(name, publication.target):
                self._remove_publication(name)

    def close(self) -> None:
        """Release all objects of the client: rings, iovs, borrowed iovs, files, and kept registrations, in this order.

        If the method raises, the caller may call it again to release the rest.
        """
        with self._lock:
            if self._is_closed and not (
                self._publications or self._files or self._borrowers_by_name or len(self._kept_registrations)
            ):
                return
            self._is_closed = True
            removals = ReleaseStack()  # The removals run in the reverse order.
            removals.push(self._kept_registrations.close)
            for inode in tuple(self._files):
                removals.push(lambda inode=inode: self._remove_file(inode))  # type: ignore[misc]
            for borrowed_name in tuple(self._borrowers_by_name):
                removals.push(lambda name=borrowed_name: self._return_all_borrows(name))  # type: ignore[misc]
            names_with_rings_last = sorted(
                self._publications, key=lambda name: self._publications[name].link_name.ring_options is not None
            )
            for name in names_with_rings_last:
                removals.push(lambda name=name: self._end_publication(name))  # type: ignore[misc]
            removals.run()

    def _check_publication(
        self, name: str, target: str, *, share_handle: bytes, descriptors: Sequence[int]
    ) -> LinkName:
        """Check whether the client may publish a name, and return the parsed name."""
        self._check_open()
        link_name = parse_name(name)
        if name in self._publications:
            raise AgentError(errno.EEXIST, f"{name} is already published")
        if any(publication.link_name.id == link_name.id for publication in self._publications.values()):
            raise AgentError(errno.EEXIST, f"the id of {name} is already published")
        if len(self._publications) >= _PUBLICATIONS_MAX:
            raise AgentError(errno.ENOSPC, f"a client can publish at most {_PUBLICATIONS_MAX} iovs and rings")
        if link_name.device_index is None and (share_handle or len(descriptors) > 1):
            message = (
                "host memory has no share handle and at most one descriptor, "
                f"not a handle of {len(share_handle)} bytes and {len(descriptors)} descriptors"
            )
            raise AgentError(errno.EINVAL, message)
        if len(target) > _TARGET_CHARACTERS_MAX:
            message = f"the target of a link has at most {_TARGET_CHARACTERS_MAX} characters, not {len(target)}"
            raise AgentError(errno.ENAMETOOLONG, message)
        return link_name

    def _open_file_access(self, descriptor: int) -> FileAccess:
        try:
            return self._context.make_file_access(descriptor, self.process.user)
        except OSError as error:
            raise as_agent_error(error) from error

    def _add_file(self, access: FileAccess, session: AgentSession) -> None:
        """Open the file of `access`, and add it to the client. Unless this method raises, the file owns `access`."""
        with self._context.files_lock:
            file = self._files.get(access.inode)
            is_new = file is None
            if file is None:
                self._context.file_quota.charge(self.process.uid)
                file = RegisteredFile(access.inode)
            elif file.is_closing:
                raise AgentError(errno.EBUSY, "the file is being deregistered")
            try:
                self._open_file(file, access, session)
            except BaseException:
                if is_new:
                    self._context.file_quota.release(self.process.uid)
                raise
            self._files[access.inode] = file

    def _open_file(self, file: RegisteredFile, access: FileAccess, session: AgentSession) -> None:
        """Open `file` with `access` at a session, and pass its handles to the loop."""
        file.add(access, session)
        try:
            file.update_loop(self._context.loop, self.number, self._context.local_store)
        except OSError as error:
            file.close()
            raise as_agent_error(error) from error

    def _remove_publication(self, name: str, *, kept_registrations: KeptRegistrations | None = None) -> bool:
        """Remove a publication. Return whether its registration is now in `kept_registrations`."""
        is_kept = self._publications[name].close(remove_shared=False, kept_registrations=kept_registrations)
        self._forget_publication(name)
        return is_kept

    def _end_publication(self, name: str) -> None:
        """Remove a publication and the name of its shared memory, because the client has ended."""
        self._publications[name].close(remove_shared=True)
        self._forget_publication(name)

    def _forget_publication(self, name: str) -> None:
        del self._publications[name]
        self._context.release_name(name)

    def _return_all_borrows(self, name: str) -> None:
        self._borrowers_by_name[name].return_buffer(self.number, all_at_once=True)
        del self._borrowers_by_name[name]

    def _remove_file(self, inode: int) -> None:
        """Remove a file from the loop, wait for its operations in flight, and close it."""
        with self._context.files_lock:
            self._files[inode].is_closing = True
        self._context.drain(
            lambda timeout_ms: self._context.loop.remove_file(self.number, inode, timeout_ms=timeout_ms)
        )
        with self._context.files_lock:
            self._context.file_quota.release(self.process.uid)
            self._files.pop(inode).close()

    def _find_path_below_root(self, descriptor: int) -> str:
        """Return the path of an open file or folder, relative to the root of the store."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._context.root):
            raise AgentError(errno.EXDEV, f"{path} is not in the store")
        relative_path = str(path.relative_to(self._context.root))
        return "" if relative_path == "." else relative_path

    def _check_open(self) -> None:
        if self._is_closed:
            raise AgentError(errno.ESHUTDOWN, "the agent is shutting down")
