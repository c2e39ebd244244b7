"""An agent in FUSE mode: for a store on another machine, and for programs that know only the mount of 3FS.

The mount shows the files of the storage server. Its folder ``3fs-virt`` is stored in a private folder of the user. If
the agent is killed, this folder stays, and the next agent of the mount cleans it up. If a process publishes an iov by a
symbolic link, the agent removes the iov when the process ends.

An agent that runs as root can share its mount with all users. For each request the kernel reports the user, and the
storage server executes the request with the rights of this user.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import ApiError, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder
from gdrkit.storage import messages
from gdrkit.storage.client import StorageClient
from gdrkit.usrbio.agent.agent import SERVER_TIMEOUT_MS, SPIN_US, Agent, check_may_share
from gdrkit.usrbio.agent.files import PathAccess
from gdrkit.usrbio.agent.mount import SERVER_SOCKET, AgentMount, check_mount
from gdrkit.usrbio.agent.server import EmbeddedServer, RemoteServer
from gdrkit.usrbio.fuse._mfusepy import request_sender
from gdrkit.usrbio.fuse.link_clients import LinkClients
from gdrkit.usrbio.fuse.mount import FuseMount, unmount_stale
from gdrkit.usrbio.fuse.store import StoreFiles

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.usrbio.agent.server import ServerEndpoint

__all__ = ["FuseAgent", "fuse_agent", "private_folder"]

# Mode of the folders that the clients of a shared agent enter on the way to its socket. Only root can list them.
_SHARED_FOLDER_MODE = 0o711


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
        server_timeout_ms: int,
        user_memory_quota_bytes: int | None = None,
        may_read_locally: bool = True,
    ) -> None:
        self.mount = mount
        self._on_close = ReleaseStack()
        self._agent = Agent(
            mount,
            endpoint,
            make_file_access=lambda descriptor, user: PathAccess.of_descriptor(descriptor, path, user),
            spin_us=spin_us,
            is_one_client_per_process=True,
            server_timeout_ms=server_timeout_ms,
            user_memory_quota_bytes=user_memory_quota_bytes,
            may_read_locally=may_read_locally,
        )
        self._on_close.push(self._agent.close)
        try:
            self._on_close.push(store.close)
            if mount.is_shared:
                _require_impersonation(store)
            link_clients = LinkClients(self._agent.service)
            self._on_close.push(link_clients.close)
            fuse_mount = FuseMount(
                path,
                store=store,
                link_clients=link_clients,
                agent_folder=mount.virtual_folder,
                is_shared=mount.is_shared,
            )
            self._on_close.push(fuse_mount.close)
        except BaseException as error:
            self._on_close.run_after(error)
            raise

    def statistics(self) -> dict[str, int]:
        """Return the counters; see :meth:`Agent.statistics`."""
        return self._agent.statistics()

    def close(self) -> None:
        """Unmount, then end the agent. If close() raises, the caller may call it again to release the rest."""
        self._on_close.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def fuse_agent(
    path: Path,
    *,
    store: Path | None = None,
    server: str | None = None,
    token: str | None = None,
    spin_us: int = SPIN_US,
    server_timeout_ms: int = SERVER_TIMEOUT_MS,
    is_shared: bool = False,
    user_memory_quota_bytes: int | None = None,
    may_read_locally: bool = True,
) -> FuseAgent:
    """Mount the files of a storage server on a folder, and start the agent of the mount.

    Parameters
    ----------
    path : Path
        An empty folder.
    store : Path or None
        Folder of a store. The agent starts a storage server for it as a child process.
    server : str or None
        ``HOST:PORT`` of a running storage server. Exactly one of `store` and `server` is needed.
    token : str or None
        Token of that server's store.
    spin_us, server_timeout_ms : int
        See :class:`~gdrkit.usrbio.agent.agent.Agent`.
    is_shared : bool
        Whether to serve all users of the machine. The agent and the storage server must then run as root.
    user_memory_quota_bytes, may_read_locally
        See :class:`~gdrkit.usrbio.agent.agent.Agent`.

    Raises
    ------
    UsageError
        Both `store` and `server` were given, or neither. `path` or `store` is not a folder, or `server` is not
        ``HOST:PORT``. The agent or its storage server does not run as root, and `is_shared` is set.
    SetupMissing, ApiError, GdrkitError
        The mount or the agent failed; see :class:`FuseMount` and :class:`~gdrkit.usrbio.agent.agent.Agent`.
    """
    if (store is None) == (server is None):
        given_count = "neither" if store is None else "both"
        message = f"an agent needs either a store or a server, but got {given_count}: store {store}, server {server}"
        raise UsageError(message, what_to_do="name the folder of a store, or HOST:PORT of a running storage server")
    if is_shared:
        check_may_share()
    unmount_stale(path)
    resolved_path = check_mount(path)
    mount = AgentMount(
        resolved_path, agent_folder=private_folder(resolved_path, is_shared=is_shared), is_shared=is_shared
    )
    try:
        if store is not None:
            endpoint: ServerEndpoint = EmbeddedServer(check_mount(store), mount)
            address = f"unix:{mount.virtual_folder / SERVER_SOCKET}"
        else:
            host, _, port = str(server).rpartition(":")
            if not host or not port.isdecimal():
                message = f"server must be HOST:PORT, not {server!r}"
                raise UsageError(message)  # noqa: TRY301 - the mount is closed below.
            endpoint = RemoteServer(host.strip("[]"), int(port), token)
            address = str(server)
    except BaseException:
        mount.close()
        raise
    store_files = StoreFiles(
        lambda: StorageClient(address, token=token), user_of_request=_find_requesting_user if is_shared else None
    )
    return FuseAgent(
        resolved_path,
        endpoint,
        mount,
        store=store_files,
        spin_us=spin_us,
        server_timeout_ms=server_timeout_ms,
        user_memory_quota_bytes=user_memory_quota_bytes,
        may_read_locally=may_read_locally,
    )


def private_folder(mount: Path, *, is_shared: bool = False) -> Path:
    """Return the private folder of this user for a mount. Create it if it does not exist.

    The folder of a shared agent is not private: all users can enter it, and only root can list it.
    """
    if is_shared:
        user_folder = Path("/run/gdrkit-shared")
    else:
        base_folder = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else "/tmp")  # noqa: S108 - checked below.
        user_folder = Path(base_folder) / f"gdrkit-{os.geteuid()}"
    mount_folder = user_folder / hashlib.sha256(os.fsencode(mount)).hexdigest()[:16]
    for path in (user_folder, mount_folder):
        with PrivateFolder.below(path) as folder:
            if is_shared:
                os.fchmod(folder.fd, _SHARED_FOLDER_MODE)
    return mount_folder


def _find_requesting_user() -> messages.SetUser:
    """Return the user who sent the FUSE request that this thread executes, with the groups of the sending thread.

    If ``/proc/<thread>/status`` cannot be read, as for a thread in another PID namespace, the result has no
    supplementary groups.
    """
    sender = request_sender()
    groups: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{sender.thread_id}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("Groups:"))
        groups = tuple(map(int, line.split()[1:]))
    return messages.SetUser(sender.uid, sender.gid, groups)


def _require_impersonation(store: StoreFiles) -> None:
    """Raise UsageError if the storage server cannot act as other users."""
    try:
        store.check_impersonation()
    except ApiError as error:
        if error.errno not in {errno.EPERM, errno.EREMOTEIO}:
            raise
        message = f"the storage server cannot serve several users: {error.detail}"
        raise UsageError(
            message, what_to_do="run `gdrkit serve` of this version as root, or start the agent without --shared"
        ) from error
