"""The phases in which the campaign kills a client, the agent or its storage server.

Each function here brings the processes into a phase and returns when they are in it: a trap has stopped a process in a
call that only this phase makes, or shared memory shows the phase. A stopped process continues after the kill.
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

__all__ = ["ENTER", "TRAPPED_CALLS", "VICTIM_PHASES", "Processes"]

# Name of the trap for each call of the twins' fault plan.
TRAPPED_CALLS = {
    "ibv_reg_mr": "register",
    "ibv_reg_dmabuf_mr": "register",
    "ibv_dereg_mr": "deregister",
    "wc.rdma_read": "transfer",
    "wc.rdma_write": "deliver",
    "wc.rdma_read.landed": "landed",
    "ibv_poll_cq": "poll",
}
_ATTEMPTS = 200


class Processes:
    """The processes of one kill, their traps, and the operations of the client that are in progress.

    Attributes
    ----------
    agent, server : int
        Process ids.
    stopped : set of int
        Process ids of the stopped processes.
    writes : list of Write
        Writes that were submitted and not collected.
    read_bytes : int
        Length of the read that was submitted and not collected, or 0.
    """

    def __init__(
        self, *, client: UsrbioClient, agent: int, server: int, traps: Traps, model: FileModel, chance: Random
    ) -> None:
        self.client = client
        self.agent = agent
        self.server = server
        self.traps = traps
        self.model = model
        self.chance = chance
        self.stopped: set[int] = set()
        self.writes: list[Write] = []
        self.read_bytes = 0

    def resume(self, process_id: int) -> None:
        """Let a stopped process continue."""
        self.stopped.discard(process_id)
        os.kill(process_id, signal.SIGCONT)

    def wait_for_trap(self, trap: str, process_id: int) -> None:
        """Wait until the trap has stopped the process."""
        self.traps.wait_for(trap, process_id)
        self.stopped.add(process_id)

    def is_trapped_before(self, passed: Callable[[], bool], trap: str, process_id: int) -> bool:
        """Wait until the trap has stopped the process or `passed` holds; return whether the trap has stopped it.

        If `passed` holds first, the trap is disarmed.
        """
        wait_until(
            lambda: self.traps.has_caught(trap, process_id) or passed(),
            f"process {process_id} in trap {trap}, or past it",
        )
        if not self.traps.has_caught(trap, process_id) and self.traps.disarm(trap):
            return False
        self.wait_for_trap(trap, process_id)
        return True

    def stop(self, process_id: int) -> None:
        """Stop a process by SIGSTOP."""
        stop_process(process_id)
        self.stopped.add(process_id)

    def submit(self, *lengths: int) -> list[Write]:
        """Have the client submit writes of these lengths, at random offsets of the file and without overlaps."""
        unused = len(self.model.image) - sum(lengths)
        gaps = sorted(self.chance.randrange(unused + 1) for _ in lengths)
        written, writes = 0, []
        for gap, length in zip(gaps, lengths, strict=True):
            writes.append(Write(gap + written, length, self.chance.randrange(1 << 63)))
            written += length
        self.model.submitted(writes)
        self.client.call("write", operations=[write.fields() for write in writes])
        self.writes = writes
        return writes

    def collect(self) -> list[int]:
        """Return the results of the submitted writes, and acknowledge those that completed."""
        self.client.start("wait", for_read=False, count=len(self.writes))
        answer = self.client.answer()
        assert "errno" not in answer, answer
        results = answer["result"]
        assert isinstance(results, list)
        assert len(results) == len(self.writes), f"{results} of {len(self.writes)} within the time"
        for number, result in results:
            write = self.writes[number]
            if result == write.length:
                self.model.completed(write)
        self.writes = []
        return [result for _, result in results]

    def submit_read(self, length: int) -> None:
        """Have the client submit a read of the beginning of the file."""
        self.client.call("read", operations=[(0, length, 0)])
        self.read_bytes = length

    def collect_read(self) -> int:
        """Return the result of the submitted read."""
        results = self.client.call("wait", for_read=True, count=1)
        assert isinstance(results, list)
        ((_number, result),) = results
        self.read_bytes = 0
        return int(result)

    def segment_length(self) -> int:
        """Return a random length that one segment can have."""
        return self.chance.randrange(1, SEGMENT_BYTES + 1)


def publish(processes: Processes, _file: Path) -> None:
    """The agent has the request of a publication and has registered nothing of it. The client waits for the reply."""
    processes.traps.arm("register")
    processes.client.start("publish")
    processes.wait_for_trap("register", processes.agent)


def register(processes: Processes, file: Path) -> None:
    """The agent has registered published memory with one NIC, and not with the next one."""
    publish(processes, file)
    processes.traps.arm("register")
    processes.resume(processes.agent)
    processes.wait_for_trap("register", processes.agent)


def unpublish(processes: Processes, _file: Path) -> None:
    """The agent deregisters memory. The client waits for the reply."""
    processes.client.call("publish")
    processes.traps.arm("deregister")
    processes.client.start("unpublish")
    processes.wait_for_trap("deregister", processes.agent)


def submitted(processes: Processes, _file: Path) -> None:
    """The ring has submissions, and the agent is stopped before it reads them."""
    processes.stop(processes.agent)
    processes.submit(*(processes.segment_length() for _ in range(processes.chance.randint(1, 8))))
    ring = processes.client.ring(processes.agent, for_read=False)
    assert ring.has_submissions
    ring.close()


def transfer(processes: Processes, _file: Path) -> None:
    """The server has transferred the first segment of a write, and is before the second."""
    processes.traps.arm("transfer")
    processes.submit(SEGMENT_BYTES + processes.segment_length())
    processes.wait_for_trap("transfer", processes.server)
    processes.traps.arm("transfer")
    processes.resume(processes.server)
    processes.wait_for_trap("transfer", processes.server)


def reading(processes: Processes, _file: Path) -> None:
    """The server has transferred the first segment of a read, and is before the second."""
    processes.traps.arm("deliver")
    processes.submit_read(SEGMENT_BYTES + processes.segment_length())
    processes.wait_for_trap("deliver", processes.server)
    processes.traps.arm("deliver")
    processes.resume(processes.server)
    processes.wait_for_trap("deliver", processes.server)


def replied(processes: Processes, file: Path) -> None:
    """The server has written the data and replied, and the agent is stopped before it reads the reply."""
    processes.traps.arm("landed")
    (write,) = processes.submit(processes.segment_length())
    processes.wait_for_trap("landed", processes.server)
    processes.stop(processes.agent)
    processes.resume(processes.server)
    wait_until(
        lambda: _has_write(file, write) and is_idle(processes.server),
        "the server has written the data, and waits for the next frame",
    )
    ring = processes.client.ring(processes.agent, for_read=False)
    assert not ring.has_completions
    ring.close()


def completed(processes: Processes, _file: Path) -> None:
    """The ring has completions, and the client has not taken them."""
    processes.submit(*(processes.segment_length() for _ in range(processes.chance.randint(1, 4))))
    ring = processes.client.ring(processes.agent, for_read=False)
    wait_until(lambda: ring.has_completions, "a completion is in the ring")
    ring.close()


def written(processes: Processes, file: Path) -> None:
    """The server has written the data of a first operation, and polls for a second one before it replies.

    The session has two queue pairs, and the first operation may take either. If it takes the first one, the server
    polls the other one before its reply, and the trap stops it there. Else the server replies at once, which the ring
    shows. The next attempt then submits another operation before, so that the first one takes the other queue pair.
    """
    for attempt in range(_ATTEMPTS):
        if attempt % 2:
            processes.submit(1)
            processes.collect()
        processes.traps.arm("landed")
        first, _second = processes.submit(processes.segment_length(), 6 * SEGMENT_BYTES)
        processes.wait_for_trap("landed", processes.server)
        if _is_stopped_before_reply(processes, file, first):
            return
        if processes.server in processes.stopped:
            processes.resume(processes.server)
        processes.collect()
    message = f"no write was stopped before its reply in {_ATTEMPTS} attempts"
    raise HungError(message)


def _is_stopped_before_reply(processes: Processes, file: Path, first: Write) -> bool:
    """Let the server continue until it has written the data of `first`; return whether it has not replied yet."""
    ring = processes.client.ring(processes.agent, for_read=False)
    try:
        for _ in range(_ATTEMPTS):
            processes.traps.arm("poll")
            processes.resume(processes.server)
            # The server does not poll again if one poll returned all completions. The ring then has the replies.
            if not processes.is_trapped_before(lambda: ring.has_completions, "poll", processes.server):
                return False
            if _has_write(file, first):
                wait_until(lambda: is_idle(processes.agent), "the agent has processed all replies")
                return not ring.has_completions
        return False
    finally:
        ring.close()


def _has_write(path: Path, write: Write) -> bool:
    with path.open("rb") as file:
        file.seek(write.offset)
        return file.read(write.length) == write.data


# The function that brings the processes into each phase.
ENTER: dict[str, Callable[[Processes, Path], None]] = {
    "publish": publish,
    "register": register,
    "unpublish": unpublish,
    "submitted": submitted,
    "transfer": transfer,
    "reading": reading,
    "written": written,
    "replied": replied,
    "completed": completed,
}
# All pairs of victim and phase. In the phase "session", a new server registers its memory in place of a killed one.
VICTIM_PHASES = (
    *(("client", phase) for phase in ENTER if phase != "written"),
    *(("agent", phase) for phase in ENTER),
    *(("server", phase) for phase in ("session", "transfer", "reading", "written", "replied", "completed")),
)
