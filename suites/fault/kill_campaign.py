"""Campaign that kills clients, agents and storage servers of one mount.

After each kill, it checks what the other processes observe, that nothing is left, and that no acknowledged write is
lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fault.file_model import FileModel
from fault.kill_phases import ENTER, VICTIM_PHASES, Processes
from fault.usrbio_client import UsrbioClient, published_links, shared_memory_of
from support.kill_campaign import KillCampaign
from support.processes import HungError, is_gone, open_files, wait_until
from support.raw_usrbio import AgentProcess

from gdrkit import pattern
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from random import Random

    from fault.traps import Traps

__all__ = ["AgentCampaign"]

_FILE_BYTES = 4 * MIB
_STEP_BYTES = 64 * KIB
_SHARED = Path("/dev/shm")  # noqa: S108 - the folder of POSIX shared memory.


class AgentCampaign(KillCampaign[tuple[str, str]]):
    """Kills of (victim, phase) at one mount. Use it as a context manager.

    A client, which may be killed, writes to a file that has a model. A second client, the bystander, is never killed
    and uses another file.

    Parameters
    ----------
    mount : Path
        Empty folder for the mount.
    traps : Traps
        Traps of the fault plan that is in the environment.
    chance : Random
        Source of all random decisions.

    Attributes
    ----------
    kinds : dict of str to int
        Number of kills by the kind of the client's memory, ``host`` or ``device``.
    acknowledged : int
        Number of acknowledged writes.
    """

    def __init__(self, mount: Path, traps: Traps, chance: Random) -> None:
        super().__init__(VICTIM_PHASES, chance)
        self.kinds = {"host": 0, "device": 0}
        self.acknowledged = 0
        self._mount = mount
        self._traps = traps
        self._file, self._bystander_file = mount / "data", mount / "other"
        image = pattern.payload(_FILE_BYTES, seed=chance.randrange(1 << 63))
        self._file.write_bytes(image)
        self._bystander_file.write_bytes(bytes(MIB))
        self._model = FileModel(image)
        self._processes: Processes | None = None
        self._clients: list[UsrbioClient] = []

    def kill(self, phase: tuple[str, str]) -> None:
        """Kill a victim in a phase, and check everything that must hold afterwards."""
        victim, name = phase
        processes = self._processes = self._new_processes()
        lengths = [processes.segment_length() for _ in range(self._chance.randint(1, 3))]
        processes.submit(*lengths)
        assert sorted(processes.collect()) == sorted(lengths)
        if name == "session":
            self._enter_session(processes)
        else:
            ENTER[name](processes, self._file)
        memory = shared_memory_of(processes.client.process.pid)
        self._kill_victim(victim, processes)
        self.kinds[self._kind] += 1
        match victim:
            case "client":
                self._check_without_client(processes, memory)
            case "server":
                self._check_without_server(processes)
            case _:
                self._check_without_agent(processes, name, memory)
        # A new client reads the file.
        self._client = self._open_client(self._file, self._random_kind())
        copy = self._mount.parent / "copy"
        results = self._client.call("save", into=str(copy))
        assert isinstance(results, list)
        assert sum(results) == _FILE_BYTES, f"reads ended with {results}"
        self._model.settle(copy.read_bytes())
        self.acknowledged = self._model.acknowledged

    def _new_processes(self) -> Processes:
        return Processes(
            client=self._client,
            agent=self._agent.process.pid,
            server=self._agent.server_process_id(),
            traps=self._traps,
            model=self._model,
            chance=self._chance,
        )

    def _enter_session(self, processes: Processes) -> None:
        """Kill the server, and wait until the new one registers the memory of its first session."""
        old = processes.server
        self._traps.arm("register")
        os.kill(old, signal.SIGKILL)

        def new_servers() -> list[int]:
            return [child for child in self._agent.children() if child != old]

        wait_until(lambda: bool(new_servers()), "the agent starts another server")
        (processes.server,) = new_servers()
        processes.wait_for_trap("register", processes.server)

    def _kill_victim(self, victim: str, processes: Processes) -> None:
        """Kill the victim, and let the other stopped processes continue."""
        victims = {"client": processes.client.process.pid, "agent": processes.agent, "server": processes.server}
        os.kill(victims[victim], signal.SIGKILL)
        wait_until(lambda: is_gone(victims[victim]), f"the {victim} has ended")
        processes.stopped.discard(victims[victim])
        for process_id in tuple(processes.stopped):
            processes.resume(process_id)

    def _check_without_client(self, processes: Processes, memory: set[str]) -> None:
        processes.client.kill()
        self._step(self._bystander)
        self._check_nothing_left(memory)

    def _check_without_server(self, processes: Processes) -> None:
        if processes.writes:
            allowed = {*(write.length for write in processes.writes), -errno.EREMOTEIO}
            assert set(processes.collect()) <= allowed
        if processes.read_bytes:
            assert processes.collect_read() == -errno.EREMOTEIO
        for client in (self._bystander, processes.client):
            # The agent starts a new server, and both clients continue with their files, memory and rings.
            wait_until(lambda client=client: self._works(client), "the new server works")  # type: ignore[misc]
        memory = shared_memory_of(processes.client.process.pid)
        self._close_client(processes.client)
        self._check_nothing_left(memory)

    def _check_without_agent(self, processes: Processes, phase: str, memory: set[str]) -> None:
        if phase in {"publish", "register"}:
            assert processes.client.answer().get("errno") == errno.EREMOTEIO
        elif phase == "unpublish":
            processes.client.answer()
        if processes.writes:
            lengths = {write.length for write in processes.writes}
            results = processes.collect()
            assert set(results) <= {*lengths, -errno.EREMOTEIO}
            # Completions that were in the ring stay there. All other operations fail.
            assert (phase == "completed") == any(result > 0 for result in results), (phase, results)
        if processes.read_bytes:
            assert processes.collect_read() == -errno.EREMOTEIO
        memory |= shared_memory_of(processes.client.process.pid) | shared_memory_of(self._bystander.process.pid)
        self._bystander.start("step", offset=0, length=_STEP_BYTES, seed=1)
        assert self._bystander.answer().get("errno") == errno.EREMOTEIO
        for client in (processes.client, self._bystander):
            self._close_client(client)
        wait_until(lambda: is_gone(processes.server), "the server of the dead agent has ended")
        self._agent.kill()
        self._start_agent()
        names = {path.name for path in (self._mount / "3fs-virt").iterdir()}
        assert names <= {"agent.lock", "agent.sock", "iovs", "publications", "server.lock", "server.sock"}, names
        assert not memory & _shared_names()

    def _check_nothing_left(self, memory: set[str]) -> None:
        """Wait until nothing of a dead client is left. The bystander's links and the agent's descriptors remain."""
        wait_until(lambda: published_links(self._mount) == self._bystander.links, "the links of the client are gone")
        wait_until(lambda: not memory & _shared_names(), "the shared memory of the client is gone")
        agent = self._agent.process.pid
        wait_until(
            lambda: not any(name in file for file in open_files(agent) for name in memory),
            "the agent has released the memory of the client",
        )
        self._use_both_queue_pairs()
        try:
            wait_until(lambda: len(open_files(agent)) == self._files_at_start, "the agent has its first open files")
        except HungError as error:
            error.add_note(f"{self._files_at_start} at first, now {sorted(open_files(agent))}")
            raise

    def _step(self, client: UsrbioClient) -> None:
        offset = self._chance.randrange(MIB - _STEP_BYTES)
        client.call("step", offset=offset, length=_STEP_BYTES, seed=self._chance.randrange(1 << 63))

    def _use_both_queue_pairs(self) -> None:
        """Write and read with each queue pair of the session, because the agent opens files at their first use."""
        for _ in range(2):
            # Operations take the queue pairs in turn. After three operations, the next write takes the other one.
            self._step(self._bystander)
            self._bystander.call("read", operations=[(0, MIB, 0)])
            assert self._bystander.call("wait", for_read=True, count=1) == [[0, MIB]]

    def _works(self, client: UsrbioClient) -> bool:
        """Return whether operations of the client succeed. They may fail with EREMOTEIO only."""
        if client is self._bystander:
            client.start("step", offset=0, length=_STEP_BYTES, seed=2)
        else:
            # The file of this client has a model, so it only reads.
            client.start("save", into=os.devnull)
        answer = client.answer()
        assert answer.get("errno") in {None, errno.EREMOTEIO}, answer
        results = answer.get("result")
        return results is True or (isinstance(results, list) and all(result > 0 for result in results))

    def _random_kind(self) -> str:
        self._kind = self._chance.choice(sorted(self.kinds))
        return self._kind

    def _open_client(self, file: Path, kind: str) -> UsrbioClient:
        client = UsrbioClient(self._mount, file, kind)
        self._clients.append(client)
        client.open()
        return client

    def _close_client(self, client: UsrbioClient) -> None:
        client.close()
        self._clients.remove(client)

    def _start_agent(self) -> None:
        self._agent = AgentProcess(self._mount)
        assert published_links(self._mount) == set()
        self._bystander = self._open_client(self._bystander_file, "host")
        # The agent keeps the files that it opens with its first device memory.
        self._close_client(self._open_client(self._bystander_file, "device"))
        self._use_both_queue_pairs()
        self._files_at_start = len(open_files(self._agent.process.pid))

    def __enter__(self) -> Self:
        self._start_agent()
        self._client = self._open_client(self._file, self._random_kind())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for client in (self._client, self._bystander):
                self._close_client(client)
            assert self._agent.terminate() == 0, self._agent.errors
            return
        # The stopped processes continue, so that the agent can end and remove what it and its clients have created.
        for process_id in self._processes.stopped if self._processes else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)
        for client in self._clients:
            client.kill()
        if self._agent.process.poll() is None:
            self._agent.terminate()
        error.add_note(f"errors of the agent: {self._agent.errors}")


def _shared_names() -> set[str]:
    return {path.name for path in _SHARED.iterdir()}
