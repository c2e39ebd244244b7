"""The agent's loop, with the case as its storage server: invalid results, and rings whose indices go backwards.

No NIC moves data here. The case reads the requests of the loop from a socket, and sends the results itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
from typing import TYPE_CHECKING

import pytest
from support.raw_usrbio import RawIov, RawRing

from gdrkit.storage import wire
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent._agent_loop import open_loop
from gdrkit.usrbio.agent.mount import AgentMount

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.usrbio.agent._agent_loop import AgentLoop

# Id of the client, inode numbers, and number of the data connection in events of the loop.
CLIENT_ID, INODE, UNKNOWN_INODE, GENERATION = 1, 5, 6, 3
EVENTS_TIMEOUT_MS = 10_000
# Numbers of two of the four indices of a ring, for RawRing.index().
SUBMISSION_HEAD, COMPLETION_TAIL = 0, 3


@dataclasses.dataclass(frozen=True)
class ServedRing:
    """A loop that serves one ring.

    Attributes
    ----------
    loop : AgentLoop
        The native loop of the agent.
    server : socket.socket
        The server's end of the data connection.
    iov : RawIov
        Memory of the client. The loop sends its address to the server, and no NIC uses it.
    ring : RawRing
        A ring of reads.
    """

    loop: AgentLoop
    server: socket.socket
    iov: RawIov
    ring: RawRing

    def submit(self, *inodes: int) -> None:
        """Submit a read of 1 KiB for each inode number."""
        for inode in inodes:
            self.ring.prepare(self.iov.id.bytes, inode=inode, length=KIB)
        self.ring.submit()

    def receive_operation(self) -> wire.Operation:
        """Return the operation of the next request to the server."""
        self.server.settimeout(30)
        header = wire.parse_header(self.server.recv(wire.HEADER_BYTES, socket.MSG_WAITALL))
        (operation,) = wire.parse_operations(header, self.server.recv(header.length, socket.MSG_WAITALL))
        return operation

    def wait_for_results(self, count: int) -> list[int]:
        """Wait for this number of completions, and return their results."""
        return [result for _, result, _ in self.ring.wait(count)]

    def wait_for_event_names(self) -> list[str]:
        """Wait for events of the loop, and return their names."""
        return [name for name, *_ in self.loop.events(EVENTS_TIMEOUT_MS)]


@contextlib.contextmanager
def serve_ring(mount_folder: Path) -> Iterator[ServedRing]:
    """Yield a loop that has one file and one ring, and is connected to the case."""
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(AgentMount(mount_folder))
        iov, ring = RawIov(MIB), RawRing(8, for_read=True)
        stack.callback(iov.close)
        stack.callback(ring.close)
        loop = open_loop(semaphore_names=mount.semaphore_names, spin_us=0, outstanding_max=64, server_timeout_ms=60_000)
        stack.callback(loop.stop)
        loop.add_client(CLIENT_ID)
        # For the only NIC, the memory has the remote address 1 MiB and the rkey 7.
        loop.add_buffer(
            CLIENT_ID,
            iov.id.bytes,
            length_bytes=MIB,
            block_bytes=0,
            addresses_and_rkeys=[(1 << 20, 7)],
            preferred_nic_indices=[],
        )
        loop.set_file(CLIENT_ID, INODE, read_handle=1, write_handle=0, readable=True, writable=False)
        loop.add_ring(
            CLIENT_ID, ring.id.bytes, fd=ring.fd, for_read=True, io_depth=0, priority=1, timeout_ms=0, flags=0
        )
        ring.attach(mount_folder)
        server, data_connection = socket.socketpair()
        stack.enter_context(server)
        loop.connect(data_connection.detach(), queue_pair_nic_indices=[0], generation=GENERATION)
        yield ServedRing(loop, server, iov, ring)


@pytest.mark.parametrize("result", [KIB, 0, -errno.ENODATA, -4095])
def test_result_of_the_server_completes_the_operation(tmp_path: Path, result: int) -> None:
    with serve_ring(tmp_path) as served_ring:
        served_ring.submit(INODE)
        served_ring.server.sendall(wire.pack_results([wire.Result(served_ring.receive_operation().tag, result)]))
        assert served_ring.wait_for_results(1) == [result]


# More bytes than the read has, or an errno above 4095, the largest errno of Linux.
@pytest.mark.parametrize("result", [KIB + 1, (1 << 63) - 1, -4096, -1 << 63])
def test_impossible_result_ends_the_connection(tmp_path: Path, result: int) -> None:
    with serve_ring(tmp_path) as served_ring:
        served_ring.submit(INODE)
        served_ring.server.sendall(wire.pack_results([wire.Result(served_ring.receive_operation().tag, result)]))
        assert served_ring.wait_for_event_names() == ["disconnected"]
        assert not served_ring.loop.disconnect()
        assert served_ring.wait_for_results(1) == [-errno.EREMOTEIO]


# The low half of a tag is the index of an operation. The high half distinguishes the operations that use one index.
@pytest.mark.parametrize("changed_bits", [1, 1 << 20, 1 << 32])
def test_result_with_an_unknown_tag_ends_the_connection(tmp_path: Path, changed_bits: int) -> None:
    with serve_ring(tmp_path) as served_ring:
        served_ring.submit(INODE)
        served_ring.server.sendall(
            wire.pack_results([wire.Result(served_ring.receive_operation().tag ^ changed_bits, KIB)])
        )
        assert served_ring.wait_for_event_names() == ["disconnected"]
        assert not served_ring.loop.disconnect()
        assert served_ring.wait_for_results(1) == [-errno.EREMOTEIO]


@pytest.mark.parametrize("new_handle", [0, 9], ids=["not-opened-again", "opened-again"])
def test_new_session_gets_no_handle_of_the_old_one(tmp_path: Path, new_handle: int) -> None:
    """In the new session, a handle of the old session could name a file of another client."""
    with serve_ring(tmp_path) as served_ring, contextlib.closing(RawIov(MIB)) as refused_iov:
        served_ring.submit(INODE)
        first_operation = served_ring.receive_operation()
        served_ring.loop.add_buffer(
            CLIENT_ID,
            refused_iov.id.bytes,
            length_bytes=MIB,
            block_bytes=0,
            addresses_and_rkeys=[(2 << 20, 8)],
            preferred_nic_indices=[],
        )
        served_ring.ring.prepare(refused_iov.id.bytes, inode=INODE, length=KIB)
        served_ring.ring.submit()
        # The result says that a NIC has refused the memory of the second operation. This result ends the session. The
        # first operation waits for the next session.
        served_ring.server.sendall(
            wire.pack_results([wire.Result(served_ring.receive_operation().tag, -errno.EREMOTEIO)])
        )
        assert "disconnected" in served_ring.wait_for_event_names()
        # The result True says that only the operations on the refused memory fail.
        assert served_ring.loop.disconnect()
        assert served_ring.wait_for_results(1) == [-errno.EREMOTEIO]
        if new_handle:
            served_ring.loop.set_file(
                CLIENT_ID, INODE, read_handle=new_handle, write_handle=0, readable=True, writable=False
            )
        server, data_connection = socket.socketpair()
        with server:
            served_ring.loop.connect(data_connection.detach(), queue_pair_nic_indices=[0], generation=GENERATION + 1)
            repeated_operation = dataclasses.replace(served_ring, server=server).receive_operation()
        assert (first_operation.handle, repeated_operation.handle) == (1, new_handle)


def test_second_result_of_an_operation_ends_the_connection(tmp_path: Path) -> None:
    with serve_ring(tmp_path) as served_ring:
        served_ring.submit(INODE)
        reply = wire.pack_results([wire.Result(served_ring.receive_operation().tag, KIB)])
        served_ring.server.sendall(reply + reply)
        assert served_ring.wait_for_event_names() == ["disconnected"]
        assert served_ring.wait_for_results(1) == [KIB]


def test_submission_head_that_goes_backwards_breaks_the_ring(tmp_path: Path) -> None:
    with serve_ring(tmp_path) as served_ring:
        # The loop claims the entries in order. So when the second operation has failed, the loop has claimed both, and
        # the head 1 is a step backwards.
        served_ring.submit(INODE, UNKNOWN_INODE)
        assert served_ring.wait_for_results(1) == [-errno.EBADF]
        served_ring.ring.set_index(SUBMISSION_HEAD, 1)
        served_ring.ring.submit()
        assert served_ring.wait_for_event_names() == ["ring_broken"]


def test_completion_tail_that_goes_backwards_breaks_the_ring(tmp_path: Path) -> None:
    with serve_ring(tmp_path) as served_ring:
        # The loop reads the tail each time it claims an entry. For the second entry it reads the tail 1. For the third
        # entry it reads the tail 0, which is a step backwards.
        for _ in range(2):
            served_ring.submit(UNKNOWN_INODE)
            assert served_ring.wait_for_results(1) == [-errno.EBADF]
        served_ring.ring.set_index(COMPLETION_TAIL, 0)
        served_ring.submit(UNKNOWN_INODE)
        assert served_ring.wait_for_event_names() == ["ring_broken"]
