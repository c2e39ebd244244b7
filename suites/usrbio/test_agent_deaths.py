"""A usrbio agent whose clients or storage server are killed or stopped, and an agent that is killed or terminated."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.other_user import folder_for_all_users, run_program
from support.processes import wait_until
from support.python_child import suites_environ
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, list_shared_memory_files

from gdrkit import pattern
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = needs(verbs.nic())

BUSY_CLIENT_PROGRAM = """
import os, sys
from pathlib import Path
from support.python_child import suites_environ
from support.raw_usrbio import RawClient, RawIov, RawRing
mount = Path(sys.argv[1])
client, iov, ring = RawClient(mount), RawIov(1 << 20), RawRing(32, for_read=True)
client.publish_iov(iov)
client.publish_ring(ring)
inode = client.register_file(os.open(mount / "file", os.O_RDONLY))
print("published", flush=True)
for _ in range(1 << 30):
    for read_index in range(16):
        ring.prepare(iov.id.bytes, inode=inode, length=64 << 10, buffer_offset=read_index << 16)
    ring.submit()
    ring.wait(16)
"""


@pytest.fixture
def mount(tmp_path: Path, seed: int) -> Path:
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=seed))
    return tmp_path


def list_published_link_names(mount: Path) -> set[str]:
    """Return the names of the links by which clients publish iovs and rings, without the agent's own semaphores."""
    return {link.name for link in (mount / "3fs-virt" / "iovs").iterdir() if not link.name.startswith("submit-ios")}


