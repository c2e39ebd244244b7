"""The storage server of an agent: a child process, or a server that runs elsewhere."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdrkit.children import kill_child
from gdrkit.errors import BrokenResource, Reason
from gdrkit.usrbio.agent.mount import SERVER_LOCK, SERVER_SOCKET

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.usrbio.agent.mount import AgentMount

__all__ = ["EmbeddedServer", "LocalStore", "RemoteServer", "ServerEndpoint"]

_LOG = logging.getLogger(__name__)
# Longest wait until the server is ready, and for a reply while the agent connects.
_START_TIMEOUT_S = 30
# Longest wait for the end of a server.
_END_TIMEOUT_S = 20
# Interval at which the agent tries to lock SERVER_LOCK.
_LOCK_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A store that the agent and its server both read.

    Attributes
    ----------
    path : Path
        The folder of the store.
    generation_fd : int
        Descriptor of the memory in which the server counts new files of checksums.
    """

    path: Path
    generation_fd: int


class ServerEndpoint(Protocol):
    """A storage server to which the agent connects.

    Attributes
    ----------
    token : str or None
        Token of the store, which is needed over TCP.
    takes_descriptors : bool
        Whether the agent can send descriptors of files to the server. Such a server runs on this host as the same user.
    local_store : LocalStore or None
        The store of a server that the agent has started.
    """

    token: str | None
    takes_descriptors: bool
    local_store: LocalStore | None

    def prepare(self) -> None:
        """Start the server if it is not running."""

    def connect(self) -> socket.socket:
        """Return a new connection to the server."""

    def kill_if_child(self) -> None:
        """Kill a server that hangs, if it is a child. Otherwise it could continue later and execute old requests."""

    def close(self) -> None:
        """End the server if it is a child."""


class RemoteServer:
    """A storage server that the agent reaches by TCP. The agent neither starts nor ends it."""

    takes_descriptors = False
    local_store: LocalStore | None = None

    def __init__(self, host: str, port: int, token: str | None) -> None:
        self.host, self.port, self.token = host, port, token

    def prepare(self) -> None:
        """Do nothing: the agent does not start this server."""

    def connect(self) -> socket.socket:
        """Return a new TCP connection."""
        connection = socket.create_connection((self.host, self.port), timeout=_START_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def kill_if_child(self) -> None:
        """Do nothing: the agent cannot kill this server."""

    def close(self) -> None:
        """Do nothing: the agent did not start this server."""


class EmbeddedServer:
    """A storage server that runs as a child process. It ends when the agent ends, even if the agent is killed.

    Parameters
    ----------
    store : Path
        The folder that the server serves.
    mount : AgentMount
        The mount, in which the server's socket is created. The child holds a lock there, so that the server of the next
        agent starts only after the server of a killed agent has ended.
    """

    takes_descriptors = True
    token: str | None = None

    def __init__(self, store: Path, mount: AgentMount) -> None:
        self.local_store: LocalStore | None = None
        self._store = store
        self._mount = mount
        self._socket_path = mount.virtual_folder / SERVER_SOCKET
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    @property
    def process_id(self) -> int | None:
        """The process id of the child, or None if it was not started."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Start the child if it is not running, and wait until it is ready.

        Raises
        ------
        BrokenResource
            TIMEOUT: the child was not ready in time. PEER_GONE: the child ended. BUSY: the server of an earlier agent
            does not end.
        """
        if self._process is not None and not self._is_killed and self._process.poll() is None:
            return
        self._kill()
        lock_fd = self._acquire_lock()
        try:
            self._socket_path.unlink(missing_ok=True)
            module_name = "gdrkit.usrbio.agent.embedded_server"
            local_store = self.local_store or LocalStore(self._store, _create_generation_memory())
            self.local_store = local_store
            generation_fd = local_store.generation_fd
            command = [
                sys.executable,
                "-m",
                module_name,
                str(local_store.path),
                str(self._socket_path),
                str(generation_fd),
            ]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(lock_fd, generation_fd),
                process_group=0,
            )
        finally:
            os.close(lock_fd)
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe.
        # The child prints a line when it is ready.
        if not select.select([self._process.stdout], [], [], _START_TIMEOUT_S)[0]:
            self._kill()
            message = f"the storage server was not ready within {_START_TIMEOUT_S} s"
            raise BrokenResource(message, reason=Reason.TIMEOUT)
        if not self._process.stdout.readline():
            process = self._process
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)
            self._kill()
            message = f"the storage server ended with exit code {process.returncode} before it was ready"
            raise BrokenResource(message, reason=Reason.PEER_GONE)

    def connect(self) -> socket.socket:
        """Return a new connection to the child's socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_START_TIMEOUT_S)
            # A socket address has a length limit. A path through the descriptor of the folder is short.
            connection.connect(f"/proc/self/fd/{self._mount.virtual_folder_fd}/{self._socket_path.name}")
        except BaseException:
            connection.close()
            raise
        return connection

    def kill_if_child(self) -> None:
        """Kill the child. Otherwise a child that is stopped, or waits for a disk, could execute old requests later."""
        if self._process is not None:
            # The child may take long to end. _kill() waits for its end.
            if self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._is_killed = True

    def close(self) -> None:
        """Close the child's standard input, wait until the child ends, and kill it if it does not end."""
        if self._process is not None:
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe.
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
            self._kill()
        self._socket_path.unlink(missing_ok=True)
        local_store, self.local_store = self.local_store, None
        if local_store is not None:
            os.close(local_store.generation_fd)

    def _acquire_lock(self) -> int:
        """Lock SERVER_LOCK and return its descriptor. A child that inherits it holds the lock until the child ends."""
        lock_fd = self._mount.open(SERVER_LOCK, os.O_RDWR | os.O_CREAT)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline_s:
                    os.close(lock_fd)
                    message = "the storage server of an earlier agent does not end"
                    raise BrokenResource(message, reason=Reason.BUSY) from error
                time.sleep(_LOCK_POLL_S)
            else:
                return lock_fd

    def _kill(self) -> None:
        """Kill the child and its process group, and wait for their end. Log a warning if a process does not end."""
        process = self._process
        if process is not None:
            if still_running_text := kill_child(process, timeout_s=_END_TIMEOUT_S):
                _LOG.warning("the storage server does not end, its disk may hang: %s", still_running_text)
            self._process, self._is_killed = None, False
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _create_generation_memory() -> int:
    """Create the memory in which the server counts new checksum files: one page that no process can resize."""
    descriptor = os.memfd_create("gdrkit-sums-generation", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor
