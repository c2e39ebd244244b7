"""Files that a client registered: which they are, what it may do with them, and by which handles the server knows them.

Level 5. A descriptor proves which file and which right. A server on this host takes the descriptor itself; another one
is given the path, and its answer must be the same inode.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gdrkit.storage import messages as ask
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.session import AgentSession

__all__ = ["ByDescriptor", "ByPath", "Proof", "RegisteredFile", "opened"]


class ByDescriptor:
    """A file and a right to it, proven by a descriptor; owns it.

    Parameters
    ----------
    descriptor : int
        Owned from now on, also when the constructor raises.
    store : Path
        The store's folder.

    Raises
    ------
    Refused
        EBADF: no regular file open for reading or writing. EXDEV: it is not in the store.
    """

    def __init__(self, descriptor: int, store: Path) -> None:
        self.descriptor = descriptor
        try:
            found, mode = _regular(descriptor)
            if found.st_dev != store.stat().st_dev:
                _refuse(errno.EXDEV, "the file is not in the store")
        except BaseException:
            self.close()
            raise
        self.inode = found.st_ino
        self.readable = mode in {os.O_RDONLY, os.O_RDWR}
        self.writable = mode in {os.O_WRONLY, os.O_RDWR}

    def open(self, session: AgentSession) -> ask.OpenReply:
        """Have the server adopt it, which looks whether it is inside the store."""
        adopt = ask.Adopt(read=self.readable, write=self.writable)
        return session.ask(adopt, ask.OpenReply, descriptors=(self.descriptor,))

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class ByPath:
    """A file and a right to it that the caller has established: what a FUSE mount knows of an open file."""

    def __init__(self, path: str, *, inode: int, readable: bool, writable: bool) -> None:
        self.path = path
        self.inode = inode
        self.readable = readable
        self.writable = writable

    def open(self, session: AgentSession) -> ask.OpenReply:
        """Open it by its path."""
        return session.ask(ask.Open(path=self.path, read=self.readable, write=self.writable), ask.OpenReply)

    def close(self) -> None:
        """Nothing to close."""

    @classmethod
    def of_descriptor(cls, descriptor: int, mount: Path) -> ByPath:
        """The proof that a descriptor of a file in a FUSE mount is; owns it.

        Raises
        ------
        Refused
            EBADF: no regular file open for reading or writing. EXDEV: it is not in the mount.
        """
        try:
            found, mode = _regular(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if not path.is_relative_to(mount):
                _refuse(errno.EXDEV, f"{path} is not in {mount}")
        finally:
            os.close(descriptor)
        return cls(
            str(path.relative_to(mount)),
            inode=found.st_ino,
            readable=mode in {os.O_RDONLY, os.O_RDWR},
            writable=mode in {os.O_WRONLY, os.O_RDWR},
        )


Proof = ByDescriptor | ByPath


class RegisteredFile:
    """One file of one client: every registration of it adds its rights, until the last one is taken back."""

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self._count = 0
        # Guarded by the service's lock of files.
        self.is_closing = False
        # With the handle, 0 where it does not hold any more, and the session that has given it.
        self._proofs: list[tuple[Proof, int, AgentSession]] = []

    def add(self, proof: Proof, session: AgentSession) -> None:
        """Register it once more; the proof is owned from now on, unless it raises, and kept if it brings a right.

        Raises
        ------
        Refused
            The server's errno; ESTALE: the path names another file by now.
        """
        is_new = not all(
            any(getattr(known, right) for known, handle, _ in self._proofs if handle) or not getattr(proof, right)
            for right in ("readable", "writable")
        )
        if is_new:
            self._proofs.append((proof, opened(proof, session), session))
        else:
            proof.close()
        self._count += 1

    def take_back(self) -> bool:
        """Take one registration back; True: it was the last one, and :meth:`close` is next. All rights stay until
        then, since nobody says which of several registrations is meant.
        """
        self._count -= 1
        return self._count <= 0

    def reopen(self, session: AgentSession) -> None:
        """Open it at another session; a proof that does not hold there any more goes."""
        kept: list[tuple[Proof, int, AgentSession]] = []
        for proof, _old, _session in self._proofs:
            try:
                kept.append((proof, opened(proof, session), session))
            except Refused:
                # Its operations are answered with the right that is left, or EBADF.
                kept.append((proof, 0, session))
        self._proofs = kept

    def tell(self, loop: AgentLoop, client: int) -> None:
        """Have the loop serve it with the handles and rights of now."""
        reading = next((handle for proof, handle, _ in self._proofs if handle and proof.readable), 0)
        writing = next((handle for proof, handle, _ in self._proofs if handle and proof.writable), 0)
        loop.set_file(
            client,
            self.inode,
            read_handle=reading,
            write_handle=writing,
            readable=bool(reading),
            writable=bool(writing),
        )

    def close(self) -> None:
        """Close it everywhere."""
        proofs, self._proofs = self._proofs, []
        for proof, handle, session in proofs:
            _close(proof, handle, session)


def _regular(descriptor: int) -> tuple[os.stat_result, int]:
    """What a descriptor is, and for what it is open (O_RDONLY, O_WRONLY or O_RDWR)."""
    found = os.fstat(descriptor)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not stat.S_ISREG(found.st_mode) or flags & os.O_PATH:
        _refuse(errno.EBADF, "the descriptor is no regular file that is open for reading or writing")
    return found, flags & os.O_ACCMODE


def _refuse(number: int, message: str) -> NoReturn:
    raise Refused(number, message)


def opened(proof: Proof, session: AgentSession) -> int:
    """The handle of a proven file at the server; Refused with ESTALE: its path names another one by now."""
    reply = proof.open(session)
    if reply.stat.inode != proof.inode:
        session.ask(ask.Close(handle=reply.handle), ask.Done)
        raise Refused(errno.ESTALE, "the path names another file by now")
    return reply.handle


def _close(proof: Proof, handle: int, session: AgentSession) -> None:
    proof.close()
    if handle:
        try:
            session.ask(ask.Close(handle=handle), ask.Done)
        except Refused as error:
            if error.errno != errno.EREMOTEIO:
                raise  # Else the session has ended, and closed the file with it.
