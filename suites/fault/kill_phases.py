"""The phases in which the kill campaign kills a client, the agent or its storage server.

Each function in :data:`ENTER_PHASE` brings the processes into the phase that its docstring describes, and returns when
they are in it. The functions recognize a phase by a trap, by the shared memory of the ring, or by the contents of the
file. A trap (:mod:`fault.traps`) stops a process in a certain call. After the kill, the campaign resumes the other
stopped processes.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from fault.file_model import SEGMENT_BYTES, Write
from support.processes import HungError, is_idle, stop_process, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from fault.file_model import FileModel
    from fault.traps import Traps
    from fault.usrbio_client import UsrbioClient

__all__ = ["ENTER_PHASE", "KILL_POINTS", "LOCAL_KILL_POINTS", "TRAP_BY_CALL", "Processes"]

# Name of the trap for each call or event in the fault plan of the verbs twin (a library that emulates NICs). The server
# transfers data by RDMA. The event "wc.OPCODE" comes before a request transfers data, "wc.OPCODE.landed" afterwards.
TRAP_BY_CALL = {
    "ibv_reg_mr": "register",
    "ibv_reg_dmabuf_mr": "register",
    "ibv_dereg_mr": "deregister",
    "wc.rdma_read": "rdma_read",
    "wc.rdma_write": "rdma_write",
    "wc.rdma_read.landed": "rdma_read_done",
    "ibv_poll_cq": "poll",
}
# Largest number of attempts to reach the phase "written", and of polls in one attempt.
_ATTEMPTS_MAX = 200


class Processes:
    """The processes that take part in one kill, and the client's operations in progress.

    Attributes
    ----------
    client : UsrbioClient
        The client that may be killed.
    agent_process_id, server_process_id : int
        Process ids of the agent and of its storage server.
    stopped_process_ids : set of int
        Ids of the processes that a trap or :meth:`stop` has stopped.
    pending_writes : list of Write
        Writes that were submitted and not collected.
    pending_read_bytes : int
        Length of the read that was submitted and not collected, or 0.
    """

    def __init__(
        self,
        *,
        client: UsrbioClient,
        agent_process_id: int,
        server_process_id: int,
        traps: Traps,
        file_model: FileModel,
        rng: Random,
    ) -> None:
        self.client = client
        self.agent_process_id = agent_process_id
        self.server_process_id = server_process_id
        self.traps = traps
        self.file_model = file_model
        self.rng = rng
        self.stopped_process_ids: set[int] = set()
        self.pending_writes: list[Write] = []
        self.pending_read_bytes = 0

    def resume(self, process_id: int) -> None:
        """Let a stopped process continue."""
        self.stopped_process_ids.discard(process_id)
        os.kill(process_id, signal.SIGCONT)

    def wait_for_trap(self, trap: str, process_id: int) -> None:
        """Wait until the trap has stopped the process."""
        self.traps.wait_for(trap, process_id)
        self.stopped_process_ids.add(process_id)

    def wait_for_trap_or(self, has_passed: Callable[[], bool], trap: str, process_id: int) -> bool:
        """Wait until the trap has stopped the process or `has_passed` returns true. Return whether it was trapped.

        If `has_passed` returns true first, disarm the trap.
        """
        wait_until(
            lambda: self.traps.has_caught(trap, process_id) or has_passed(),
            f"process {process_id} in trap {trap}, or past it",
        )
        if not self.traps.has_caught(trap, process_id) and self.traps.disarm(trap):
            return False
        self.wait_for_trap(trap, process_id)
        return True

    def stop(self, process_id: int) -> None:
        """Stop a process by SIGSTOP."""
        stop_process(process_id)
        self.stopped_process_ids.add(process_id)

    def submit_writes(self, *lengths: int) -> list[Write]:
        """Have the client submit writes of these lengths, at random offsets of the file and without overlaps."""
        unwritten_bytes = len(self.file_model.contents) - sum(lengths)
        # The offset of a write is the number of unwritten bytes before it plus the lengths of the earlier writes. So no
        # two writes overlap.
        unwritten_bytes_before_writes = sorted(self.rng.randrange(unwritten_bytes + 1) for _ in lengths)
        written_bytes, writes = 0, []
        for unwritten_bytes_before, length_bytes in zip(unwritten_bytes_before_writes, lengths, strict=True):
            writes.append(Write(unwritten_bytes_before + written_bytes, length_bytes, self.rng.randrange(1 << 63)))
            written_bytes += length_bytes
        self.file_model.submit(writes)
        self.client.call("write", operations=[write.to_tuple() for write in writes])
        self.pending_writes = writes
        return writes

    def collect_writes(self) -> list[int]:
        """Return the results of the submitted writes, and acknowledge the writes that completed."""
        self.client.start("wait", for_read=False, count=len(self.pending_writes))
        reply = self.client.read_reply()
        assert "errno" not in reply, reply
        indices_and_results = reply["result"]
        assert isinstance(indices_and_results, list)
        assert len(indices_and_results) == len(self.pending_writes), (
            f"only {len(indices_and_results)} of {len(self.pending_writes)} results arrived before the timeout: "
            f"{indices_and_results}"
        )
        for index, result in indices_and_results:
            write = self.pending_writes[index]
            if result == write.length_bytes:
                self.file_model.acknowledge(write)
        self.pending_writes = []
        return [result for _, result in indices_and_results]

    def submit_read(self, length_bytes: int) -> None:
        """Have the client submit a read of the beginning of the file."""
        self.client.call("read", operations=[(0, length_bytes, 0)])
        self.pending_read_bytes = length_bytes

    def collect_read(self) -> int:
        """Return the result of the submitted read."""
        results = self.client.call("wait", for_read=True, count=1)
        assert isinstance(results, list)
        ((_index, result),) = results
        self.pending_read_bytes = 0
        return int(result)

    def choose_length(self) -> int:
        """Return a random length from 1 byte to one segment."""
        return self.rng.randrange(1, SEGMENT_BYTES + 1)


def enter_publish(processes: Processes, _file_path: Path) -> None:
    """The agent has a request to publish memory, and is about to register it. The client waits for the reply."""
    processes.traps.arm("register")
    processes.client.start("publish")
    processes.wait_for_trap("register", processes.agent_process_id)


def enter_register(processes: Processes, file_path: Path) -> None:
    """The agent has registered published memory with the first NIC, and not yet with the second NIC."""
    enter_publish(processes, file_path)
    processes.traps.arm("register")
    processes.resume(processes.agent_process_id)
    processes.wait_for_trap("register", processes.agent_process_id)


def enter_unpublish(processes: Processes, _file_path: Path) -> None:
    """The agent deregisters memory. The client waits for the reply."""
    processes.client.call("publish")
    processes.traps.arm("deregister")
    processes.client.start("unpublish")
    processes.wait_for_trap("deregister", processes.agent_process_id)


def enter_submitted(processes: Processes, _file_path: Path) -> None:
    """The ring has submissions, and the agent is stopped before it reads them."""
    processes.stop(processes.agent_process_id)
    processes.submit_writes(*(processes.choose_length() for _ in range(processes.rng.randint(1, 8))))
    ring = processes.client.map_ring(processes.agent_process_id, for_read=False)
    assert ring.has_submissions
    ring.close()


def enter_transfer(processes: Processes, _file_path: Path) -> None:
    """The server has transferred the first segment of a write, and not yet the second segment."""
    processes.traps.arm("rdma_read")
    processes.submit_writes(SEGMENT_BYTES + processes.choose_length())
    processes.wait_for_trap("rdma_read", processes.server_process_id)
    processes.traps.arm("rdma_read")
    processes.resume(processes.server_process_id)
    processes.wait_for_trap("rdma_read", processes.server_process_id)


def enter_reading(processes: Processes, _file_path: Path) -> None:
    """The server has transferred the first segment of a read, and not yet the second segment."""
    processes.traps.arm("rdma_write")
    processes.submit_read(SEGMENT_BYTES + processes.choose_length())
    processes.wait_for_trap("rdma_write", processes.server_process_id)
    processes.traps.arm("rdma_write")
    processes.resume(processes.server_process_id)
    processes.wait_for_trap("rdma_write", processes.server_process_id)


def enter_replied(processes: Processes, file_path: Path) -> None:
    """The server has written the data and replied, and the agent is stopped before it reads the reply."""
    processes.traps.arm("rdma_read_done")
    (write,) = processes.submit_writes(processes.choose_length())
    processes.wait_for_trap("rdma_read_done", processes.server_process_id)
    processes.stop(processes.agent_process_id)
    processes.resume(processes.server_process_id)
    wait_until(
        lambda: _has_write(file_path, write) and is_idle(processes.server_process_id),
        "the server has written the data, and waits for the next frame",
    )
    ring = processes.client.map_ring(processes.agent_process_id, for_read=False)
    assert not ring.has_completions
    ring.close()


def enter_completed(processes: Processes, _file_path: Path) -> None:
    """The ring has completions, and the client has not taken them."""
    processes.submit_writes(*(processes.choose_length() for _ in range(processes.rng.randint(1, 4))))
    ring = processes.client.map_ring(processes.agent_process_id, for_read=False)
    wait_until(lambda: ring.has_completions, "a completion is in the ring")
    ring.close()


def enter_written(processes: Processes, file_path: Path) -> None:
    """The server has written the data of a first operation, and polls for a second operation before it replies.

    The session has two queue pairs. If the first operation uses queue pair 0, the server polls queue pair 1 before its
    reply, and the trap stops the server there. If the first operation uses queue pair 1, the server replies at once,
    and the attempt has failed. The agent changes the queue pair after 256 KiB, and an attempt writes more than that, so
    the attempts use the queue pairs in turn. Every second attempt also submits one small write beforehand.
    """
    for attempt in range(_ATTEMPTS_MAX):
        if attempt % 2:
            processes.submit_writes(1)
            processes.collect_writes()
        processes.traps.arm("rdma_read_done")
        first_write, _second = processes.submit_writes(processes.choose_length(), 6 * SEGMENT_BYTES)
        processes.wait_for_trap("rdma_read_done", processes.server_process_id)
        if _is_stopped_before_reply(processes, file_path, first_write):
            return
        if processes.server_process_id in processes.stopped_process_ids:
            processes.resume(processes.server_process_id)
        processes.collect_writes()
    message = f"the server was not stopped before its reply in {_ATTEMPTS_MAX} attempts"
    raise HungError(message)


def _is_stopped_before_reply(processes: Processes, file_path: Path, first_write: Write) -> bool:
    """Resume the server until it has written `first_write`. Return whether it is stopped before its reply."""
    ring = processes.client.map_ring(processes.agent_process_id, for_read=False)
    try:
        for _ in range(_ATTEMPTS_MAX):
            processes.traps.arm("poll")
            processes.resume(processes.server_process_id)
            # If one poll returned all completions, the server does not poll again, and the ring has the completions.
            if not processes.wait_for_trap_or(lambda: ring.has_completions, "poll", processes.server_process_id):
                return False
            if _has_write(file_path, first_write):
                wait_until(lambda: is_idle(processes.agent_process_id), "the agent has processed all replies")
                return not ring.has_completions
        return False
    finally:
        ring.close()


def _has_write(path: Path, write: Write) -> bool:
    """Return whether the file contains the data of a write."""
    with path.open("rb") as file:
        file.seek(write.offset_bytes)
        return file.read(write.length_bytes) == write.data


# The function that brings the processes into each phase.
ENTER_PHASE: dict[str, Callable[[Processes, Path], None]] = {
    "publish": enter_publish,
    "register": enter_register,
    "unpublish": enter_unpublish,
    "submitted": enter_submitted,
    "transfer": enter_transfer,
    "reading": enter_reading,
    "written": enter_written,
    "replied": enter_replied,
    "completed": enter_completed,
}
# Each kill point is a pair of the victim and the phase in which it is killed. ENTER_PHASE has no function for
# the phase "session", because the campaign enters it itself: it kills the server, the agent starts a new server, and
# the campaign kills the new server while it registers the memory of its first session.
KILL_POINTS = (
    *(("client", phase) for phase in ENTER_PHASE if phase != "written"),
    *(("agent", phase) for phase in ENTER_PHASE),
    *(("server", phase) for phase in ("session", "transfer", "reading", "written", "replied", "completed")),
)
# The kill points if the agent reads cached bytes itself. The server then transfers no reads, so the phase
# "reading" does not exist.
LOCAL_KILL_POINTS = tuple(kill_point for kill_point in KILL_POINTS if kill_point[1] != "reading")
