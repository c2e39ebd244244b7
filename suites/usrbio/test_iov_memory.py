"""The memory of iovs: huge pages, reuse of the memory and registration of a destroyed iov, and removal of its files."""

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
from support.faults import inject_faults
from support.processes import list_open_paths, wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess, RawClient, RawIov, RawRing, Refusal

from gdrkit import pattern, usrbio
from gdrkit.errors import Api, UsageError
from gdrkit.harness.needs import host, needs, software, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.agent import plain_agent
from gdrkit.usrbio.agent.protocol import AgentRequest

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(verbs.nic())


def read_mapped_bytes(process_id: int | str) -> int:
    """Return how many bytes of address space a process has mapped."""
    status_lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status_lines if line.startswith("VmSize:"))


def ignore_block(_block: memoryview, _offset_bytes: int) -> None:
    """Do nothing with a block that was read."""


def test_read_file_leaves_little_memory_mapped(tmp_path: Path, evidence: Evidence) -> None:
    path = tmp_path / "file"
    path.write_bytes(pattern.payload(64 * MIB + 1, seed=5))
    with AgentProcess(tmp_path) as agent:
        # The first call starts threads, whose stacks stay mapped.
        usrbio.read_file(path, str(tmp_path), block_size=MIB, cb=ignore_block)
        mapped_bytes_before = {process_id: read_mapped_bytes(process_id) for process_id in ("self", agent.process.pid)}
        for _ in range(8):
            assert usrbio.read_file(path, str(tmp_path), block_size=64 * MIB, cb=ignore_block) is None
        added_bytes = [
            read_mapped_bytes(process_id) - bytes_before for process_id, bytes_before in mapped_bytes_before.items()
        ]
        evidence["added_bytes"] = added_bytes
        # The eight calls would add 512 MiB if their memory stayed mapped.
        assert max(added_bytes) < 64 * MIB
        assert agent.terminate() == 0, agent.error_output


UNSHARE_COMMAND = ("unshare", "--user", "--map-root-user", "--mount")


def run_with_own_mounts(module: str, *arguments: object) -> str:
    """Run a module as a program in a mount namespace of its own, and return its output."""
    command = [*UNSHARE_COMMAND, *module_command(module, *arguments)]
    completed = subprocess.run(command, env=suites_environ(), capture_output=True, text=True, check=False, timeout=100)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@needs(host.program(*UNSHARE_COMMAND, "echo", "allowed"))
def test_huge_pages_of_the_file_system_are_used(tmp_path: Path) -> None:
    length_bytes = 64 * MIB
    output = run_with_own_mounts("usrbio.huge_page_iov", tmp_path, length_bytes)
    assert json.loads(output) == {"client": length_bytes, "agent": length_bytes}


@needs(host.program(*UNSHARE_COMMAND, "echo", "allowed"))
def test_idle_memory_takes_at_most_half_of_dev_shm(tmp_path: Path) -> None:
    run_with_own_mounts("usrbio.small_shared_memory", tmp_path)


# Length of an iov whose memory the client library reuses.
REUSABLE_BYTES = 8 * MIB
# The program creates and destroys iovs in turn, and prints a JSON line for each: the name of its file in /dev/shm,
# whether it began with zeros, and the name of its link. It ends when its standard input is closed.
IOV_PROGRAM = """
import json, pathlib, sys
from gdrkit import usrbio
mount, sizes = sys.argv[1], [int(size) for size in sys.argv[2:]]
links_folder = pathlib.Path(mount, "3fs-virt", "iovs")
for size in sizes:
    with usrbio.create_iovec(mount, length_bytes=size) as iov:
        (link,) = [link for link in links_folder.iterdir() if not link.name.startswith("submit-ios")]
        memory = memoryview(iov)
        print(json.dumps([link.readlink().name, bytes(memory) == bytes(size), link.name]), flush=True)
        memory[:] = b"x" * size
        memory.release()
sys.stdin.read()
"""


def start_iov_program(mount: Path, *sizes: int) -> subprocess.Popen[str]:
    """Start IOV_PROGRAM with iovs of these sizes in bytes. The program keeps at most 64 MiB of idle memory."""
    environ = {**suites_environ(), "GDRKIT_USRBIO_HOST_POOL_BYTES": str(64 * MIB)}
    command = [sys.executable, "-c", IOV_PROGRAM, str(mount), *map(str, sizes)]
    return subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_iov_lines(process: subprocess.Popen[str], count: int) -> list[tuple[str, bool, str]]:
    """Return (file name, whether the iov began with zeros, link name) for each of the next `count` lines."""
    assert process.stdout is not None
    return [tuple(json.loads(process.stdout.readline())) for _ in range(count)]


