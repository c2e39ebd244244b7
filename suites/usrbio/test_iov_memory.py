"""The memory of iovs: huge pages of ``/dev/shm``, and what stays mapped after an iov has ended."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import open_files, wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal

from gdrkit import pattern, usrbio
from gdrkit.errors import UsageError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.protocol import AgentRequest

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())


def mapped_bytes(process_id: int | str) -> int:
    """Return the bytes of address space that a process has mapped."""
    fields = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmSize:"))


def ignore_block(_block: memoryview, _offset_bytes: int) -> None:
    """Do nothing with a block that was read."""


def test_read_file_leaves_little_memory_mapped(tmp_path: Path, evidence: Evidence) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(64 * MIB + 1, seed=5))
    with AgentProcess(tmp_path) as agent:
        # The first call starts threads, whose stacks stay mapped.
        usrbio.read_file(path, str(tmp_path), block_size=MIB, cb=ignore_block)
        before_bytes = {process: mapped_bytes(process) for process in ("self", agent.process.pid)}
        for _ in range(8):
            assert usrbio.read_file(path, str(tmp_path), block_size=64 * MIB, cb=ignore_block) is None

        def added_bytes() -> int:
            added = [mapped_bytes(process) - size_bytes for process, size_bytes in before_bytes.items()]
            evidence["added_bytes"] = added
            return max(added)

        wait_until(lambda: added_bytes() < 64 * MIB, "client and agent unmap the memory", timeout_s=10)
        assert agent.terminate() == 0, agent.error_output


@needs(host.program("unshare", "--user", "--map-root-user", "--mount", "echo", "allowed"))
def test_huge_pages_of_the_file_system_are_used(tmp_path: Path) -> None:
    length_bytes = 64 * MIB
    completed = subprocess.run(
        [
            "unshare",
            "--user",
            "--map-root-user",
            "--mount",
            *module_command("usrbio.huge_page_iov", tmp_path, length_bytes),
        ],
        env=suites_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout) == {"client": length_bytes, "agent": length_bytes}


POOLED_BYTES = 8 * MIB
# The program creates and destroys iovs in turn, and prints a JSON line for each: the name of its memory, and whether it
# began with zeros. It ends when its standard input is closed.
POOLED_PROGRAM = """
import json, pathlib, sys
from gdrkit import usrbio
mount, sizes = sys.argv[1], [int(size) for size in sys.argv[2:]]
links = pathlib.Path(mount, "3fs-virt", "iovs")
for size in sizes:
    with usrbio.create_iovec(mount, length_bytes=size) as iov:
        (link,) = [link for link in links.iterdir() if not link.name.startswith("submit-ios")]
        memory = memoryview(iov)
        print(json.dumps([link.readlink().name, bytes(memory) == bytes(size), link.name]), flush=True)
        memory[:] = b"x" * size
        memory.release()
