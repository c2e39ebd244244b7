"""The agent of a mount: the process that executes the I/O operations of its client processes at a storage server.

:class:`Agent` opens the NICs, starts the native loop, connects to the storage server, and accepts clients. It releases
all of them in the reverse order. In plain mode the mount is the store's folder. FUSE mode uses :class:`Agent` too; see
:mod:`gdrkit.usrbio.fuse.agent`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Protocol, Self

from gdrkit.errors import UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder
from gdrkit.storage.token import PRIVATE_FOLDER
from gdrkit.usrbio.agent._agent_loop import open_loop
from gdrkit.usrbio.agent.connection import ServerConnection
from gdrkit.usrbio.agent.context import AgentContext
from gdrkit.usrbio.agent.files import DescriptorAccess
from gdrkit.usrbio.agent.listener import AgentListener
from gdrkit.usrbio.agent.memory import Nics
from gdrkit.usrbio.agent.mount import AgentMount, check_mount
from gdrkit.usrbio.agent.quota import SHARED_FILES_MAX, FileQuota, MemoryQuota
from gdrkit.usrbio.agent.removed_links import RemovedLinkWatcher
from gdrkit.usrbio.agent.server import EmbeddedServer
from gdrkit.usrbio.agent.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from gdrkit.registration import Placement
    from gdrkit.storage.messages import SetUser
    from gdrkit.usrbio.agent._agent_loop import AgentLoop
    from gdrkit.usrbio.agent.files import FileAccess
    from gdrkit.usrbio.agent.server import LocalStore, ServerEndpoint

__all__ = [
    "SERVER_TIMEOUT_MS",
    "SPIN_US",
    "Agent",
    "block_signals",
    "check_may_share",
    "plain_agent",
    "serve_until_signalled",
]

# The defaults of `spin_us` and `server_timeout_ms`; see :class:`Agent`.
SPIN_US = 50
SERVER_TIMEOUT_MS = 60_000
# Longest wait for the operations in flight on an object that is removed; see :class:`AgentContext`.
_DRAIN_TIMEOUT_MS = 10_000
# Largest number of operations in flight, of all clients together.
_OUTSTANDING_MAX = 4096


class Agent:
    """A running agent. Use it as a context manager.

    Parameters
    ----------
    mount : AgentMount
        The mount. The agent owns it from now on, also if the constructor raises.
    endpoint : ServerEndpoint
        The storage server. The agent closes it.
    make_file_access : callable
        Called with a file descriptor that a client sent, and the user of the client (``PeerProcess.user``). The
        function owns the descriptor, and returns the access to the file.
    spin_us : int
        How long the loop polls for work before it sleeps, in microseconds.
    is_one_client_per_process : bool
        Whether the connections of one process are one client; see :class:`~gdrkit.usrbio.agent.service.Service`.
    server_timeout_ms : int
        Longest time without a result from the server while operations are in flight, in milliseconds. After this time,
        the agent ends the session. The operations complete with -EREMOTEIO once the server can no longer access memory.
    placement : Placement or None
        The object that chooses the NICs for device memory. None: create a Placement for this machine.
    user_memory_quota_bytes : int or None
        Limit of the host memory that the clients of one user may publish, in bytes. None means no limit.
    may_read_locally : bool
        Whether the agent itself may copy bytes of files from the page cache into host memory. It does so only with a
        storage server that it has started.

    Attributes
    ----------
    mount : AgentMount
        The mount.
    service : Service
        The clients.
    """

    def __init__(
        self,
        mount: AgentMount,
        endpoint: ServerEndpoint,
        *,
        make_file_access: Callable[[int, SetUser | None], FileAccess],
        spin_us: int = SPIN_US,
        is_one_client_per_process: bool = False,
        server_timeout_ms: int = SERVER_TIMEOUT_MS,
        placement: Placement | None = None,
        user_memory_quota_bytes: int | None = None,
        may_read_locally: bool = True,
    ) -> None:
        self.mount = mount
        self._on_close = ReleaseStack()
        self._on_close.push(mount.close)
        try:
            nics = self._nics = Nics(placement)
            self._on_close.push(nics.close)
            nics.measure_reach()
            self._loop = open_loop(
                semaphore_names=mount.semaphore_names,
                spin_us=spin_us,
                outstanding_max=_OUTSTANDING_MAX,
                server_timeout_ms=server_timeout_ms,
            )
            self._on_close.push(self._loop.stop)
            context = AgentContext(
                mount.path,
                make_file_access=make_file_access,
                loop=self._loop,
                nics=nics,
                links=mount.links,
                drain_timeout_ms=_DRAIN_TIMEOUT_MS,
                memory_quota=MemoryQuota(user_memory_quota_bytes),
                file_quota=FileQuota(SHARED_FILES_MAX if mount.is_shared else None),
            )
            self.service = Service(context, is_one_client_per_process=is_one_client_per_process)
            self._server = context.server = ServerConnection(
                endpoint,
                self._loop,
                nics,
                reopen=self.service.reopen,
                remove_ring=self.service.remove_ring,
            )
            self._on_close.push(self._server.close)
            self._server.start()
            if may_read_locally and endpoint.local_store is not None:
                _set_local_store(self._loop, endpoint.local_store)
                context.local_store = endpoint.local_store.path
            self._on_close.push(self.service.close)
            self._on_close.push(RemovedLinkWatcher(mount.links, self.service).close)
            listener = AgentListener(mount, self.service)
            self._on_close.push(listener.close)
        except BaseException as error:
            self._on_close.run_after(error)
            raise

    def statistics(self) -> dict[str, int]:
        """Return the counters of the loop, and the numbers of clients, registrations and renewed sessions."""
        return {
            **self._loop.statistics(),
            "clients": len(self.service.clients),
            "registrations": self._nics.registration_count,
            "session_renewals": self._server.renewal_count,
        }

    def close(self) -> None:
        """End the agent: wait for operations in flight, then close the clients, the session, the server and the mount.

        If the method raises, the caller may call it again to release the rest.
        """
        self._on_close.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def plain_agent(
    path: Path,
    store: Path,
    *,
    spin_us: int = SPIN_US,
    server_timeout_ms: int = SERVER_TIMEOUT_MS,
    placement: Placement | None = None,
    is_shared: bool = False,
    user_memory_quota_bytes: int | None = None,
    may_read_locally: bool = True,
) -> Agent:
    """Start an agent in plain mode, with a storage server as its child.

    Parameters
    ----------
    path, store : Path
        The mount and the store, which must be the same folder.
    spin_us, server_timeout_ms : int
        See :class:`Agent`.
    placement : Placement or None
        See :class:`Agent`.
    is_shared : bool
        Whether to serve all users of the machine. Only root can.
    user_memory_quota_bytes, may_read_locally
        See :class:`Agent`.

    Raises
    ------
    UsageError
        The mount is not the store's folder, or a user other than root wants to share it. NO_DEVICE: no NIC has an
        active port.
    SetupMissing, ApiError, GdrkitError
        EBUSY: another agent serves the mount. Else the native parts were not built, or the server did not start.
    """
    store_folder = check_mount(path)
    if not store_folder.samefile(check_mount(store)):
        message = f"{path} is not the store's folder {store}"
        raise UsageError(message, what_to_do="in plain mode the mount is the store: name the same folder twice")
    if is_shared:
        check_may_share()
    mount = AgentMount(store_folder, is_shared=is_shared)
    return Agent(
        mount,
        EmbeddedServer(store_folder, mount),
        make_file_access=lambda descriptor, _user: DescriptorAccess(descriptor, store_folder),
        spin_us=spin_us,
        server_timeout_ms=server_timeout_ms,
        placement=placement,
        user_memory_quota_bytes=user_memory_quota_bytes,
        may_read_locally=may_read_locally,
    )


def _set_local_store(loop: AgentLoop, store: LocalStore) -> None:
    """Pass the folder of the store's checksums to the loop. The storage server has created this folder."""
    with (
        PrivateFolder.below(store.path / PRIVATE_FOLDER) as private_folder,
        private_folder.folder("sums") as sums_folder,
    ):
        loop.set_local_store(sums_folder.fd, store.generation_fd)


