"""A campaign of kills on one mount: clients, agents and servers die in named phases, and each time it is looked at what
the others see, what is left, and whether every acknowledged write is still there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Self

from support.kill_model import FileModel
from support.kill_phases import PAIRS, REACH, Scene
from support.kill_world import (
    Client,
    HungError,
    descriptors,
    is_gone,
    links,
    shared_memory_of,
    until,
)
from support.raw_usrbio import AgentProcess

from gdrkit import pattern
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from random import Random

    from support.kill_world import Traps

__all__ = ["Campaign"]

_FILE_BYTES = 4 * MIB
_STEP_BYTES = 64 * KIB


class Campaign:
    """The path of one mount, killed again and again; use it as a context manager.

    Parameters
    ----------
    mount : Path
        An empty folder.
    traps : Traps
        Whose plan the processes that are started from now on have.
    chance : Random
        What is not said is drawn from here.

    Attributes
    ----------
    hits : dict
        How often (victim, phase) was hit; every pair is there.
    kinds : dict
        In how many of them the memory of the client was the host's, and a device's.
    """

    def __init__(self, mount: Path, traps: Traps, chance: Random) -> None:
        self.hits = dict.fromkeys(PAIRS, 0)
        self.kinds = {"host": 0, "device": 0}
        self.acknowledged = 0
        self.last = ("", "")
        self._mount = mount
        self._traps = traps
        self._chance = chance
        self._file, self._other = mount / "data", mount / "other"
        image = pattern.payload(_FILE_BYTES, seed=chance.randrange(1 << 63))
        self._file.write_bytes(image)
        self._other.write_bytes(bytes(MIB))
        self._model = FileModel(image)
        self._scene: Scene | None = None
        self._processes: list[Client] = []

    def hit(self, victim: str, phase: str) -> None:
        """Kill `victim` in `phase`, and look at all that must hold afterwards."""
        scene = self._scene = self._new_scene()
        self.last = (victim, phase)
        lengths = [scene.small() for _ in range(self._chance.randint(1, 3))]
        scene.submit(*lengths)
        assert sorted(scene.collect()) == sorted(lengths)
        if phase == "session":
            self._reach_session(scene)
        else:
            REACH[phase](scene, self._file)
        owned = shared_memory_of(scene.client.process.pid)
        self._kill(victim, scene)
        self.hits[victim, phase] += 1
        self.kinds[self._kind] += 1
        match victim:
            case "client":
                self._without_client(scene, owned)
            case "server":
                self._without_server(scene)
            case _:
                self._without_agent(scene, phase, owned)
        # A client that knows nothing reads what is there.
        self._client = self._started(self._file, self._drawn_kind())
        copy = self._mount.parent / "read back"
        results = self._client.ask("save", into=str(copy))
        assert isinstance(results, list)
        assert sum(results) == _FILE_BYTES, f"reads ended with {results}"
        self._model.settle(copy.read_bytes())
        self.acknowledged = self._model.acknowledged

    def _new_scene(self) -> Scene:
        return Scene(
            client=self._client,
            agent=self._agent.process.pid,
            server=self._agent.server_process_id(),
            traps=self._traps,
            model=self._model,
            chance=self._chance,
        )

    def _reach_session(self, scene: Scene) -> None:
        """The server dies, and the next one registers the memory of its first session."""
        before = scene.server
        self._traps.set("register")
        os.kill(before, signal.SIGKILL)

        def others() -> list[int]:
            return [child for child in self._agent.children() if child != before]

        until(lambda: bool(others()), "the agent starts another server")
        (scene.server,) = others()
        scene.catch("register", scene.server)

    def _kill(self, victim: str, scene: Scene) -> None:
        victims = {"client": scene.client.process.pid, "agent": scene.agent, "server": scene.server}
        os.kill(victims[victim], signal.SIGKILL)
        until(lambda: is_gone(victims[victim]), f"the {victim} is dead")
        scene.stopped.discard(victims[victim])
        for process_id in tuple(scene.stopped):
            scene.go_on(process_id)

    def _without_client(self, scene: Scene, owned: set[str]) -> None:
        scene.client.kill()
        self._step(self._bystander)
        self._see_nothing_left(owned)

    def _without_server(self, scene: Scene) -> None:
        if scene.writes:
            allowed = {*(write.length for write in scene.writes), -errno.EREMOTEIO}
            assert set(scene.collect()) <= allowed
        if scene.read_bytes:
            assert scene.collect_read() == -errno.EREMOTEIO
        for client in (self._bystander, scene.client):
            # The agent starts a server, and both go on with what they have.
            until(lambda client=client: self._tried(client), "the path works again")  # type: ignore[misc]
        owned = shared_memory_of(scene.client.process.pid)
        self._ended(scene.client)
        self._see_nothing_left(owned)

    def _without_agent(self, scene: Scene, phase: str, owned: set[str]) -> None:
        if phase in {"publish", "register"}:
            assert scene.client.answer().get("errno") == errno.EREMOTEIO
        elif phase == "unpublish":
            scene.client.answer()
        if scene.writes:
            lengths = {write.length for write in scene.writes}
            results = scene.collect()
            assert set(results) <= {*lengths, -errno.EREMOTEIO}
            # What was in the ring stays; what was not will never be.
            assert (phase == "completed") == any(result > 0 for result in results), (phase, results)
        if scene.read_bytes:
            assert scene.collect_read() == -errno.EREMOTEIO
        owned |= shared_memory_of(scene.client.process.pid) | shared_memory_of(self._bystander.process.pid)
        self._bystander.tell("step", offset=0, length=_STEP_BYTES, seed=1)
        assert self._bystander.answer().get("errno") == errno.EREMOTEIO
        for client in (scene.client, self._bystander):
            self._ended(client)
        until(lambda: is_gone(scene.server), "the server of the dead agent has ended")
        self._agent.kill()
        self._start()
        names = {path.name for path in (self._mount / "3fs-virt").iterdir()}
        assert names <= {"agent.lock", "agent.sock", "iovs", "publications", "server.lock", "server.sock"}, names
        assert not owned & _shared_names()

    def _see_nothing_left(self, owned: set[str]) -> None:
        """Of a client that is gone; the bystander and its agent are as they were."""
        until(lambda: links(self._mount) == self._bystander.links, "the links of the client are gone")
        until(lambda: not owned & _shared_names(), "its shared memory is gone")
        agent = self._agent.process.pid
        until(lambda: not any(name in text for text in descriptors(agent) for name in owned), "its regions are gone")
        self._use_both_lanes()
        try:
            until(lambda: len(descriptors(agent)) == self._open_at_first, "the agent has what it had at first")
        except HungError as error:
            error.add_note(f"{self._open_at_first} at first, now {sorted(descriptors(agent))}")
            raise

    def _step(self, client: Client) -> None:
        offset = self._chance.randrange(MIB - _STEP_BYTES)
        client.ask("step", offset=offset, length=_STEP_BYTES, seed=self._chance.randrange(1 << 63))

    def _use_both_lanes(self) -> None:
        """A write and a read by each, since a lane opens what it needs when it is first used."""
        for _ in range(2):
            # Operations take the lanes in turn, so the third has the next write use the other one.
            self._step(self._bystander)
            self._bystander.ask("read", operations=[(0, MIB, 0)])
            assert self._bystander.ask("wait", for_read=True, count=1) == [[0, MIB]]

    def _tried(self, client: Client) -> bool:
        """A step, which may fail with the one code that says why."""
        if client is self._bystander:
            client.tell("step", offset=0, length=_STEP_BYTES, seed=2)
        else:
            # Its file has a model: only reads change nothing.
            client.tell("save", into=os.devnull)
        answer = client.answer()
        assert answer.get("errno") in {None, errno.EREMOTEIO}, answer
        results = answer.get("result")
        return results is True or (isinstance(results, list) and all(result > 0 for result in results))

    def _drawn_kind(self) -> str:
        self._kind = self._chance.choice(sorted(self.kinds))
        return self._kind

    def _started(self, file: Path, kind: str) -> Client:
        client = Client(self._mount, file, kind)
        self._processes.append(client)
        client.open()
        return client

    def _ended(self, client: Client) -> None:
        client.end()
        self._processes.remove(client)

    def _start(self) -> None:
        self._agent = AgentProcess(self._mount)
        assert links(self._mount) == set()
        self._bystander = self._started(self._other, "host")
        # What the agent opens with its first device memory, it keeps.
        self._ended(self._started(self._other, "device"))
        self._use_both_lanes()
        self._open_at_first = len(descriptors(self._agent.process.pid))

    def __enter__(self) -> Self:
        self._start()
        self._client = self._started(self._file, self._drawn_kind())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for client in (self._client, self._bystander):
                self._ended(client)
            assert self._agent.terminate() == 0, self._agent.errors
            return
        # Whoever is stopped goes on, and the agent ends as it should: it takes away what it and its clients have.
        for process_id in self._scene.stopped if self._scene else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)
        for client in self._processes:
            client.kill()
        if self._agent.process.poll() is None:
            self._agent.terminate()
        error.add_note(f"after {self.last}, and before it {self.hits}; the agent said: {self._agent.errors}")


def _shared_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}  # noqa: S108 - by its own place.