@contextlib.contextmanager
def run_busy_client(mount: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a client that reads a file again and again, until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", BUSY_CLIENT_PROGRAM, str(mount)],
        stdout=subprocess.PIPE,
        text=True,
        env=suites_environ(),
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "published\n"
            yield process
        finally:
            process.kill()


def test_killed_client_leaves_nothing(mount: Path) -> None:
    # The agent keeps a record of each publication in this folder.
    records_folder = mount / "3fs-virt" / "publications"
    with AgentProcess(mount) as agent:
        with run_busy_client(mount) as client:
            assert len(list_published_link_names(mount)) == 2
            memory_files = list_shared_memory_files(mount)
            client.kill()
            client.wait()
            # The agent first removes the link of a publication, and then its record.
            wait_until(
                lambda: not list_published_link_names(mount) and not any(records_folder.iterdir()),
                "the links and records of the killed client are removed",
                timeout_s=60,
            )
        # Only the submit semaphores of the agent are left.
        assert {path for path in memory_files if path.exists()} == list_shared_memory_files(mount)
        assert agent.terminate() == 0, agent.error_output


def test_next_agent_removes_what_a_killed_agent_left(mount: Path) -> None:
    with AgentProcess(mount) as killed_agent, run_busy_client(mount) as client:
        memory_files = list_shared_memory_files(mount)
        # The memory and the ring of the client, and the three submit semaphores of the agent.
        assert len(memory_files) == 5
        killed_agent.kill()
        client.kill()
        client.wait()
    with AgentProcess(mount) as next_agent:
        assert list_published_link_names(mount) == set()
        assert [path for path in memory_files if path.exists()] == []
        with RawClient(mount) as new_client:
            new_client.hello()
        assert next_agent.terminate() == 0, next_agent.error_output


def test_memory_of_a_running_client_survives_its_agent(mount: Path) -> None:
    iov = RawIov(64 * KIB)
    try:
        with AgentProcess(mount) as killed_agent:
            client = RawClient(mount)
            client.publish_iov(iov)
            killed_agent.kill()
        assert client.receive() == b""
        client.close()
        with AgentProcess(mount), RawClient(mount) as client:
            assert iov.path.exists()
            client.publish_iov(iov)
            client.unpublish(iov.name())
    finally:
        iov.close()


def test_killed_server_is_started_again(mount: Path, seed: int) -> None:
    with AgentProcess(mount) as agent, RawClient(mount) as client, contextlib.ExitStack() as stack:
        iov, ring = RawIov(MIB), RawRing(32, for_read=True)
        stack.callback(iov.close)
        stack.callback(ring.close)
        client.publish_iov(iov)
        client.publish_ring(ring)
        fd = os.open(mount / "file", os.O_RDONLY)
        stack.callback(os.close, fd)
        inode = client.register_file(fd)
        os.kill(agent.find_server_process_id(), signal.SIGKILL)
        results: list[int] = []

        def is_served_again() -> bool:
            ring.prepare(iov.id.bytes, inode=inode, length=MIB)
            ring.submit()
            ((_, result, _),) = ring.wait(1)
            assert result in {MIB, -errno.EREMOTEIO}
            results.append(result)
            return result == MIB and -errno.EREMOTEIO in results

        wait_until(is_served_again, "a new server serves the ring", timeout_s=60)
        pattern.check(iov.memory[:], seed=seed)
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["session_renewals"] == 1


def test_agent_ends_during_transfers_of_its_clients(mount: Path) -> None:
    with AgentProcess(mount) as agent, run_busy_client(mount) as client:
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["outstanding"] >= 0
        client.kill()
        client.wait()
        assert list_published_link_names(mount) == set()


@needs(host.capability("CAP_SETUID"))
def test_other_user_is_refused_by_the_agent() -> None:
    with folder_for_all_users() as mount, AgentProcess(mount) as agent:
        # Normally the mode of the socket refuses other users. With this mode, the agent itself must refuse them.
        for path in (mount / "3fs-virt", mount / "3fs-virt" / "agent.sock"):
            path.chmod(0o777)
        result = run_program(OTHER_USER_PROGRAM, str(mount))
        assert result.stdout == f"{errno.EACCES}\n", result.stderr
        assert agent.terminate() == 0, agent.error_output


OTHER_USER_PROGRAM = """
import sys
from pathlib import Path
from support.python_child import suites_environ
from support.raw_usrbio import RawClient, Refusal
from support.other_user import become_unprivileged
become_unprivileged()
try:
    RawClient(Path(sys.argv[1])).hello()
except Refusal as error:
    print(error.errno)
"""


def stop_server_and_submit(
    agent: AgentProcess, client: RawClient, stack: contextlib.ExitStack
) -> tuple[RawIov, RawRing, int]:
    """Publish an iov and a ring, stop the server, and submit a read.

    Return the iov, the ring, and the process id of the server.
    """
    iov, ring = RawIov(MIB), RawRing(32, for_read=True)
    stack.callback(iov.close)
    stack.callback(ring.close)
    client.publish_iov(iov)
    client.publish_ring(ring)
    fd = os.open(client.mount / "file", os.O_RDONLY)
    stack.callback(os.close, fd)
    inode = client.register_file(fd)
    server_process_id = agent.find_server_process_id()
    os.kill(server_process_id, signal.SIGSTOP)
    stack.callback(continue_process, server_process_id)
    ring.prepare(iov.id.bytes, inode=inode, length=MIB)
    ring.submit()
    return iov, ring, server_process_id


def continue_process(process_id: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGCONT)


def test_hanging_server_is_killed_and_writes_nothing_later(mount: Path, seed: int) -> None:
    with (
        AgentProcess(mount, "--no-local-reads", "--silence-ms", "1000") as agent,
        RawClient(mount) as client,
        contextlib.ExitStack() as stack,
    ):
        iov, ring, server_process_id = stop_server_and_submit(agent, client, stack)
        assert [result for _, result, _ in ring.wait(1)] == [-errno.EREMOTEIO]
        # The old server must not overwrite this memory when it continues.
        iov.memory[:] = b"\xee" * MIB
        continue_process(server_process_id)
        inode = (mount / "file").stat().st_ino

        def is_served_again() -> bool:
            ring.prepare(iov.id.bytes, inode=inode, length=4096, file_offset=4096)
            ring.submit()
            ((_, result, _),) = ring.wait(1)
            assert result in {4096, -errno.EREMOTEIO}
            return result == 4096

        wait_until(is_served_again, "a new server serves the ring", timeout_s=60)
        assert iov.memory[:4096] == pattern.payload(MIB, seed=seed)[4096:8192]
        assert iov.memory[4096:] == b"\xee" * (MIB - 4096)
        assert agent.find_server_process_id() != server_process_id
        assert agent.terminate() == 0, agent.error_output


def test_memory_is_not_written_after_the_connection_ends(mount: Path) -> None:
    with (
        AgentProcess(mount, "--no-local-reads", "--silence-ms", "2000") as agent,
        RawClient(mount) as client,
        contextlib.ExitStack() as stack,
    ):
        iov, ring, server_process_id = stop_server_and_submit(agent, client, stack)
        agent.process.send_signal(signal.SIGTERM)
        # The agent closes the connection only when no operation of the client is in flight.
        assert client.receive() == b""
        assert [result for _, result, _ in ring.wait(1, timeout_s=0.1)] == [-errno.EREMOTEIO]
        iov.memory[:] = b"\xee" * MIB
        continue_process(server_process_id)
        assert agent.terminate() == 0, agent.error_output
        assert iov.memory[:] == b"\xee" * MIB
