"""The phases in which a process is killed, and how each is reached and seen.

Every function here brings the path into one phase and returns when it *is* there: the process in question is stopped in
a call that only this phase makes, or shared memory says so. What is stopped stays so until the victim is dead.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from support.kill_model import SEGMENT_BYTES, Write
from support.kill_world import HungError, is_idle, pause, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from support.kill_model import FileModel
    from support.kill_world import Client, Traps

__all__ = ["PAIRS", "POINTS", "REACH", "Scene"]

# Function of the twins' fault plan -> trap.
POINTS = {
    "ibv_reg_mr": "register",
    "ibv_reg_dmabuf_mr": "register",
    "ibv_dereg_mr": "deregister",
    "wc.rdma_read": "transfer",
    "wc.rdma_write": "deliver",
    "wc.rdma_read.landed": "landed",
    "ibv_poll_cq": "poll",
}
_TRIES = 200


class Scene:
    """Who is there, what they know, and who was stopped."""

    def __init__(
        self, *, client: Client, agent: int, server: int, traps: Traps, model: FileModel, chance: Random
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

    def go_on(self, process_id: int) -> None:
        """Let a stopped process run."""
        self.stopped.discard(process_id)
        os.kill(process_id, signal.SIGCONT)

    def catch(self, trap: str, process_id: int) -> None:
        """Wait for a process in a trap."""
        self.traps.catch(trap, process_id)
        self.stopped.add(process_id)

    def catch_unless(self, passed: Callable[[], bool], trap: str, process_id: int) -> bool:
        """Wait for a process in a trap, or for what says that it will not come there any more; whether it is caught."""
        until(
            lambda: self.traps.caught(trap, process_id) or passed(), f"process {process_id} in trap {trap}, or past it"
        )
        if not self.traps.caught(trap, process_id) and self.traps.unset(trap):
            return False
        self.catch(trap, process_id)
        return True

    def pause(self, process_id: int) -> None:
        """Stop a process from outside."""
        pause(process_id)
        self.stopped.add(process_id)

    def submit(self, *lengths: int) -> list[Write]:
        """Have the client submit writes of these lengths, somewhere in the file and apart from each other."""
        rest = len(self.model.image) - sum(lengths)
        cuts = sorted(self.chance.randrange(rest + 1) for _ in lengths)
        begin, writes = 0, []
        for cut, length in zip(cuts, lengths, strict=True):
            writes.append(Write(cut + begin, length, self.chance.randrange(1 << 63)))
            begin += length
        self.model.submitted(writes)
        self.client.ask("write", operations=[write.told() for write in writes])
        self.writes = writes
        return writes

    def collect(self, answer: dict[str, object] | None = None) -> list[int]:
        """What became of the writes that were submitted; those that are acknowledged are so from now on."""
        found = answer or self._waited()
        assert "errno" not in found, found
        results = found["result"]
        assert isinstance(results, list)
        assert len(results) == len(self.writes), f"{results} of {len(self.writes)} within the time"
        for number, result in results:
            write = self.writes[number]
            if result == write.length:
                self.model.completed(write)
        self.writes = []
        return [result for _, result in results]

    def submit_read(self, length: int) -> None:
        """Have the client submit one read of the beginning of the file."""
        self.client.ask("read", operations=[(0, length, 0)])
        self.read_bytes = length

    def collect_read(self) -> int:
        """What became of it."""
        found = self.client.ask("wait", for_read=True, count=1)
        assert isinstance(found, list)
        ((_number, result),) = found
        self.read_bytes = 0
        return int(result)

    def small(self) -> int:
        """A length that one transfer moves."""
        return self.chance.randrange(1, SEGMENT_BYTES + 1)

    def _waited(self) -> dict[str, object]:
        self.client.tell("wait", for_read=False, count=len(self.writes))
        return self.client.answer()


def publish(scene: Scene, root: Path) -> None:
    """The publication is with the agent, which registers nothing of it yet; the client waits for the verdict."""
    scene.traps.set("register")
    scene.client.tell("publish")
    scene.catch("register", scene.agent)


def register(scene: Scene, root: Path) -> None:
    """One NIC knows the memory, the next one does not."""
    publish(scene, root)
    scene.traps.set("register")
    scene.go_on(scene.agent)
    scene.catch("register", scene.agent)


def unpublish(scene: Scene, root: Path) -> None:
    """The agent takes a region back; the client waits for that."""
    scene.client.ask("publish")
    scene.traps.set("deregister")
    scene.client.tell("unpublish")
    scene.catch("deregister", scene.agent)


def submitted(scene: Scene, root: Path) -> None:
    """The agent, which is stopped, has not seen what the ring holds."""
    scene.pause(scene.agent)
    scene.submit(*(scene.small() for _ in range(scene.chance.randint(1, 8))))
    ring = scene.client.ring(scene.agent, for_read=False)
    assert ring.undrained
    ring.close()


def transfer(scene: Scene, root: Path) -> None:
    """The server has moved the first part of a write and is about to move the second."""
    scene.traps.set("transfer")
    scene.submit(SEGMENT_BYTES + scene.small())
    scene.catch("transfer", scene.server)
    scene.traps.set("transfer")
    scene.go_on(scene.server)
    scene.catch("transfer", scene.server)


def reading(scene: Scene, root: Path) -> None:
    """The server has delivered the first part of a read and is about to deliver the second."""
    scene.traps.set("deliver")
    scene.submit_read(SEGMENT_BYTES + scene.small())
    scene.catch("deliver", scene.server)
    scene.traps.set("deliver")
    scene.go_on(scene.server)
    scene.catch("deliver", scene.server)


def replied(scene: Scene, root: Path) -> None:
    """The server has written and replied; the agent, which is stopped, has not read the reply."""
    scene.traps.set("landed")
    (write,) = scene.submit(scene.small())
    scene.catch("landed", scene.server)
    scene.pause(scene.agent)
    scene.go_on(scene.server)
    until(lambda: _holds(root, write) and is_idle(scene.server), "the server has written, and waits for the next frame")
    ring = scene.client.ring(scene.agent, for_read=False)
    assert not ring.unreaped
    ring.close()


def completed(scene: Scene, root: Path) -> None:
    """Completions are in the ring, and the client has not taken them."""
    scene.submit(*(scene.small() for _ in range(scene.chance.randint(1, 4))))
    ring = scene.client.ring(scene.agent, for_read=False)
    until(lambda: ring.unreaped, "a completion is in the ring")
    ring.close()


def written(scene: Scene, root: Path) -> None:
    """The server has written a first operation, and not replied: it looks for the completion of another one.

    Which lane the first one takes is not known. On the first lane the reply comes after the other lane was asked, and
    the server is caught there; else it comes at once, the ring shows that, and the next batch takes the other lane.
    """
    for attempt in range(_TRIES):
        if attempt % 2:
            scene.submit(1)
            scene.collect()
        scene.traps.set("landed")
        first, _other = scene.submit(scene.small(), 6 * SEGMENT_BYTES)
        scene.catch("landed", scene.server)
        if _step_until_written(scene, root, first):
            return
        if scene.server in scene.stopped:
            scene.go_on(scene.server)
        scene.collect()
    message = f"no write was caught before its reply in {_TRIES} tries"
    raise HungError(message)


def _step_until_written(scene: Scene, root: Path, first: Write) -> bool:
    """Go from look to look of the server until the write is done; whether its reply is not yet."""
    ring = scene.client.ring(scene.agent, for_read=False)
    try:
        for _ in range(_TRIES):
            scene.traps.set("poll")
            scene.go_on(scene.server)
            # One look may find all that is left; then there is none after it, and the ring has what was replied.
            if not scene.catch_unless(lambda: ring.unreaped, "poll", scene.server):
                return False
            if _holds(root, first):
                until(lambda: is_idle(scene.agent), "the agent has done what it was told")
                return not ring.unreaped
        return False
    finally:
        ring.close()


def _holds(root: Path, write: Write) -> bool:
    with root.open("rb") as file:
        file.seek(write.offset)
        return file.read(write.length) == write.data


REACH: dict[str, Callable[[Scene, Path], None]] = {
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
# "session": the server that comes after one that was killed registers its staging memory; see the campaign.
PAIRS = (
    *(("client", phase) for phase in REACH if phase != "written"),
    *(("agent", phase) for phase in REACH),
    *(("server", phase) for phase in ("session", "transfer", "reading", "written", "replied", "completed")),
)