sys.stdin.read()
"""


def pooled_process(mount: Path, *sizes: int) -> subprocess.Popen[str]:
    """Start POOLED_PROGRAM."""
    environ = {**suites_environ(), "GDRKIT_USRBIO_HOST_POOL_BYTES": str(64 * MIB)}
    command = [sys.executable, "-c", POOLED_PROGRAM, str(mount), *map(str, sizes)]
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_lines(process: subprocess.Popen[str], count: int) -> list[tuple[str, bool, str]]:
    assert process.stdout is not None
    return [tuple(json.loads(process.stdout.readline())) for _ in range(count)]


def test_next_iov_of_the_same_size_gets_the_memory(tmp_path: Path) -> None:
    sizes = [POOLED_BYTES, POOLED_BYTES, 2 * POOLED_BYTES, POOLED_BYTES, 64 * KIB, 64 * KIB]
    with AgentProcess(tmp_path) as agent, pooled_process(tmp_path, *sizes) as process:
        lines = read_lines(process, len(sizes))
        memory = [Path("/dev/shm", name) for name, _, _ in lines]  # noqa: S108 - the folder of shm_open(3).
        assert all(is_zero for _, is_zero, _ in lines)
        assert len({link for _, _, link in lines}) == len(sizes)
        assert memory[0] == memory[1] == memory[3] != memory[2]
        assert memory[4] != memory[5]
        # Memory is idle for at most 3 s.
        wait_until(lambda: not any(path.exists() for path in memory), "the idle memory is freed", timeout_s=30)
        wait_until(lambda: shared_memory_of(agent) == 0, "the agent has unmapped it", timeout_s=30)
        process.communicate("")
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] == 4


def test_idle_memory_is_freed_by_trim_host_pool(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        for _ in range(2):
            usrbio.create_iovec(str(tmp_path), length_bytes=POOLED_BYTES).close()
        assert shared_memory_of(agent) == 1
        usrbio.trim_host_pool(idle_bytes_max=POOLED_BYTES)
        assert shared_memory_of(agent) == 1
        usrbio.trim_host_pool()
        assert shared_memory_of(agent) == 0
        with pytest.raises(UsageError, match="-1"):
            usrbio.trim_host_pool(idle_bytes_max=-1)
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] == 1


def test_agent_keeps_host_memory_until_it_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(pattern.payload(64 * KIB, seed=2))
    records = tmp_path / "3fs-virt" / "publications"
    with (
        AgentProcess(tmp_path) as agent,
        RawClient(tmp_path) as client,
        contextlib.closing(RawIov(MIB)) as iov,
        contextlib.closing(RawRing(8, for_read=True)) as ring,
        (tmp_path / "input").open("rb") as file,
    ):
        client.publish_ring(ring)
        inode = client.register_file(file.fileno())

        def keep(name: str) -> int:
            return protocol.parse_number(client.request(AgentRequest.UNPUBLISH_AND_KEEP, protocol.pack_name(name)))

        def result_of(iov_id: bytes) -> int:
            ring.prepare(iov_id, inode=inode, length=4 * KIB)
            ring.submit()
            return ring.wait(1)[0][1]

        for _ in range(2):
            client.publish_iov(iov)
            assert keep(iov.name()) == 1
            assert {path.name for path in records.iterdir()} == {ring.link, iov.name()}
        next_id = uuid.uuid4()
        client.publish(str(next_id), str(iov.path))
        assert {path.name for path in records.iterdir()} == {ring.link, str(next_id)}
        assert (result_of(next_id.bytes), result_of(iov.id.bytes)) == (4 * KIB, -errno.EACCES)
        pattern.check(iov.memory[: 4 * KIB], seed=2)
        with RawClient(tmp_path) as borrower:
            request = protocol.PublishRequest(str(next_id), str(iov.path), b"")
            borrower.request(AgentRequest.BORROW, protocol.pack_publish(request))
        # Memory that was borrowed is not kept, and loses its name.
        assert keep(str(next_id)) == 0
        assert not iov.path.exists()
        with contextlib.closing(RawIov(MIB)) as second:
            client.publish_iov(second)
            assert keep(second.name()) == 1
            client.request(AgentRequest.DROP_KEPT, protocol.pack_number(0), [second.fd])
            assert not second.path.exists()
            with pytest.raises(Refusal, check=lambda error: error.errno == errno.ENOENT):
                client.request(AgentRequest.DROP_KEPT, protocol.pack_number(0), [second.fd])
        with contextlib.closing(RawIov(MIB)) as third:
            client.publish_iov(third)
            client.publish(str(uuid.uuid4()), str(third.path))
            # Memory that has a second publication is not kept.
            assert keep(third.name()) == 0
        assert len(list(records.iterdir())) == 2  # The ring, and the second publication.
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] == 4


def shared_memory_of(agent: AgentProcess) -> int:
    """Return the number of files in /dev/shm with the memory of iovs that an agent has open."""
    return sum("/dev/shm/hf3fs-iov-" in name for name in open_files(agent.process.pid))  # noqa: S108 - as above.


@pytest.mark.parametrize("killed", ["client", "agent"])
def test_idle_memory_of_a_killed_process_is_removed(tmp_path: Path, killed: str) -> None:
    with AgentProcess(tmp_path) as agent, pooled_process(tmp_path, POOLED_BYTES) as process:
        ((name, _, _),) = read_lines(process, 1)
        path = Path("/dev/shm", name)  # noqa: S108 - the folder of shm_open(3).
        wait_until(lambda: not any((tmp_path / "3fs-virt" / "iovs").glob("*-*-*-*-*")), "the iov is destroyed")
        assert path.exists()
        process.send_signal(signal.SIGSTOP)  # So it frees no memory while the agent ends.
        if killed == "agent":
            agent.kill()
        process.kill()
        process.communicate()
        if killed == "agent":
            assert path.exists()
            with AgentProcess(tmp_path):
                assert not path.exists()
        else:
            wait_until(lambda: not path.exists(), "the agent removes the memory")
            assert not any((tmp_path / "3fs-virt" / "publications").iterdir())
