"""The agent's native loop: a thread that serves the rings of all clients. Only this file imports its module.

Importing this file opens no library. :class:`AgentLoop` has the calls of ``native/usrbio/agent``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from gdrkit.loader import LazyModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.usrbio import _loop as native
else:
    native = LazyModule("gdrkit.usrbio._loop")

__all__ = ["AgentLoop", "create_semaphore", "limit_arenas", "open_loop"]


class AgentLoop(Protocol):
    """One native thread that reads the rings of all clients and sends their operations to the storage server.

    Every call waits until the thread has executed it. Other Python threads run meanwhile. Errors are OSError: EEXIST if
    the object to add exists already, ENOENT if the object to use or remove does not exist, EINVAL if the memory cannot
    be a ring, ESHUTDOWN after :meth:`stop`. The remove methods return False if operations are still in flight after
    `timeout_ms`.
    """

    def add_client(self, client: int) -> None:
        """Add a client. Later calls identify it by this number."""

    def remove_client(self, client: int) -> None:
        """Remove a client without buffers, files and rings. EBUSY if it has any."""

    def add_buffer(
        self,
        client: int,
        id: bytes,  # noqa: A002 - the name in the native module.
        *,
        length: int,
        block_bytes: int,
        keys: Sequence[tuple[int, int]],
        preferred_nics: Sequence[int],
        mapping: int = 0,
    ) -> None:
        """Add a buffer. `keys` has its address and its key for each NIC. `preferred_nics` has indices of NICs.

        `mapping` is the address of host memory in this process. The loop reads cached bytes of files into it.
        """

    def set_file(
        self,
        client: int,
        inode: int,
        *,
        read_handle: int,
        write_handle: int,
        readable: bool,
        writable: bool,
        file: int = -1,
    ) -> None:
        """Add a file, or change its handles and access rights.

        `file` is a descriptor of the file that is open for reading, which the caller still owns. The loop reads cached
        bytes of the file itself if :meth:`set_local_store` was called.
        """

    def set_local_store(self, sums_folder: int, generation: int) -> None:
        """Pass the folder of the checksums of a store on this machine, and the memory of its server's counter.

        The caller still owns both descriptors.
        """

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
        """Add a ring in the shared memory of a descriptor, which the caller still owns."""

    def remove_buffer(self, client: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Remove a buffer."""

    def remove_ring(self, client: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Remove a ring."""

    def remove_file(self, client: int, inode: int, *, timeout_ms: int) -> bool:
        """Remove a file."""

    def connect(self, socket: int, *, queue_pair_nics: Sequence[int], generation: int) -> None:
        """Send operations to this data connection, whose descriptor the loop owns from now on.

        `queue_pair_nics` has the index of the NIC of each queue pair. `generation` identifies the connection in
        :meth:`events`.
        """

    def disconnect(self) -> bool:
        """End the operations in flight. Before the call, the session's queue pairs must be in the error state.

        Return whether the session ended because a NIC refused access to the memory of one operation. In that case only
        the operations on this memory complete with -EREMOTEIO. The others wait until the next :meth:`connect` sends
        them again, or :meth:`abandon` ends them. Otherwise all operations in flight complete with -EREMOTEIO.
        """

    def abandon(self) -> None:
        """Complete the operations that wait for the next session with -EREMOTEIO."""

    def statistics(self) -> dict[str, int]:
        """Return the counters since the start of the loop."""

    def events(self, timeout_ms: int) -> list[tuple[str, int, bytes, int]]:
        """Return the events since the last call, after waiting at most `timeout_ms` for the first one.

        An event is its type (``ring_broken``, ``disconnected`` or ``silent``), the client, the id of the ring, and the
        generation of the connection.
        """

    def stop(self) -> None:
        """End the thread."""


def open_loop(
    *, semaphores: tuple[str, str, str], spin_us: int, outstanding_max: int, server_timeout_ms: int
) -> AgentLoop:
    """Start a loop.

    Parameters
    ----------
    semaphores : tuple of str
        Names of the submit semaphores, high priority first.
    spin_us : int
        How long the loop polls for work before it sleeps, in microseconds.
    outstanding_max : int
        Limit of the operations in flight.
    server_timeout_ms : int
        Longest time without a result from the server while it has operations, in milliseconds. After that time, the
        loop reports ``silent``.

    Raises
    ------
    SetupMissing
        The native parts were not built.
    """
    return native.Loop(
        semaphores=semaphores, spin_us=spin_us, outstanding_max=outstanding_max, server_timeout_ms=server_timeout_ms
    )


def create_semaphore(name: str, *, mode: int) -> None:
    """Create a named semaphore with the value 0. OSError with EEXIST if the name exists."""
    native.create_semaphore(name, mode)


def limit_arenas() -> None:
    """Limit malloc of this process to two arenas for all threads. Call it before the first thread starts."""
    native.limit_arenas()
