"""Kill campaign for usrbio (the user-space I/O of 3FS): it kills clients, agents and storage servers of one mount.

After each kill, the campaign makes three checks. The operations of the other processes have the expected results, the
killed process has left no resources, and no acknowledged write is lost. :mod:`fault.kill_phases` brings the processes
into the phase in which the campaign kills one of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fault.file_model import FileModel
from fault.kill_phases import ENTER_PHASE, KILL_POINTS, LOCAL_KILL_POINTS, Processes
from fault.usrbio_client import UsrbioClient, list_mapped_memory_names, list_published_link_names
from support.kill_campaign import KillCampaign
from support.processes import HungError, is_gone, list_open_paths, wait_until
from support.raw_usrbio import AgentProcess

from gdrkit import pattern
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from random import Random

    from fault.traps import Traps

__all__ = ["AgentCampaign"]

_FILE_BYTES = 4 * MIB
_VERIFIED_WRITE_BYTES = 64 * KIB
_SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of POSIX shared memory.


class AgentCampaign(KillCampaign[tuple[str, str]]):
    """A kill campaign for the processes of one mount. Use it as a context manager.

    A kill point is a pair: the process to kill (the victim: client, agent or server), and the name of the phase in
    which it is killed, such as ``transfer``. :data:`fault.kill_phases.KILL_POINTS` lists all of them.

    There are two clients. The first client may be killed, and writes to a file that has a :class:`FileModel`. The
    second client, the bystander, is never killed and uses another file.

    Parameters
    ----------
    mount : Path
        Empty folder for the mount.
    traps : Traps
        Traps that stop a process in a named call of a software twin. GDRKIT_TWINS_FAULTS must name their fault plan.
    rng : Random
        Source of all random decisions.
    local_reads : bool
        Whether the agent reads cached bytes itself. If so, the campaign has no phase in which the server transfers a
        read.

    Attributes
    ----------
    kills_by_memory_kind : dict of str to int
        Number of kills for each kind of the client's memory, ``host`` or ``device``.
    acknowledged_count : int
        Number of acknowledged writes.
    """

    def __init__(self, mount: Path, traps: Traps, rng: Random, *, local_reads: bool) -> None:
        super().__init__(LOCAL_KILL_POINTS if local_reads else KILL_POINTS, rng)
        self._local_reads = local_reads
        self.kills_by_memory_kind = {"host": 0, "device": 0}
        self.acknowledged_count = 0
        self._mount = mount
        self._traps = traps
        self._file_path, self._bystander_file_path = mount / "data", mount / "other"
        contents = pattern.payload(_FILE_BYTES, seed=rng.randrange(1 << 63))
        self._file_path.write_bytes(contents)
        self._bystander_file_path.write_bytes(bytes(MIB))
        self._file_model = FileModel(contents)
        self._processes: Processes | None = None
        self._clients: list[UsrbioClient] = []

    def kill(self, kill_point: tuple[str, str]) -> None:
        """Bring the processes into the phase, kill the victim, and make the checks after the kill."""
        victim, phase = kill_point
        processes = self._processes = self._make_processes()
        lengths = [processes.choose_length() for _ in range(self._rng.randint(1, 3))]
        processes.submit_writes(*lengths)
        assert sorted(processes.collect_writes()) == sorted(lengths)
        if phase == "session":
            self._enter_session(processes)
        else:
            ENTER_PHASE[phase](processes, self._file_path)
        shared_memory_names = list_mapped_memory_names(processes.client.process.pid)
        self._kill_victim(victim, processes)
        self.kills_by_memory_kind[self._memory_kind] += 1
        match victim:
            case "client":
                self._check_without_client(processes, shared_memory_names)
            case "server":
                self._check_without_server(processes)
            case _:
                self._check_without_agent(processes, phase, shared_memory_names)
        # A new client reads the whole file through the agent.
        self._client = self._open_client(self._file_path, self._choose_memory_kind())
        copy_path = self._mount.parent / "copy"
        results = self._client.call("save", copy_path=str(copy_path))
        assert isinstance(results, list)
        assert sum(results) == _FILE_BYTES, f"the results of the reads are {results}"
        self._file_model.check_and_adopt(copy_path.read_bytes())
        self.acknowledged_count = self._file_model.acknowledged_count

    def _make_processes(self) -> Processes:
        return Processes(
            client=self._client,
            agent_process_id=self._agent.process.pid,
            server_process_id=self._agent.find_server_process_id(),
            traps=self._traps,
            file_model=self._file_model,
            rng=self._rng,
        )

    def _enter_session(self, processes: Processes) -> None:
        """Kill the server, and wait until a new server registers the memory of its first session."""
        old_server_process_id = processes.server_process_id
        self._traps.arm("register")
        os.kill(old_server_process_id, signal.SIGKILL)

        def list_new_servers() -> list[int]:
            return [pid for pid in self._agent.list_child_process_ids() if pid != old_server_process_id]

        wait_until(lambda: bool(list_new_servers()), "the agent starts another server")
        (processes.server_process_id,) = list_new_servers()
        processes.wait_for_trap("register", processes.server_process_id)

    def _kill_victim(self, victim: str, processes: Processes) -> None:
        """Kill the victim, and resume the other processes that are stopped."""
        process_ids = {
            "client": processes.client.process.pid,
            "agent": processes.agent_process_id,
            "server": processes.server_process_id,
        }
        os.kill(process_ids[victim], signal.SIGKILL)
        wait_until(lambda: is_gone(process_ids[victim]), f"the {victim} has ended")
        processes.stopped_process_ids.discard(process_ids[victim])
        for process_id in tuple(processes.stopped_process_ids):
            processes.resume(process_id)

    def _check_without_client(self, processes: Processes, shared_memory_names: set[str]) -> None:
        """Check that the killed client has left nothing, and that the bystander continues."""
        # The client is already dead. This call waits for the process and closes its pipes.
        processes.client.kill()
        self._write_and_verify(self._bystander)
        self._check_nothing_left(shared_memory_names)

    def _check_without_server(self, processes: Processes) -> None:
        """Check that the pending operations fail or are complete, and that both clients continue with a new server."""
        if processes.pending_writes:
            allowed_results = {*(write.length_bytes for write in processes.pending_writes), -errno.EREMOTEIO}
            assert set(processes.collect_writes()) <= allowed_results
        if processes.pending_read_bytes:
            assert processes.collect_read() == -errno.EREMOTEIO
        for client in (self._bystander, processes.client):
            # The agent starts a new server, and both clients continue with their files, memory and rings.
            wait_until(lambda client=client: self._is_served(client), "the new server works")  # type: ignore[misc]
        shared_memory_names = list_mapped_memory_names(processes.client.process.pid)
        self._close_client(processes.client)
        self._check_nothing_left(shared_memory_names)

    def _check_without_agent(self, processes: Processes, phase: str, shared_memory_names: set[str]) -> None:
        """Check that the operations of both clients fail, and that a new agent removes what the killed agent left."""
        # In these three phases, the client waits for a reply. The call of the phase "unpublish" may also succeed.
        if phase in {"publish", "register"}:
            assert processes.client.read_reply().get("errno") == errno.EREMOTEIO
        elif phase == "unpublish":
            processes.client.read_reply()
        if processes.pending_writes:
            lengths = {write.length_bytes for write in processes.pending_writes}
            results = processes.collect_writes()
            assert set(results) <= {*lengths, -errno.EREMOTEIO}
            # Completions that were already in the ring stay there. All other operations fail.
            assert (phase == "completed") == any(result > 0 for result in results), (phase, results)
        if processes.pending_read_bytes:
            assert processes.collect_read() == -errno.EREMOTEIO
        shared_memory_names |= list_mapped_memory_names(processes.client.process.pid) | list_mapped_memory_names(
            self._bystander.process.pid
        )
        self._bystander.start("write_and_verify", offset=0, length=_VERIFIED_WRITE_BYTES, seed=1)
        assert self._bystander.read_reply().get("errno") == errno.EREMOTEIO
        for client in (processes.client, self._bystander):
            self._close_client(client)
        wait_until(lambda: is_gone(processes.server_process_id), "the server of the dead agent has ended")
        self._agent.kill()
        self._start_agent()
        entry_names = {path.name for path in (self._mount / "3fs-virt").iterdir()}
        permanent_names = {"agent.lock", "agent.sock", "iovs", "publications", "server.lock", "server.sock"}
        assert entry_names <= permanent_names, entry_names
        assert not shared_memory_names & _list_all_memory_names()

    def _check_nothing_left(self, shared_memory_names: set[str]) -> None:
        """Wait until the agent has released the links, the shared memory and the open files of an ended client."""
        wait_until(
            lambda: list_published_link_names(self._mount) == self._bystander.link_names,
            "the links of the client are gone",
        )
        wait_until(
            lambda: not shared_memory_names & _list_all_memory_names(), "the shared memory of the client is gone"
        )
        agent_process_id = self._agent.process.pid
        wait_until(
            lambda: not any(name in path for path in list_open_paths(agent_process_id) for name in shared_memory_names),
            "the agent has released the memory of the client",
        )
        self._use_both_queue_pairs()
        try:
            wait_until(
                lambda: len(list_open_paths(agent_process_id)) == self._initial_open_file_count,
                "the agent has as many open files as at its start",
            )
        except HungError as error:
            error.add_note(
                f"{self._initial_open_file_count} open files at the start of the agent, "
                f"now {sorted(list_open_paths(agent_process_id))}"
            )
            raise

    def _write_and_verify(self, client: UsrbioClient) -> None:
        """Let a client write a random range of its file, read it again, and compare the data."""
        offset = self._rng.randrange(MIB - _VERIFIED_WRITE_BYTES)
        client.call("write_and_verify", offset=offset, length=_VERIFIED_WRITE_BYTES, seed=self._rng.randrange(1 << 63))

    def _use_both_queue_pairs(self) -> None:
        """Write and read with both queue pairs, because the agent opens files at the first use of each queue pair."""
        if self._local_reads:
            # The reads below use no queue pair. After a write of 1 MiB, the agent changes to the other queue pair.
            for _ in range(2):
                self._bystander.call("write", operations=[(0, MIB, 0)])
                assert self._bystander.call("wait", for_read=False, count=1) == [[0, MIB]]
        for _ in range(2):
            # The agent changes the queue pair after 256 KiB. The last read of a round exceeds this length, so the next
            # round uses the other queue pair.
            self._write_and_verify(self._bystander)
            self._bystander.call("read", operations=[(0, MIB, 0)])
            assert self._bystander.call("wait", for_read=True, count=1) == [[0, MIB]]

    def _is_served(self, client: UsrbioClient) -> bool:
        """Return whether operations of the client succeed. EREMOTEIO is the only allowed error."""
        if client is self._bystander:
            client.start("write_and_verify", offset=0, length=_VERIFIED_WRITE_BYTES, seed=2)
        else:
            # A write would change the file, whose contents the model tracks. So this client only reads.
            client.start("save", copy_path=os.devnull)
        reply = client.read_reply()
        assert reply.get("errno") in {None, errno.EREMOTEIO}, reply
        results = reply.get("result")
        return results is True or (isinstance(results, list) and all(result > 0 for result in results))

    def _choose_memory_kind(self) -> str:
        self._memory_kind = self._rng.choice(sorted(self.kills_by_memory_kind))
        return self._memory_kind

    def _open_client(self, file_path: Path, memory_kind: str) -> UsrbioClient:
        client = UsrbioClient(self._mount, file_path, memory_kind)
        self._clients.append(client)
        client.open()
        return client

    def _close_client(self, client: UsrbioClient) -> None:
        client.close()
        self._clients.remove(client)

    def _start_agent(self) -> None:
        self._agent = AgentProcess(self._mount, "--local-reads" if self._local_reads else "--no-local-reads")
        assert list_published_link_names(self._mount) == set()
        self._bystander = self._open_client(self._bystander_file_path, "host")
        # The first client with device memory makes the agent open files that stay open. Therefore such a client runs
        # before the open files are counted.
        self._close_client(self._open_client(self._bystander_file_path, "device"))
        self._use_both_queue_pairs()
        self._initial_open_file_count = len(list_open_paths(self._agent.process.pid))

    def __enter__(self) -> Self:
        self._start_agent()
        self._client = self._open_client(self._file_path, self._choose_memory_kind())
        return self

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            for client in (self._client, self._bystander):
                self._close_client(client)
            assert self._agent.terminate() == 0, self._agent.error_output
            return
        # Resume the stopped processes, so that the agent can end and remove what it and its clients have created.
        for process_id in self._processes.stopped_process_ids if self._processes else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)
        for client in self._clients:
            client.kill()
        if self._agent.process.poll() is None:
            self._agent.terminate()
        error.add_note(f"errors of the agent: {self._agent.error_output}")


def _list_all_memory_names() -> set[str]:
    """Return the names of all files of POSIX shared memory, of any process."""
    return {path.name for path in _SHM_FOLDER.iterdir()}
