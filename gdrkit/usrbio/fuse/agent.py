"""An agent in FUSE mode: for a store on another machine, and for programs that know only the mount of 3FS.

The mount shows the files of the storage server. The real folder ``3fs-virt`` is in a private folder of the user,
where the next agent of this mount finds it. An iov that a process publishes by a symbolic link is removed when the
process ends.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder
from gdrkit.storage.client import StorageClient
from gdrkit.usrbio.agent.agent import SILENCE_MS, SPIN_US, Agent
from gdrkit.usrbio.agent.files import PathAccess
from gdrkit.usrbio.agent.mount import SERVER_SOCKET, AgentMount, check_mount
from gdrkit.usrbio.agent.server import EmbeddedServer, RemoteServer
from gdrkit.usrbio.fuse.link_clients import LinkClients
from gdrkit.usrbio.fuse.mount import FuseMount, unmount_stale
from gdrkit.usrbio.fuse.store import StoreFiles

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.usrbio.agent.server import ServerEndpoint

__all__ = ["FuseAgent", "fuse_agent", "private_folder"]


class FuseAgent:
    """A running agent and its FUSE mount. Use it as a context manager. :func:`fuse_agent` creates it.

    Attributes
    ----------
    mount : AgentMount
        The mount and the agent's private folder.
    """

    def __init__(
        self,
        path: Path,
        endpoint: ServerEndpoint,
        mount: AgentMount,
        *,
        store: StoreFiles,
        spin_us: int,
        silence_ms: int,
    ) -> None:
        self.mount = mount
        self._on_close = ReleaseStack()
        self._agent = Agent(
            mount,
            endpoint,
            file_access=lambda descriptor: PathAccess.of_descriptor(descriptor, path),
            spin_us=spin_us,
            is_one_client_per_process=True,
            silence_ms=silence_ms,
        )
        self._on_close.push(self._agent.close)
        try:
            self._on_close.push(store.close)
            links = LinkClients(self._agent.service)
            self._on_close.push(links.close)
            fuse = FuseMount(path, store=store, links=links, real_folder=mount.virtual_folder)
            self._on_close.push(fuse.close)
        except BaseException as error:
            self._on_close.run_after(error)
            raise

    def statistics(self) -> dict[str, int]:
        """Return the counters; see :meth:`Agent.statistics`."""
        return self._agent.statistics()

    def close(self) -> None:
        """Unmount, then end the agent. After an error, close again."""
        self._on_close.run()

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
    spin_us: int = SPIN_US,
    silence_ms: int = SILENCE_MS,
) -> FuseAgent:
    """Mount the files of a storage server on a folder, and start the agent of the mount.

    Parameters
    ----------
    path : Path
        An empty folder.
    store : Path or None
        The store that a storage server serves as a child process of the agent.
    server : str or None
        ``HOST:PORT`` of a running storage server. Exactly one of `store` and `server` is needed.
    token : str or None
        Token of that server's store.
    spin_us, silence_ms : int
        See :class:`~gdrkit.usrbio.agent.agent.Agent`.

    Raises
    ------
    UsageError
        `path` or `store` is not a folder, or `server` is not ``HOST:PORT``.
    SetupMissing, ApiError, GdrkitError
        The mount or the agent failed; see :class:`FuseMount` and :class:`~gdrkit.usrbio.agent.agent.Agent`.
    """
    unmount_stale(path)
    resolved = check_mount(path)
    mount = AgentMount(resolved, agent_folder=private_folder(resolved))
    try:
        if store is not None:
            endpoint: ServerEndpoint = EmbeddedServer(check_mount(store), mount)
            address = f"unix:{mount.virtual_folder / SERVER_SOCKET}"
        else:
            host, _, port = (server or "").rpartition(":")
            if not host or not port.isdecimal():
                message = f"server must be HOST:PORT, not {server!r}"
                raise UsageError(message)  # noqa: TRY301 - the mount is closed below.
            endpoint = RemoteServer(host.strip("[]"), int(port), token)
            address = str(server)
    except BaseException:
        mount.close()
        raise
    files = StoreFiles(lambda: StorageClient(address, token=token))
    return FuseAgent(resolved, endpoint, mount, store=files, spin_us=spin_us, silence_ms=silence_ms)


def private_folder(mount: Path) -> Path:
    """Return the private folder of this user for a mount. Create it if it does not exist."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else "/tmp"))  # noqa: S108 - checked below.
    user_folder = base / f"gdrkit-{os.geteuid()}"
    mount_folder = user_folder / hashlib.sha256(os.fsencode(mount)).hexdigest()[:16]
    for folder in (user_folder, mount_folder):
        PrivateFolder.below(folder).close()
    return mount_folder