def check_may_share() -> None:
    """Raise UsageError if this process may not serve all users of the machine."""
    if os.geteuid() != 0:
        message = f"only root can serve all users of a machine, and this process is user {os.geteuid()}"
        raise UsageError(message, what_to_do="start the agent as root, or without --shared for this user alone")


class RunningAgent(Protocol):
    """An agent that :func:`serve_until_signalled` can run."""

    @property
    def mount(self) -> AgentMount:
        """The mount."""

    def statistics(self) -> dict[str, int]:
        """Return the agent's counters by name."""

    def close(self) -> None:
        """End the agent."""


def serve_until_signalled(
    agent: RunningAgent,
    *,
    as_json: bool,
    export: Callable[[Callable[[], dict[str, int]]], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Print that the agent is ready, wait for SIGTERM or SIGINT, close the agent, and print its counters.

    `export` is called with ``agent.statistics``. It returns a context manager, which is open while the agent runs and
    may publish the counters.
    """
    signals = {signal.SIGTERM, signal.SIGINT}
    _print_line(
        {"ready": True, "mount": str(agent.mount.path), "pid": os.getpid()},
        f"ready: {agent.mount.path}",
        as_json=as_json,
    )
    try:
        with export(agent.statistics):
            signal.sigwait(signals)
        statistics = agent.statistics()
    finally:
        agent.close()
    counters_text = ", ".join(f"{name} {count}" for name, count in statistics.items())
    _print_line({"ended": True, "statistics": statistics}, f"ended: {counters_text}", as_json=as_json)


def block_signals() -> None:
    """Block SIGTERM and SIGINT, so that :func:`serve_until_signalled` receives them, also if they arrive earlier.

    Call this function before any thread is started, because a thread inherits the blocked signals.
    """
    if threading.active_count() != 1:
        message = f"block_signals() must be called before threads are started, but {threading.active_count()} run"
        raise UsageError(message)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def _print_line(json_fields: dict[str, object], text: str, *, as_json: bool) -> None:
    try:
        print(json.dumps(json_fields) if as_json else text, flush=True)  # noqa: T201 - the output of the command.
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the reader has closed the pipe.
