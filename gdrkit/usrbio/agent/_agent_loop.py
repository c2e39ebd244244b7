"""The agent's native loop, named here alone.

Level 5. :class:`AgentLoop` is what Python may ask of ``native/usrbio/agent``; importing this file opens nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from gdrkit.loader import import_native

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AgentLoop", "create_semaphore", "limit_arenas", "open_loop"]


class AgentLoop(Protocol):
    """One thread that drains rings; every call waits for it, while other threads of Python run.

    Refusals are OSError: EEXIST and ENOENT of what is added twice or missing, EINVAL of what cannot be a ring,
    ESHUTDOWN after :meth:`stop`. The removing calls are False while operations are in flight after the timeout.
    """

    def add_client(self, client: int) -> None:
        """Begin to know a client."""

    def remove_client(self, client: int) -> None:
        """Forget a client that has nothing; EBUSY else."""

    def add_buffer(
        self,
        client: int,
        id: bytes,  # noqa: A002 - the word of the contract.
        *,
        length: int,
        block_bytes: int,
        keys: Sequence[tuple[int, int]],
        near: Sequence[int],
    ) -> None:
        """Serve a buffer: address and key of it for each NIC, and the numbers of the NICs to prefer."""

    def set_file(
        self, client: int, inode: int, *, read_handle: int, write_handle: int, readable: bool, writable: bool
    ) -> None:
        """Serve a file, or serve it by other handles and rights."""

    def add_ring(
        self,
        client: int,
        id: bytes,  # noqa: A002
        *,
        fd: int,
        for_read: bool,
        io_depth: int,
        priority: int,
        timeout_ms: int,
        flags: int,
    ) -> None:
        """Drain a ring, whose shared memory the descriptor names (it stays the caller's)."""

    def remove_buffer(self, client: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Serve it no more."""

    def remove_ring(self, client: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Drain it no more."""

    def remove_file(self, client: int, inode: int, *, timeout_ms: int) -> bool:
        """Serve it no more."""

    def connect(self, socket: int, *, lanes: Sequence[int], generation: int) -> None:
        """Send operations there; the descriptor is the loop's from now on. `lanes`: the number of the NIC of each."""

    def disconnect(self) -> bool:
        """End what is in flight with -EREMOTEIO, since the server reaches no memory any more.

        True: the memory of one operation ended the session. Only what is in flight in that memory ends; everything else
        waits for the next :meth:`connect`, which sends it again, or for :meth:`abandon`.
        """

    def abandon(self) -> None:
        """End what waits for the next session with -EREMOTEIO."""

    def statistics(self) -> dict[str, int]:
        """What it counted since it began."""

    def events(self, timeout_ms: int) -> list[tuple[str, int, bytes, int]]:
        """What happened: kind (``ring_broken``, ``disconnected``, ``silent``), client, id of the ring, generation of
        the connection.
        """

    def stop(self) -> None:
        """End it."""


def open_loop(*, semaphores: tuple[str, str, str], spin_us: int, outstanding_max: int, silence_ms: int) -> AgentLoop:
    """Start a loop; `semaphores`: names of the submit semaphores, high priority first. `silence_ms`: how long a server
    that has operations may give no result at all.

    Raises
    ------
    SetupMissing
        The native parts were not built.
    """
    native = import_native("gdrkit.usrbio._loop")
    loop = native.Loop(semaphores=semaphores, spin_us=spin_us, outstanding_max=outstanding_max, silence_ms=silence_ms)
    return cast("AgentLoop", loop)


def create_semaphore(name: str, *, mode: int) -> None:
    """Make a named semaphore of value 0; OSError EEXIST when there is one."""
    import_native("gdrkit.usrbio._loop").create_semaphore(name, mode)


def limit_arenas() -> None:
    """Have malloc of this process use two arenas for all threads; before any thread is made."""
    import_native("gdrkit.usrbio._loop").limit_arenas()