def test_next_iov_of_the_same_size_gets_the_memory(tmp_path: Path) -> None:
    sizes = [REUSABLE_BYTES, REUSABLE_BYTES, 2 * REUSABLE_BYTES, REUSABLE_BYTES, 64 * KIB, 64 * KIB]
    with AgentProcess(tmp_path) as agent, start_iov_program(tmp_path, *sizes) as process:
        iov_lines = read_iov_lines(process, len(sizes))
        memory_paths = [Path("/dev/shm", name) for name, _, _ in iov_lines]  # noqa: S108 - the folder of shm_open(3).
        assert all(is_zero for _, is_zero, _ in iov_lines)
        assert len({link for _, _, link in iov_lines}) == len(sizes)
        assert memory_paths[0] == memory_paths[1] == memory_paths[3] != memory_paths[2]
        # The client does not reuse the memory of iovs below 4 MiB.
        assert memory_paths[4] != memory_paths[5]
        # The client frees memory that has been idle for 3 s.
        wait_until(lambda: not any(path.exists() for path in memory_paths), "the idle memory is freed", timeout_s=30)
        wait_until(lambda: count_open_iov_files(agent) == 0, "the agent has unmapped the idle memory", timeout_s=30)
        process.communicate("")
        assert agent.terminate() == 0, agent.error_output
        # One registration for each of the four files in /dev/shm.
        assert agent.statistics["registrations"] == 4


def test_idle_memory_is_freed_by_trim_host_pool(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        for _ in range(2):
            usrbio.create_iovec(str(tmp_path), length_bytes=REUSABLE_BYTES).close()
        assert count_open_iov_files(agent) == 1
        usrbio.trim_host_pool(idle_bytes_max=REUSABLE_BYTES)
        assert count_open_iov_files(agent) == 1
        usrbio.trim_host_pool()
        assert count_open_iov_files(agent) == 0
        with pytest.raises(UsageError, match="-1"):
            usrbio.trim_host_pool(idle_bytes_max=-1)
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] == 1


def test_agent_keeps_host_memory_until_it_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(pattern.payload(64 * KIB, seed=2))
    records_folder = tmp_path / "3fs-virt" / "publications"
    with (
        AgentProcess(tmp_path) as agent,
        RawClient(tmp_path) as client,
        contextlib.closing(RawIov(MIB)) as iov,
        contextlib.closing(RawRing(8, for_read=True)) as ring,
        (tmp_path / "input").open("rb") as file,
    ):
        client.publish_ring(ring)
        inode = client.register_file(file.fileno())

        def read_and_get_result(iov_id: bytes) -> int:
            ring.prepare(iov_id, inode=inode, length=4 * KIB)
            ring.submit()
            ((_, result, _),) = ring.wait(1)
            return result

        for _ in range(2):
            client.publish_iov(iov)
            assert unpublish_and_keep(client, iov.name()) == 1
            assert {path.name for path in records_folder.iterdir()} == {ring.link_name, iov.name()}
        next_id = uuid.uuid4()
        client.publish(str(next_id), str(iov.path))
        assert {path.name for path in records_folder.iterdir()} == {ring.link_name, str(next_id)}
        assert (read_and_get_result(next_id.bytes), read_and_get_result(iov.id.bytes)) == (4 * KIB, -errno.EACCES)
        pattern.check(iov.memory[: 4 * KIB], seed=2)
        with RawClient(tmp_path) as borrower:
            request = protocol.PublishRequest(str(next_id), str(iov.path), b"")
            borrower.request(AgentRequest.BORROW, protocol.pack_publish(request))
        # The agent does not keep memory that another client borrowed. It removes the file in /dev/shm.
        assert unpublish_and_keep(client, str(next_id)) == 0
        assert not iov.path.exists()
        with contextlib.closing(RawIov(MIB)) as second_iov:
            client.publish_iov(second_iov)
            assert unpublish_and_keep(client, second_iov.name()) == 1
            client.request(AgentRequest.DROP_KEPT, protocol.pack_number(0), [second_iov.fd])
            assert not second_iov.path.exists()
            with pytest.raises(Refusal, check=lambda error: error.errno == errno.ENOENT):
                client.request(AgentRequest.DROP_KEPT, protocol.pack_number(0), [second_iov.fd])
        with contextlib.closing(RawIov(MIB)) as third_iov:
            client.publish_iov(third_iov)
            client.publish(str(uuid.uuid4()), str(third_iov.path))
            # Memory that has a second publication is not kept.
            assert unpublish_and_keep(client, third_iov.name()) == 0
        assert len(list(records_folder.iterdir())) == 2  # The ring and the second publication still have records.
        assert agent.terminate() == 0, agent.error_output
        assert agent.statistics["registrations"] == 4


