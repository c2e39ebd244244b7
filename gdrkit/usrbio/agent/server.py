"""The storage server of an agent: started with it, or somewhere else; one session at a time, renewed when it breaks.

Level 5. When the data connection ends, the queue pairs are failed before anybody is told that operations ended: until
then the server might still write into memory that its owner takes for its own again.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

from gdrkit.children import join_threads, kill_child
from gdrkit.errors import BrokenResource, GdrkitError, Reason
from gdrkit.usrbio.agent.mount import SERVER_LOCK, SERVER_SOCKET
from gdrkit.usrbio.agent.refusal import Refused
from gdrkit.usrbio.agent.session import AgentSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.memory import Nics
    from gdrkit.usrbio.agent.mount import Mount

__all__ = ["Embedded", "Remote", "Server", "Where"]

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 30
_END_TIMEOUT_S = 20
# Limit for the end of the thread that renews sessions. Each step of that thread has a shorter limit.
_THREAD_TIMEOUT_S = 120.0
_LOCK_POLL_S = 0.02
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.05, 2.0
_RENEWAL_TIMEOUT_S = 10.0
_RENEWALS_A_REQUEST_MAX = 1000

_R = TypeVar("_R")


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
            command = [sys.executable, "-m", "gdrkit.usrbio.agent.embedded", str(self._store), str(self._path)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(lock,), process_group=0
            )
        finally:
            os.close(lock)
        assert self._process.stdout is not None  # noqa: S101 - it was asked for.
        if not select.select([self._process.stdout], [], [], _START_TIMEOUT_S)[0]:
            self._reap()
            message = f"the storage server was not ready within {_START_TIMEOUT_S} s"
            raise BrokenResource(message, reason=Reason.TIMEOUT)
        if not self._process.stdout.readline():
            process = self._process
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            self._reap()
            message = f"the storage server ended with {process.returncode} before it was ready"
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
            # Without a wait for its end, which _reap() does: it may hang for long.
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._is_given_up = True

    def close(self) -> None:
        """End its input, wait for it, and kill it when that takes too long."""
        if self._process is not None:
            assert self._process.stdin is not None  # noqa: S101 - it was asked for.
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
            self._reap()
        self._path.unlink(missing_ok=True)

    def _locked(self) -> int:
        """The lock that the server before holds until it has ended; the next one inherits it."""
        fd = self._mount.open(SERVER_LOCK, os.O_RDWR | os.O_CREAT)
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
        """Kill the server with all that it started and wait for its end; warn when it does not end."""
        process = self._process
        if process is not None:
            if left := kill_child(process, timeout_s=_END_TIMEOUT_S):
                _LOG.warning("the storage server does not end, its disk may hang: %s", left)
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
        reopen: Callable[[AgentSession], None],
        ring_broken: Callable[[int, bytes], None],
        timeout_ms: float = 30000,
    ) -> None:
        self._where = where
        self._loop = loop
        self._nics = nics
        self._reopen = reopen
        self._ring_broken = ring_broken
        self._timeout_ms = timeout_ms
        self._session: AgentSession | None = None
        # Of the last session: a server that was only slow must not act on what it was told before.
        self._secret: str | None = None
        # Ended, and not closed yet: operations of it may be in flight.
        self._ending: AgentSession | None = None
        self._changed = threading.Condition()
        # False: a session has ended, and whether the next one is to be waited for is not known yet, or it is.
        self._is_settled = True
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

    def session(self) -> AgentSession:
        """Return the current session; where the memory of one client ended the last one, wait for the next.

        Raises
        ------
        Refused
            EREMOTEIO: there is none.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled, _RENEWAL_TIMEOUT_S)
            found = self._session
        if found is None:
            raise Refused(errno.EREMOTEIO, f"there is no storage server now{self._last_error}")
        return found

    def ask(self, action: Callable[[AgentSession], _R]) -> _R:
        """Call `action` with the session, and again with the next one where the memory of some client ended it.

        So a request may be carried out twice: `action` makes none whose second time differs from the first.

        Raises
        ------
        Refused
            As `action` does; EREMOTEIO: there is no session.
        """
        for _ in range(_RENEWALS_A_REQUEST_MAX):
            session = self.session()
            try:
                return action(session)
            except Refused as error:
                if error.errno != errno.EREMOTEIO or not self._was_ended_by_memory(session):
                    raise
        raise Refused(errno.EREMOTEIO, "the memory of other clients ends each session with the storage server")

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
            join_threads([self._thread], timeout_s=_THREAD_TIMEOUT_S)
        self._end_session()
        self._abandon()
        self._where.close()

    def _renew(self) -> None:
        self._where.prepare()
        session = AgentSession(
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
        self._renewals += 1
        self._last_error = ""
        self._settle(session)

    def _end_session(self) -> None:
        """Fail the lanes, then tell who waits for what was in flight; after a failure the next call goes on."""
        self._take_session()
        if self._ending is not None:
            if self._is_given_up:
                self._where.give_up()
            self._ending.interrupt()
            self._ending.close()
            self._ending.was_ended_by_memory = self._loop.disconnect()
            is_awaited = self._ending.was_ended_by_memory
            self._ending, self._is_given_up = None, False
            if not is_awaited:
                self._settle(None)

    def _take_session(self) -> None:
        """Let nobody ask the session any more; :meth:`_settle` follows."""
        if self._session is not None:
            with self._changed:
                self._ending, self._session, self._is_settled = self._session, None, False

    def _settle(self, session: AgentSession | None) -> None:
        """Wake who waits for a session: this one, or there is none."""
        with self._changed:
            self._session, self._is_settled = session, True
            self._changed.notify_all()

    def _abandon(self) -> None:
        """No session follows soon: end what waits for one."""
        self._loop.abandon()
        if self._session is None and self._ending is None:
            self._settle(None)

    def _was_ended_by_memory(self, session: AgentSession) -> bool:
        """Whether it has ended, and by the memory of one client; waits until that is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled and self._session is not session, _RENEWAL_TIMEOUT_S)
        return session.was_ended_by_memory

    def _watch(self) -> None:
        pause_s = _BACKOFF_FIRST_S
        while not self._stopping.is_set():
            for kind, client, identity, generation in self._loop.events(100):
                if kind == "ring_broken":
                    self._ring_broken(client, identity)
                elif generation == self._generation and self._session is not None:
                    self._is_given_up |= kind == "silent"
                    self._take_session()
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
                self._abandon()
            except (GdrkitError, OSError, EOFError) as error:
                self._last_error = f": {error}"
                self._abandon()
                self._stopping.wait(pause_s)
                pause_s = min(pause_s * 2, _BACKOFF_MAX_S)
