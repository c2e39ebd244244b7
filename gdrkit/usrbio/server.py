"""The storage server of an agent: started with it, or somewhere else; one session at a time, renewed when it breaks.

Level 5. When the data connection ends, the queue pairs are failed before anybody is told that operations ended: until
then the server might still write into memory that its owner takes for its own again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Protocol

from gdrkit.errors import BrokenResource, GdrkitError, Reason
from gdrkit.usrbio.mount import SERVER_SOCKET
from gdrkit.usrbio.refusal import Refused
from gdrkit.usrbio.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.usrbio._agent_loop import AgentLoop
    from gdrkit.usrbio.memory import Nics
    from gdrkit.usrbio.mount import Mount

__all__ = ["Embedded", "Remote", "Server", "Where"]

_START_TIMEOUT_S = 30
_END_TIMEOUT_S = 20
_LOCK_POLL_S = 0.02
_SERVER_LOCK = "server.lock"
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 2.0


class Where(Protocol):
    """A storage server that can be connected to."""

    token: str | None
    # Whether files go there as descriptors, since it is on this host and of this user.
    takes_descriptors: bool

    def prepare(self) -> None:
        """Have it running."""

    def connect(self) -> socket.socket:
        """A new connection."""

    def give_up(self) -> None:
        """It hangs: end it if it is ours, so that nothing that it was told before happens later."""

    def close(self) -> None:
        """Have it end if it is ours."""


class Remote:
    """A server that somebody else runs."""

    takes_descriptors = False

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self.host, self.port, self.token = host, port, token

    def prepare(self) -> None:
        """Nothing: it runs or it does not."""

    def connect(self) -> socket.socket:
        """A TCP connection."""
        made = socket.create_connection((self.host, self.port), timeout=_START_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def give_up(self) -> None:
        """Nothing: it is not ours."""

    def close(self) -> None:
        """Nothing: it is not ours."""


class Embedded:
    """A server that runs as a child; it ends when its standard input does, so at the latest with this process.

    Parameters
    ----------
    store : Path
        The folder that it serves.
    mount : Mount
        In whose folder its socket lies. The child holds a lock there, so that the server of an agent that was killed
        has ended before the next one starts.
    """

    takes_descriptors = True
    token: str | None = None

    def __init__(self, store: Path, mount: Mount) -> None:
        self._store = store
        self._mount = mount
        self._path = mount.virtual / SERVER_SOCKET
        self._process: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    @property
    def process_id(self) -> int | None:
        """Of the child."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start it if it does not run, and wait until it says that it is ready."""
        if self._process is not None and not self._is_given_up and self._process.poll() is None:
            return
        self._reap()
        lock = self._locked()
        try:
            self._path.unlink(missing_ok=True)
            command = [sys.executable, "-m", "gdrkit.usrbio.embedded", str(self._store), str(self._path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock,))
        finally:
            os.close(lock)
        assert self._process.stdout is not None  # noqa: S101 - it was asked for.
        if not self._process.stdout.readline():
            code = self._process.wait(_END_TIMEOUT_S)
            self._reap()
            message = f"the storage server ended with {code} before it was ready"
            raise BrokenResource(message, reason=Reason.PEER_GONE)

    def connect(self) -> socket.socket:
        """A connection to its socket."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.settimeout(_START_TIMEOUT_S)
            # By the folder's descriptor: a path of any length fits into an address.
            made.connect(f"/proc/self/fd/{self._mount.folder}/{self._path.name}")
        except BaseException:
            made.close()
            raise
        return made

    def give_up(self) -> None:
        """Kill it: a server that hangs, stopped or waiting for a disk, would go on where it was some day."""
        if self._process is not None:
            self._process.kill()
            self._is_given_up = True

    def close(self) -> None:
        """End its input, wait for it, and kill it when that takes too long."""
        if self._process is not None:
            assert self._process.stdin is not None  # noqa: S101 - it was asked for.
            self._process.stdin.close()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._reap()
        self._path.unlink(missing_ok=True)

    def _locked(self) -> int:
        """The lock that the server before holds until it has ended; the next one inherits it."""
        fd = self._mount.open(_SERVER_LOCK, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    os.close(fd)
                    message = "the storage server of an earlier agent does not end"
                    raise BrokenResource(message, reason=Reason.BUSY) from error
                time.sleep(_LOCK_POLL_S)
            else:
                return fd

    def _reap(self) -> None:
        process = self._process
        if process is not None:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                message = "the storage server was killed and does not end: its disk may hang"
                raise BrokenResource(message, reason=Reason.BUSY) from error
            self._process, self._is_given_up = None, False
            for end in (process.stdin, process.stdout):
                if end is not None:
                    end.close()


class Server:
    """Where an agent's operations go.

    Parameters
    ----------
    where : Where
        Which server.
    loop : AgentLoop
        Gets the data connection of each session.
    nics : Nics
        What a lane is made for.
    reopen : callable
        Called with a new session before any operation goes there, to open again what was open.
    ring_broken : callable
        Called with client and id of a ring that the loop serves no more.
    """

    def __init__(
        self,
        where: Where,
        loop: AgentLoop,
        nics: Nics,
        *,
        reopen: Callable[[Session], None],
        ring_broken: Callable[[int, bytes], None],
        timeout_ms: float = 30000,
    ) -> None:
        self._where = where
        self._loop = loop
        self._nics = nics
        self._reopen = reopen
        self._ring_broken = ring_broken
        self._timeout_ms = timeout_ms
        self._session: Session | None = None
        # Of the last session: a server that was only slow must not act on what it was told before.
        self._secret: str | None = None
        # Ended, and not closed yet: operations of it may be in flight.
        self._ending: Session | None = None
        self._is_given_up = False
        self._generation = 0
        self._renewals = -1
        self._last_error = ""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def takes_descriptors(self) -> bool:
        """Whether files go to it as descriptors."""
        return self._where.takes_descriptors

    @property
    def renewals(self) -> int:
        """How often a session was renewed."""
        return self._renewals

    def start(self) -> None:
        """Begin the first session; a failure is the caller's."""
        self._renew()
        self._thread = threading.Thread(target=self._watch, name="agent-server", daemon=True)
        self._thread.start()

    def session(self) -> Session:
        """The session of now.

        Raises
        ------
        Refused
            EREMOTEIO: there is none.
        """
        found = self._session
        if found is None:
            raise Refused(errno.EREMOTEIO, f"there is no storage server now{self._last_error}")
        return found

    def interrupt(self) -> None:
        """The server answers no more: end the session, and what is in flight with it."""
        found = self._session
        if found is not None:
            self._is_given_up = True
            found.interrupt()

    def close(self) -> None:
        """End the session, then the server if it is ours."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._end_session()
        self._where.close()

    def _renew(self) -> None:
        self._where.prepare()
        session = Session(
            self._where.connect,
            self._nics,
            token=self._where.token,
            timeout_ms=self._timeout_ms,
            replaces=self._secret,
        )
        self._secret = session.secret
        try:
            self._reopen(session)
            self._generation += 1
            self._loop.connect(os.dup(session.data.fileno()), lanes=session.lanes, generation=self._generation)
        except BaseException:
            session.close()
            raise
        self._session = session
        self._renewals += 1
        self._last_error = ""

    def _end_session(self) -> None:
        """Fail the lanes, then tell who waits for what was in flight; after a failure the next call goes on."""
        if self._session is not None:
            self._ending, self._session = self._session, None
        if self._ending is not None:
            if self._is_given_up:
                self._where.give_up()
            self._ending.interrupt()
            self._ending.close()
            self._loop.disconnect()
            self._ending, self._is_given_up = None, False

    def _watch(self) -> None:
        pause_s = _BACKOFF_FIRST_S
        while not self._stopping.is_set():
            for kind, client, identity, generation in self._loop.events(100):
                if kind == "ring_broken":
                    self._ring_broken(client, identity)
                elif generation == self._generation and self._session is not None:
                    self._is_given_up |= kind == "silent"
                    self._ending, self._session = self._session, None
            if self._session is not None:
                pause_s = _BACKOFF_FIRST_S
                continue
            try:
                self._end_session()
                self._renew()
            except TimeoutError as error:
                # It takes connections and does not answer.
                self._where.give_up()
                self._last_error = f": {error}"
            except (GdrkitError, OSError, EOFError) as error:
                self._last_error = f": {error}"
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 2, _BACKOFF_MAX_S)
