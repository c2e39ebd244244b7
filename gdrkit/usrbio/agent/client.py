"""One client of an agent, and all that is its own: publications, what it has borrowed, files.

Level 5. Its rings can name its own buffers and files alone, and everything goes when it is closed.
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
from gdrkit.storage import messages as ask
from gdrkit.usrbio.agent.files import RegisteredFile, opened
from gdrkit.usrbio.agent.link_names import parse_name
from gdrkit.usrbio.agent.publication import Publication
from gdrkit.usrbio.agent.refusal import Refused, refusal_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.host import ProcessIdentity
    from gdrkit.usrbio.agent.files import Proof
    from gdrkit.usrbio.agent.lending import Lending
    from gdrkit.usrbio.agent.service import Service
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["Client", "Peer"]

_PUBLICATIONS_MAX = 65536
_LINK_TARGET_MAX = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks, by the kernel's word; `identity` is None when the process is gone or cannot be seen from here."""

    uid: int
    process_id: int
    identity: ProcessIdentity | None = None


class Client:
    """One connection to the agent; made by :meth:`Service.open_client`. For use by any number of threads."""

    def __init__(self, service: Service, number: int, peer: Peer) -> None:
        self.number = number
        self.peer = peer
        # By how many ways it is here; changed by the service.
        self.holders = 1
        self._service = service
        self._lock = threading.Lock()
        self._publications: dict[str, Publication] = {}
        self._borrowed: dict[str, Lending] = {}
        self._files: dict[int, RegisteredFile] = {}
        self._closed = False

    def publish(self, name: str, target: str, *, handle: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Register what a link stands for, then make the link; the descriptors are owned from now on.

        Raises
        ------
        Refused
            The verdict, when it is not good; no link is made then.
        """
        left = list(descriptors)
        try:
            with self._lock:
                self._check_open()
                parsed = parse_name(name)
                if name in self._publications:
                    raise Refused(errno.EEXIST, f"{name} is published already")
                if any(known.name.id == parsed.id for known in self._publications.values()):
                    raise Refused(errno.EEXIST, f"the id of {name} is published already")
                if len(self._publications) >= _PUBLICATIONS_MAX:
                    raise Refused(errno.ENOSPC, "one process has too many publications")
                if parsed.device_index is None and (handle or len(left) > 1):
                    raise Refused(errno.EINVAL, "host memory has no handle, and no descriptor but its own")
                if len(target) > _LINK_TARGET_MAX:
                    raise Refused(errno.ENAMETOOLONG, "the target is too long")
                self._service.take_name(name, self)
                try:
                    is_used = bool(handle) or parsed.device_index is None
                    given, left = (left, []) if is_used else ([], left)
                    self._publications[name] = Publication.make(
                        parsed,
                        target,
                        client=self.number,
                        uid=self.peer.uid,
                        owner=self.peer.identity,
                        handle=handle,
                        descriptors=given,
                        nics=self._service.nics,
                        loop=self._service.loop,
                        links=self._service.links,
                        drain=self._service.drain,
                    )
                except BaseException:
                    self._service.give_name(name)
                    raise
                lending = self._publications[name].lending
                if lending is not None:
                    self._service.lend(name, lending)
        except (GdrkitError, OSError) as error:
            raise refusal_of(error) from error
        finally:
            for descriptor in left:
                os.close(descriptor)

    def unpublish(self, name: str) -> None:
        """Take a publication back, after what is in flight of it.

        Raises
        ------
        Refused
            ENOENT: this client has published no such name. EBUSY: operations are in flight and do not end.
        """
        with self._lock:
            if name not in self._publications:
                raise Refused(errno.ENOENT, f"{name} is not published here")
            self._drop(name, remove_shared=False)

    def borrow(self, name: str, target: str) -> None:
        """Let rings name memory that another client of the same user has published, until either side ends it.

        Raises
        ------
        Refused
            ENOENT: no such memory is published. EINVAL: by this name there is another target. EACCES: another user's.
            EEXIST: a buffer of the same id is here. ENOSPC: too many.
        """
        with self._lock:
            self._check_open()
            lending = self._service.lent(name)
            if name not in self._borrowed and len(self._borrowed) >= _PUBLICATIONS_MAX:
                raise Refused(errno.ENOSPC, "one process has borrowed too much")
            try:
                lending.borrow(self.number, uid=self.peer.uid, target=target)
            except OSError as error:
                raise refusal_of(error) from error
            self._borrowed[name] = lending

    def give_back(self, name: str) -> None:
        """End one borrowing of a name, after what is in flight of it.

        Raises
        ------
        Refused
            ENOENT: it is not borrowed here, or its owner has taken it back. EBUSY: operations are in flight.
        """
        with self._lock:
            lending = self._borrowed.get(name)
            if lending is None or not lending.give_back(self.number):
                self._borrowed.pop(name, None)
                raise Refused(errno.ENOENT, f"{name} is not borrowed here")

    def register_file(self, descriptor: int) -> int:
        """Let rings name the file of a descriptor, with the rights that it has; owns it. Gives the inode.

        Raises
        ------
        Refused
            EBADF, EXDEV, ESTALE: no file of the store. EREMOTEIO: there is no server now.
        """
        try:
            return self.register(self._service.prove(descriptor))
        except OSError as error:
            raise refusal_of(error) from error

    def register(self, proof: Proof) -> int:
        """As :meth:`register_file`, by any proof; owns it."""
        try:
            with self._lock:
                self._check_open()
                self._service.server.ask(lambda session: self._add_file(proof, session))
        except BaseException:
            proof.close()
            raise
        return proof.inode

    def _add_file(self, proof: Proof, session: AgentSession) -> None:
        """Open a file at a session; the proof is the file's if nothing is raised."""
        with self._service.files_lock:
            file = self._files.get(proof.inode) or RegisteredFile(proof.inode)
            if file.is_closing:
                raise Refused(errno.EBUSY, "the file is being deregistered")
            file.add(proof, session)
            try:
                file.tell(self._service.loop, self.number)
            except OSError as error:
                file.close()
                raise refusal_of(error) from error
            self._files[proof.inode] = file

    def deregister_file(self, inode: int) -> None:
        """Take one registration of a file back; ENOENT when there is none."""
        with self._lock:
            file = self._files.get(inode)
            if file is None:
                raise Refused(errno.ENOENT, f"no file of inode {inode} is registered here")
            if file.take_back():
                self._drop_file(inode)

    def punch_hole(self, descriptor: int, flags: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Make ranges of a file holes; owns the descriptor, which must be open for writing.

        Raises
        ------
        Refused
            EINVAL: flags, or a range that ends before it begins. EBADF: no right to write. Else the server's.
        """
        try:
            proof = self._service.prove(descriptor)
        except OSError as error:
            raise refusal_of(error) from error
        try:
            if flags or any(begin > end for begin, end in ranges):
                raise Refused(errno.EINVAL, "no flags are defined, and a range ends behind its begin")
            if not proof.writable:
                raise Refused(errno.EBADF, "the descriptor is not open for writing")

            def punch(session: AgentSession) -> None:
                handle = opened(proof, session)
                try:
                    session.ask(ask.PunchHole(handle=handle, ranges=tuple(ranges)), ask.Done)
                finally:
                    session.ask(ask.Close(handle=handle), ask.Done)

            self._service.server.ask(punch)
        finally:
            proof.close()

    def hard_link(self, file: int, folder: int, name: str) -> None:
        """A second name for a file of the store, in a folder of the store; owns both descriptors.

        Raises
        ------
        Refused
            EXDEV: not in the store. EINVAL: no single name. ESTALE: the file was renamed meanwhile. Else the server's.
        """
        try:
            if not name or "/" in name or name in {".", ".."}:
                raise Refused(errno.EINVAL, f"{name!r} is no name in a folder")
            if not stat.S_ISREG(os.fstat(file).st_mode) or not stat.S_ISDIR(os.fstat(folder).st_mode):
                raise Refused(errno.EINVAL, "a regular file and a folder are needed")
            old, new = self._path_of(file), self._path_of(folder)
            new_path = f"{new}/{name}" if new else name
            inode = os.fstat(file).st_ino
            tries = itertools.count(1)

            def link(session: AgentSession) -> None:
                is_repeated = next(tries) > 1
                try:
                    linked = session.ask(ask.HardLink(path=old, new_path=new_path), ask.FileStat)
                except Refused as error:
                    if not is_repeated or error.errno != errno.EEXIST:
                        raise
                    # The request before this one may have made it, and its answer been lost with the session.
                    linked = session.ask(ask.Stat(path=new_path), ask.FileStat)
                    if linked.inode != inode:
                        raise
                if linked.inode != inode:
                    session.ask(ask.Unlink(path=new_path), ask.Done)
                    raise Refused(errno.ESTALE, "the file was renamed meanwhile")

            self._service.server.ask(link)
        except OSError as error:
            raise refusal_of(error) from error
        finally:
            os.close(file)
            os.close(folder)

    def reopen(self, session: AgentSession) -> None:
        """Open all files again at another session."""
        for file in tuple(self._files.values()):
            if file.is_closing:  # The loop has forgotten it, or is about to.
                continue
            file.reopen(session)
            file.tell(self._service.loop, self.number)

    def drop_ring(self, identity: bytes) -> None:
        """A ring is broken: its publication goes, and the client has to make a new one."""
        with self._lock:
            name = next((name for name, known in self._publications.items() if known.name.id == identity), None)
            if name is not None:
                self._drop(name, remove_shared=False)

    def release(self) -> None:
        """End one way that it came, and with the last one everything that it has."""
        if self._service.release_client(self):
            self.close()

    def close(self) -> None:
        """Take back everything: rings first, then buffers and files; a failure leaves the rest for the next call."""
        with self._lock:
            if self._closed and not self._publications and not self._files and not self._borrowed:
                return
            self._closed = True
            parts = ReleaseStack()
            for inode in tuple(self._files):
                parts.push(lambda inode=inode: self._drop_file(inode))  # type: ignore[misc]
            for borrowed in tuple(self._borrowed):
                parts.push(lambda name=borrowed: self._drop_borrowed(name))  # type: ignore[misc]
            rings_last = sorted(self._publications, key=lambda name: self._publications[name].name.ring is not None)
            for name in rings_last:
                parts.push(lambda name=name: self._drop(name, remove_shared=True))  # type: ignore[misc]
            parts.run()
        self._service.forget(self)

    def _drop(self, name: str, *, remove_shared: bool) -> None:
        self._publications[name].close(remove_shared=remove_shared)
        del self._publications[name]
        self._service.give_name(name)

    def _drop_borrowed(self, name: str) -> None:
        self._borrowed[name].give_back(self.number, all_at_once=True)
        del self._borrowed[name]

    def _drop_file(self, inode: int) -> None:
        with self._service.files_lock:
            self._files[inode].is_closing = True
        self._service.drain(
            lambda timeout_ms: self._service.loop.remove_file(self.number, inode, timeout_ms=timeout_ms)
        )
        with self._service.files_lock:
            self._files.pop(inode).close()

    def _path_of(self, descriptor: int) -> str:
        """The path of an open file below the store; the server takes no other."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self._service.root):
            raise Refused(errno.EXDEV, f"{path} is not in the store")
        relative = str(path.relative_to(self._service.root))
        return "" if relative == "." else relative

    def _check_open(self) -> None:
        if self._closed:
            raise Refused(errno.ESHUTDOWN, "the agent is ending")