def unpublish_and_keep(client: RawClient, name: str) -> int:
    """Remove a publication, and return 1 if the agent keeps its registration, else 0."""
    return protocol.parse_number(client.request(AgentRequest.UNPUBLISH_AND_KEEP, protocol.pack_name(name)))


@needs(software(Api.VERBS))
def test_kept_memory_is_dropped_if_registration_fails(tmp_path: Path) -> None:
    with (
        plain_agent(tmp_path, tmp_path),
        RawClient(tmp_path) as first_client,
        RawClient(tmp_path) as second_client,
        contextlib.closing(RawIov(MIB)) as first_iov,
        contextlib.closing(RawIov(MIB)) as second_iov,
    ):
        first_client.publish_iov(first_iov)
        assert unpublish_and_keep(first_client, first_iov.name()) == 1
        # The next registration fails, as if it exceeded RLIMIT_MEMLOCK.
        with inject_faults(Api.VERBS, "ibv_reg_mr call=1 errno=ENOMEM"):
            second_client.publish_iov(second_iov)
        assert not first_iov.path.exists()


def test_late_bytes_do_not_reach_the_next_iov(tmp_path: Path) -> None:
    read_count, bytes_per_read = 32, 128 * KIB
    (tmp_path / "input").write_bytes(b"x" * read_count * bytes_per_read)
    with (
        AgentProcess(tmp_path) as agent,
        RawClient(tmp_path) as client,
        contextlib.closing(RawIov(read_count * bytes_per_read)) as iov,
        contextlib.closing(RawRing(read_count, for_read=True)) as ring,
        (tmp_path / "input").open("rb") as file,
    ):
        client.publish_ring(ring)
        inode = client.register_file(file.fileno())
        zeros = bytes(len(iov.memory))
        results = set()
        for _ in range(20):
            iov_id = uuid.uuid4()
            client.publish(str(iov_id), str(iov.path))
            for offset_bytes in range(0, read_count * bytes_per_read, bytes_per_read):
                ring.prepare(
                    iov_id.bytes,
                    inode=inode,
                    length=bytes_per_read,
                    buffer_offset=offset_bytes,
                    file_offset=offset_bytes,
                )
            ring.submit()
            # After the first read, other reads are in flight or have not begun. None of them may write to the kept
            # memory.
            completions = ring.wait(1)
            assert unpublish_and_keep(client, str(iov_id)) == 1
            iov.memory[:] = zeros
            completions += ring.wait(read_count - 1)
            assert iov.memory[:] == zeros
            results |= {result for _, result, _ in completions}
        assert results <= {bytes_per_read, -errno.EACCES}
        assert agent.terminate() == 0, agent.error_output


def test_memory_is_removed_at_exit_after_the_agent_was_killed(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent, start_iov_program(tmp_path, REUSABLE_BYTES, 64 * KIB) as process:
        (file_name, _, _), _ = read_iov_lines(process, 2)  # The first iov is destroyed before the second is created.
        memory_path = Path("/dev/shm", file_name)  # noqa: S108 - the folder of shm_open(3).
        process.send_signal(signal.SIGSTOP)  # A stopped client cannot free the memory itself.
        agent.kill()
        assert memory_path.exists()
        process.send_signal(signal.SIGCONT)
        process.communicate("")
        assert process.returncode == 0
        assert not memory_path.exists()


def count_open_iov_files(agent: AgentProcess) -> int:
    """Return how many files of iovs in /dev/shm an agent has open."""
    return sum("/dev/shm/hf3fs-iov-" in path for path in list_open_paths(agent.process.pid))  # noqa: S108 - the folder of shm_open(3).


@pytest.mark.parametrize("killed_process", ["client", "agent"])
def test_idle_memory_of_a_killed_process_is_removed(tmp_path: Path, killed_process: str) -> None:
    with AgentProcess(tmp_path) as agent, start_iov_program(tmp_path, REUSABLE_BYTES) as process:
        ((file_name, _, _),) = read_iov_lines(process, 1)
        memory_path = Path("/dev/shm", file_name)  # noqa: S108 - the folder of shm_open(3).
        # The name of the link of an iov is a UUID.
        wait_until(lambda: not any((tmp_path / "3fs-virt" / "iovs").glob("*-*-*-*-*")), "the iov is destroyed")
        assert memory_path.exists()
        process.send_signal(signal.SIGSTOP)  # A stopped client cannot free the memory itself.
        if killed_process == "agent":
            agent.kill()
        process.kill()
        process.communicate()
        if killed_process == "agent":
            assert memory_path.exists()
            with AgentProcess(tmp_path):
                assert not memory_path.exists()
        else:
            wait_until(lambda: not memory_path.exists(), "the agent removes the memory")
            assert not any((tmp_path / "3fs-virt" / "publications").iterdir())
