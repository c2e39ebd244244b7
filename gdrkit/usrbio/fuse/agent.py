"""An agent with a FUSE mount: for a store on another machine, and for programs that know only the mount of 3FS.

Level 5. Below the mount lies what the server has; ``3fs-virt`` really lies in a folder of this user, which the next
agent of the same mount finds again. A publication by a bare link belongs to the process that made it, and goes with it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.children import join_threads
from gdrkit.errors import UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder, process_identity
from gdrkit.storage.client import StorageClient
from gdrkit.usrbio.agent.agent import SILENCE_MS, Agent
from gdrkit.usrbio.agent.client import Peer
from gdrkit.usrbio.agent.files import ByPath
from gdrkit.usrbio.agent.mount import SERVER_SOCKET, Mount, check_mount
from gdrkit.usrbio.agent.refusal import Refused
from gdrkit.usrbio.agent.server import Embedded, Remote
from gdrkit.usrbio.fuse.mount import FuseMount, unmount_stale
from gdrkit.usrbio.fuse.store import ServedFiles

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.usrbio.agent.client import Client
    from gdrkit.usrbio.agent.server import Where
    from gdrkit.usrbio.agent.service import Service

__all__ = ["FuseAgent", "fuse_agent", "private_folder"]

# A request to the storage server has a limit of 30 s.
_END_TIMEOUT_S = 60.0


class LinkClients:
    """The processes that published by bare links; each has what it published until it ends.

    Parameters
    ----------
    service : Service
        Whose clients they become.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._clients: dict[int, tuple[Client, int]] = {}
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._watch, name="agent-processes", daemon=True)
        self._thread.start()

    def publish_link(self, name: str, target: str, *, uid: int, process_id: int) -> None:
        """Publish for a process what its link says."""
        try:
            self._client(uid, _process_of(process_id)).publish(name, target)
        except Refused as error:
            raise OSError(error.errno, os.strerror(error.errno)) from error

    def unpublish_link(self, name: str, *, uid: int, process_id: int) -> None:
        """Take it back; any process of the user may."""
        del uid, process_id  # The kernel lets no other user into the mount.
        with self._lock:
            clients = [client for client, _ in self._clients.values()]
        for client in (*clients, *self._service.clients.values()):
            try:
                client.unpublish(name)
            except Refused as error:
                if error.errno != errno.ENOENT:
                    raise OSError(error.errno, os.strerror(error.errno)) from error
            else:
                return
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def close(self) -> None:
        """Stop watching; what is published goes with the service.

        Raises
        ------
        BrokenResource
            ``TIMEOUT``: the thread still releases what a process had; closing again waits again.
        """
        os.write(self._waker, b"x")
        join_threads([self._thread], timeout_s=_END_TIMEOUT_S)
        for fd in (self._wake, self._waker, *(pidfd for _, pidfd in self._clients.values())):
            os.close(fd)
        self._clients.clear()

    def _client(self, uid: int, process_id: int) -> Client:
        with self._lock:
            known = self._clients.get(process_id)
            if known is not None:
                return known[0]
            try:
                pidfd = os.pidfd_open(process_id)
            except ProcessLookupError as error:
                raise Refused(errno.ESRCH, "the process cannot be seen from here") from error
            client = self._service.open_client(Peer(uid, process_id, process_identity(process_id)))
            self._clients[process_id] = (client, pidfd)
        os.write(self._waker, b".")
        return client

    def _watch(self) -> None:
        while True:
            with self._lock:
                watched = {pidfd: process_id for process_id, (_, pidfd) in self._clients.items()}
            poller = select.poll()
            for fd in (self._wake, *watched):
                poller.register(fd, select.POLLIN)
            ended = [fd for fd, _ in poller.poll()]
            if self._wake in ended and b"x" in os.read(self._wake, 4096):
                return
            for pidfd in ended:
                if pidfd != self._wake:
                    with self._lock:
                        client, _ = self._clients.pop(watched[pidfd])
                    os.close(pidfd)
                    client.release()


class FuseAgent:
    """A running agent and its mount; use it as a context manager."""

    def __init__(
        self, path: Path, where: Where, mount: Mount, *, files: ServedFiles, spin_us: int, silence_ms: int
    ) -> None:
        self.mount = mount
        self._parts = ReleaseStack()
        self._agent = Agent(
            mount,
            where,
            prove=lambda descriptor: ByPath.of_descriptor(descriptor, path),
            spin_us=spin_us,
            one_per_process=True,
            silence_ms=silence_ms,
        )
        self._parts.push(self._agent.close)
        try:
            self._parts.push(files.close)
            links = LinkClients(self._agent.service)
            self._parts.push(links.close)
            fuse = FuseMount(path, store=files, publisher=links, place=mount.virtual)
            self._parts.push(fuse.close)
        except BaseException as error:
            self._parts.run_after(error)
            raise

    def statistics(self) -> dict[str, int]:
        """As :meth:`Agent.statistics`."""
        return self._agent.statistics()

    def close(self) -> None:
        """Unmount, then end the agent."""
        self._parts.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fuse_agent(
    path: Path,
    *,
    store: Path | None = None,
    server: str | None = None,
    token: str | None = None,
    spin_us: int = 50,
    silence_ms: int = SILENCE_MS,
) -> FuseAgent:
    """An agent that mounts.

    Parameters
    ----------
    path : Path
        An empty folder.
    store : Path or None
        The folder of a server of its own.
    server : str or None
        ``HOST:PORT`` of another one; exactly one of both is given.
    token : str or None
        Of that server's store.
    spin_us, silence_ms : int
        As of :class:`Agent`.
    """
    unmount_stale(path)
    resolved = check_mount(path)
    mount = Mount(resolved, place=private_folder(resolved))
    try:
        if store is not None:
            where: Where = Embedded(check_mount(store), mount)
            at = f"unix:{mount.virtual / SERVER_SOCKET}"
        else:
            host, _, port = (server or "").rpartition(":")
            if not host or not port.isdecimal():
                message = f"{server!r} is no HOST:PORT"
                raise UsageError(message)  # noqa: TRY301 - the mount is given back below.
            where = Remote(host.strip("[]"), int(port), token)
            at = str(server)
    except BaseException:
        mount.close()
        raise
    files = ServedFiles(lambda: StorageClient(at, token=token))
    return FuseAgent(resolved, where, mount, files=files, spin_us=spin_us, silence_ms=silence_ms)


def private_folder(mount: Path) -> Path:
    """The folder of this user that belongs to a mount; made if it is not there."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else "/tmp"))  # noqa: S108 - checked below.
    folder = base / f"gdrkit-{os.geteuid()}"
    inner = folder / hashlib.sha256(os.fsencode(mount)).hexdigest()[:16]
    for part in (folder, inner):
        PrivateFolder.below(part).close()
    return inner


def _process_of(thread_id: int) -> int:
    """The process of a thread, by which the kernel names who asks."""
    try:
        status = Path(f"/proc/{thread_id}/status").read_text()
    except OSError as error:
        raise Refused(errno.ESRCH, "the process cannot be seen from here") from error
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))
