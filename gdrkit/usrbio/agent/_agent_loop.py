"""The agent's native loop: a thread that serves the rings of all clients.

Only this file imports the native module ``gdrkit.usrbio._loop``, and loads it at its first use. :class:`AgentLoop`
declares the methods of the native class, which ``native/usrbio/agent`` implements.
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

    A call that adds, changes or removes an object waits, without the GIL, until the thread has done this. Errors are
    OSError: EEXIST if the object to add exists already, ENOENT if the client does not exist, EBUSY if the object is in
    use, EINVAL if the memory of a new ring is not a valid ring, ESHUTDOWN after :meth:`stop`.

    :meth:`remove_buffer`, :meth:`remove_ring` and :meth:`remove_file` return False if operations on the object are
    still in flight after `timeout_ms`, otherwise True, also if the object does not exist.
    """

    def add_client(self, client_number: int) -> None:
        """Add a client. Later calls identify the client by its number."""

    def remove_client(self, client_number: int) -> None:
        """Remove a client. Raise OSError (EBUSY) if the client still has buffers, files or rings."""

    def add_buffer(
        self,
        client_number: int,
        id: bytes,  # noqa: A002 - the name in the native module.
        *,
        length_bytes: int,
        block_bytes: int,
        addresses_and_rkeys: Sequence[tuple[int, int]],
        preferred_nic_indices: Sequence[int],
        host_address: int = 0,
    ) -> None:
        """Add a buffer.

        `id` is the UUID of the publication. No operation may cross a multiple of `block_bytes`, unless `block_bytes` is
        0. `addresses_and_rkeys` has, for each NIC of the agent, the remote address and the rkey of the buffer.
        `preferred_nic_indices` has the indices in `addresses_and_rkeys` of the NICs that should access the buffer.
        `host_address` is the address of the buffer in this process if the buffer is host memory, else 0. The loop
        copies bytes of files from the page cache to this address.
        """

    def set_file(
        self,
        client_number: int,
        inode: int,
        *,
        read_handle: int,
        write_handle: int,
        readable: bool,
        writable: bool,
        file_fd: int = -1,
    ) -> None:
        """Add a file, or change its handles and access rights.

        `file_fd` is a descriptor of the file that is open for reading, or -1. The caller still owns the descriptor.
        After :meth:`set_local_store`, the loop itself reads bytes of the file that are in the page cache. All other
        operations go to the storage server, with `read_handle` or `write_handle`.
        """

    def set_local_store(self, checksums_folder_fd: int, generation_fd: int) -> None:
        """Set the store on this machine, so that the loop itself may read bytes of its files from the page cache.

        `checksums_folder_fd` is a descriptor of the folder with the store's checksums. `generation_fd` is a descriptor
        of the shared memory in which the storage server counts new checksum files. The caller still owns both
        descriptors.
        """

    def add_ring(
        self,
        client_number: int,
        id: bytes,  # noqa: A002
        *,
        fd: int,
        for_read: bool,
        io_depth: int,
        priority: int,
        timeout_ms: int,
        flags: int,
    ) -> None:
        """Add the ring in the shared memory of `fd`. The caller still owns `fd`.

        For the options see :class:`~gdrkit.usrbio.agent.link_names.RingOptions`.
        """

    def remove_buffer(self, client_number: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Remove a buffer."""

    def remove_ring(self, client_number: int, id: bytes, *, timeout_ms: int) -> bool:  # noqa: A002
        """Remove a ring."""

    def remove_file(self, client_number: int, inode: int, *, timeout_ms: int) -> bool:
        """Remove a file."""

    def connect(self, socket_fd: int, *, queue_pair_nic_indices: Sequence[int], generation: int) -> None:
        """Send operations over `socket_fd`, a data connection to the storage server, which the loop owns from now on.

        `queue_pair_nic_indices` has, for each queue pair, the index of its NIC in `addresses_and_rkeys`. `generation`
        identifies the connection in :meth:`events`.
        """

    def disconnect(self) -> bool:
        """Close the data connection. Before the call, the session's queue pairs must be in the error state.

        Return True if the session ended because a NIC refused access to the memory of one operation. Then only the
        operations on this memory complete with -EREMOTEIO. The other operations wait until the next :meth:`connect`
        sends them again, or :meth:`abandon` ends them. If the method returns False, all operations in flight have
        completed with -EREMOTEIO.
        """

    def abandon(self) -> None:
        """Complete, with -EREMOTEIO, the operations that wait for the next session."""

    def statistics(self) -> dict[str, int]:
        """Return the loop's counters by name. All but ``outstanding`` count since the start of the loop."""

    def events(self, timeout_ms: int) -> list[tuple[str, int, bytes, int]]:
        """Return the events since the last call. If there is none, first wait for one, at most `timeout_ms`.

        An event has the fields type, client number, id of the ring, and generation of the connection. Its type is
        ``ring_broken``, ``disconnected``, or ``silent``: the server has returned no result for `server_timeout_ms`.
        """

    def stop(self) -> None:
        """End the thread."""


def open_loop(
    *, semaphore_names: tuple[str, str, str], spin_us: int, outstanding_max: int, server_timeout_ms: int
) -> AgentLoop:
    """Start the native loop of an agent.

    Parameters
    ----------
    semaphore_names : tuple of str
        Names of the submit semaphores, high priority first.
    spin_us : int
        How long the loop polls for work before it sleeps, in microseconds.
    outstanding_max : int
        Largest number of operations in flight.
    server_timeout_ms : int
        Longest time without a result from the server while operations are in flight, in milliseconds. After that time,
        the loop adds the event ``silent``.

    Raises
    ------
    SetupMissing
        The native parts were not built.
    """
    return native.Loop(
        semaphore_names=semaphore_names,
        spin_us=spin_us,
        outstanding_max=outstanding_max,
        server_timeout_ms=server_timeout_ms,
    )


def create_semaphore(name: str, *, mode: int) -> None:
    """Create a named semaphore with the value 0 and the permission bits `mode`. Raise OSError (EEXIST) if it exists."""
    native.create_semaphore(name, mode)


def limit_arenas() -> None:
    """Limit malloc to two arenas for all threads, to save memory. Call this function before the first thread starts."""
    native.limit_arenas()
