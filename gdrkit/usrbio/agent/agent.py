"""The agent: joins mount, NICs, loop, storage server and clients, and takes them apart in order.

Level 5. :class:`Agent` is a plain mount, whose folder is the store's; a FUSE mount is made of the same parts.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Protocol, Self

from gdrkit.errors import UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.usrbio.agent._agent_loop import open_loop
from gdrkit.usrbio.agent.files import ByDescriptor
from gdrkit.usrbio.agent.listener import AgentListener
from gdrkit.usrbio.agent.memory import Nics
from gdrkit.usrbio.agent.mount import Mount, check_mount
from gdrkit.usrbio.agent.server import Embedded, Server
from gdrkit.usrbio.agent.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from gdrkit.usrbio.agent.files import Proof
    from gdrkit.usrbio.agent.publication import Links
    from gdrkit.usrbio.agent.server import Where

__all__ = ["SILENCE_MS", "Agent", "block_signals", "plain_agent", "serve_until_signalled"]

_SPIN_US = 50
SILENCE_MS = 60_000
_OUTSTANDING_MAX = 4096


class Agent:
    """A running agent; use it as a context manager.

    Parameters
    ----------
    mount : Mount
        Owned from now on, also when the constructor raises.
    where : Where
        Which storage server; owned too.
    prove : callable
        Makes a proof of a client's descriptor; see :class:`~gdrkit.usrbio.agent.service.Service`.
    links : Links or None
        Where links are made; None: in the folder of the mount.
    spin_us : int
        How long the loop looks for work before it sleeps.
    drain_timeout_ms : int
        As of :class:`~gdrkit.usrbio.agent.service.Service`.
    silence_ms : int
        How long the server may give no result while it has operations. After that its session ends, and they do with
        -EREMOTEIO, when the server reaches no memory any more.

    Attributes
    ----------
    service : Service
        What clients reach, also those who come another way than by the socket.
    """

    def __init__(
        self,
        mount: Mount,
        where: Where,
        *,
        prove: Callable[[int], Proof],
        links: Links | None = None,
        spin_us: int = _SPIN_US,
        drain_timeout_ms: int = 10000,
        one_per_process: bool = False,
        silence_ms: int = SILENCE_MS,
    ) -> None:
        self.mount = mount
        self._parts = ReleaseStack()
        self._parts.push(mount.close)
        try:
            self._nics = Nics()
            self._parts.push(self._nics.close)
            self._loop = open_loop(
                semaphores=mount.semaphores,
                spin_us=spin_us,
                outstanding_max=_OUTSTANDING_MAX,
                silence_ms=silence_ms,
            )
            self._parts.push(self._loop.stop)
            self.service = Service(
                mount.path,
                prove=prove,
                loop=self._loop,
                nics=self._nics,
                links=mount.links if links is None else links,
                drain_timeout_ms=drain_timeout_ms,
                one_per_process=one_per_process,
            )
            self.server = Server(
                where,
                self._loop,
                self._nics,
                reopen=self.service.reopen,
                ring_broken=self.service.ring_broken,
            )
            self.service.server = self.server
            self._parts.push(self.server.close)
            self.server.start()
            self._parts.push(self.service.close)
            doorway = AgentListener(mount, self.service)
            self._parts.push(doorway.close)
        except BaseException as error:
            self._parts.run_after(error)
            raise

    def statistics(self) -> dict[str, int]:
        """What the loop counted, how many clients there are, and how often the session was renewed."""
        return {
            **self._loop.statistics(),
            "clients": len(self.service.clients),
            "session_renewals": self.server.renewals,
        }

    def close(self) -> None:
        """End connections after what is in flight, then the session and the server, then remove what was made."""
        self._parts.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def plain_agent(
    path: Path,
    store: Path,
    *,
    spin_us: int = _SPIN_US,
    drain_timeout_ms: int = 10000,
    silence_ms: int = SILENCE_MS,
) -> Agent:
    """An agent of a plain mount with a storage server of its own.

    Raises
    ------
    UsageError
        The mount is not the store's folder.
    SetupMissing, ApiError, GdrkitError
        EBUSY: another agent serves the mount; no NIC, no native parts, no server.
    """
    resolved = check_mount(path)
    if not resolved.samefile(check_mount(store)):
        message = f"{path} is not the store's folder {store}"
        raise UsageError(message, what_to_do="a plain mount is the store itself: name the same folder twice")
    mount = Mount(resolved)
    where = Embedded(resolved, mount)
    return Agent(
        mount,
        where,
        prove=lambda descriptor: ByDescriptor(descriptor, resolved),
        spin_us=spin_us,
        drain_timeout_ms=drain_timeout_ms,
        silence_ms=silence_ms,
    )


class Running(Protocol):
    """What is served until a signal comes."""

    @property
    def mount(self) -> Mount:
        """Where."""

    def statistics(self) -> dict[str, int]:
        """What was counted."""

    def close(self) -> None:
        """End it."""


def serve_until_signalled(agent: Running, *, as_json: bool) -> None:
    """Say that it is ready, wait for SIGTERM or SIGINT, close it, and say what it counted."""
    signals = {signal.SIGTERM, signal.SIGINT}
    _say(
        {"ready": True, "mount": str(agent.mount.path), "pid": os.getpid()},
        f"ready: {agent.mount.path}",
        as_json=as_json,
    )
    signal.sigwait(signals)
    counted = agent.statistics()
    agent.close()
    numbers = ", ".join(f"{name} {count}" for name, count in counted.items())
    _say({"ended": True, "statistics": counted}, f"ended: {numbers}", as_json=as_json)


def block_signals() -> None:
    """Have SIGTERM and SIGINT wait for :func:`serve_until_signalled`; before any thread is made, which inherits it."""
    if threading.active_count() != 1:
        message = "signals are blocked before threads are made"
        raise UsageError(message)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def _say(data: dict[str, object], text: str, *, as_json: bool) -> None:
    try:
        print(json.dumps(data) if as_json else text, flush=True)  # noqa: T201 - the command's own output.
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - nobody listens any more.
