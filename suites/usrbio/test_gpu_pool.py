"""The GPU memory pool of the usrbio client library, and the registrations that the agent keeps for it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.ledger import read_call_counts
from support.processes import wait_until
from support.python_child import module_command, suites_environ
from support.raw_usrbio import AgentProcess, RawClient, Refusal
from usrbio.borrower import Borrower

from gdrkit import cuda, pattern, usrbio
from gdrkit.errors import Api, UsageError
from gdrkit.handles import live
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio.agent import protocol
from gdrkit.usrbio.agent.agent import plain_agent
from gdrkit.usrbio.agent.protocol import AgentRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.usrbio.native_types import Iovec

pytestmark = needs(verbs.nic(), verbs.dmabuf_region, cuda_needs.device(), cuda_needs.dmabuf_export)

# Limits of the pool of this process: bytes of idle memory, and an idle time that no case reaches.
POOL_IDLE_BYTES_MAX = 64 * MIB
LONG_IDLE_MS = 10 * 60 * 1000
# One client creates IOV_COUNT iovs. The agent may register memory at most REGISTRATIONS_MAX times for them.
IOV_COUNT = 10_000
REGISTRATIONS_MAX = 32


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Set the limits of the pool of this process, yield a running agent, and free the idle memory of the pool."""
    usrbio.limit_gpu_pool(idle_bytes_max=POOL_IDLE_BYTES_MAX, idle_ms_max=LONG_IDLE_MS)
    with AgentProcess(tmp_path) as agent_process:
        yield agent_process
        usrbio.trim_gpu_pool()
    assert agent_process.process.returncode == 0, agent_process.error_output


@pytest.fixture
def device() -> Iterator[cuda.Device]:
    with cuda.Device(0) as opened_device:
        yield opened_device


def read_contents(device: cuda.Device, iov: Iovec) -> bytes:
    with cuda.borrow(device, iov.address, length_bytes=len(iov)) as memory:
        return memory.read(offset_bytes=0, length_bytes=len(iov))


def fill(device: cuda.Device, iov: Iovec, byte: int) -> None:
    with cuda.borrow(device, iov.address, length_bytes=len(iov)) as memory:
        memory.write(bytes([byte]) * len(iov), offset_bytes=0)


def list_link_names(mount: Path) -> set[str]:
    """Return the names of the links by which clients publish iovs and rings."""
    return {entry.name for entry in (mount / "3fs-virt" / "iovs").iterdir() if not entry.name.startswith("submit-ios")}


def start_client_process(mount: Path, iov_count: int, seed: int, *options: str) -> subprocess.Popen[str]:
    command = module_command("usrbio.pooled_client", mount, iov_count, seed, *options)
    return subprocess.Popen(command, env=suites_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@needs(software(Api.VERBS))
@pytest.mark.timeout(600)
def test_iovs_of_mixed_sizes_need_few_registrations(tmp_path: Path, seed: int) -> None:
    # The agent is in this process, so this process can count the agent's calls of ibv_reg_dmabuf_mr.
    with plain_agent(tmp_path, tmp_path) as agent:
        registrations_before = read_call_counts(Api.VERBS).get("ibv_reg_dmabuf_mr", 0)
        with start_client_process(tmp_path, IOV_COUNT, seed) as process:
            output, _ = process.communicate(timeout=500)
        assert process.returncode == 0
        statistics = json.loads(output)
        assert 0 < read_call_counts(Api.VERBS)["ibv_reg_dmabuf_mr"] - registrations_before <= REGISTRATIONS_MAX, (
            statistics
        )
        assert statistics["hits"] + statistics["misses"] == IOV_COUNT
        assert statistics["misses"] == agent.statistics()["registrations"]
        assert list_link_names(tmp_path) == set()


def test_next_iov_reuses_memory_with_zeros_and_another_id(agent: AgentProcess, device: cuda.Device) -> None:
    statistics_before = usrbio.gpu_pool_statistics()
    with usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB) as first_iov:
        address, first_link_names = first_iov.address, list_link_names(agent.mount)
        fill(device, first_iov, 0xA5)
    assert list_link_names(agent.mount) == set()
    assert usrbio.gpu_pool_statistics().idle_bytes == MIB
    with usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB - 4097) as second_iov:
        assert second_iov.address == address
        assert not list_link_names(agent.mount) & first_link_names
        assert read_contents(device, second_iov) == bytes(MIB - 4097)
        statistics = usrbio.gpu_pool_statistics()
        assert (statistics.idle_blocks, statistics.in_use_bytes) == (0, MIB)
    assert statistics.hits - statistics_before.hits == 1
    assert statistics.misses - statistics_before.misses == 1


def test_file_is_read_into_a_part_of_reused_memory(agent: AgentProcess, device: cuda.Device, seed: int) -> None:
    (agent.mount / "file").write_bytes(pattern.payload(MIB, seed=seed))
    usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB).close()
    with contextlib.ExitStack() as stack:
        iov = stack.enter_context(usrbio.make_gpu_iovec(str(agent.mount), length_bytes=600 * KIB))
        ring = stack.enter_context(usrbio.make_ioring(str(agent.mount), 4, for_read=True))
        file = stack.enter_context((agent.mount / "file").open("rb"))
        usrbio.register_fd(file.fileno())
        stack.callback(usrbio.deregister_fd, file.fileno())
        ring.prepare(iov[: 600 * KIB], True, file.fileno(), 4097)  # noqa: FBT003 - the signature of 3FS.
        (completed_slice,) = ring.submit().wait(min_results=1)
        assert completed_slice.result == 600 * KIB
        pattern.check(read_contents(device, iov), seed=seed, offset_bytes=4097)


@pytest.mark.parametrize("method", ["open_gpu", "import"])
def test_memory_of_a_borrowed_iov_is_not_reused(agent: AgentProcess, method: str) -> None:
    (agent.mount / "file").write_bytes(bytes(4096))
    statistics_before = usrbio.gpu_pool_statistics()
    with contextlib.ExitStack() as stack:
        iov = usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB)
        stack.callback(iov.close)
        borrow_command = ["import", iov.export_gpu().hex()] if method == "import" else [method, iov.id, MIB]
        borrower = stack.enter_context(Borrower(agent.mount, agent.mount / "file"))
        assert borrower.call(*borrow_command) == 0
        iov.close()
        statistics = usrbio.gpu_pool_statistics()
        assert (statistics.idle_blocks, statistics.in_use_blocks) == (0, 0)
        assert statistics.refused_blocks - statistics_before.refused_blocks == 1
        borrower.close()


def test_exported_memory_is_not_reused(agent: AgentProcess) -> None:
    with usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB) as iov:
        iov.export_gpu()
    assert usrbio.gpu_pool_statistics().idle_blocks == 0


def test_killed_client_leaves_no_registration(tmp_path: Path, seed: int) -> None:
    with plain_agent(tmp_path, tmp_path) as agent:
        with start_client_process(tmp_path, 20, seed, "--hold") as process:
            assert process.stdout is not None
            # The live registrations of this process belong to the agent.
            assert json.loads(process.stdout.readline())["idle_blocks"] == live()["registration"]
            process.kill()
        wait_until(lambda: "registration" not in live(), "the agent keeps no registration", timeout_s=30)
        wait_until(lambda: not agent.service.clients, "the client is closed", timeout_s=30)


def test_trimming_ends_the_registration_first(tmp_path: Path, seed: int) -> None:
    with plain_agent(tmp_path, tmp_path), start_client_process(tmp_path, 20, seed, "--hold") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert json.loads(process.stdout.readline())["idle_blocks"] == live()["registration"]
        process.stdin.close()  # The process then frees its idle memory, and prints its statistics.
        assert json.loads(process.stdout.readline())["idle_blocks"] == 0
        assert "registration" not in live()


def test_idle_time_and_limit_free_the_longest_idle(agent: AgentProcess) -> None:
    mount = str(agent.mount)
    trimmed_before = usrbio.gpu_pool_statistics().trimmed_blocks
    iovs = [usrbio.make_gpu_iovec(mount, length_bytes=length_bytes) for length_bytes in (MIB, 256 * KIB, 8 * MIB)]
    for iov in iovs:
        iov.close()
    assert usrbio.gpu_pool_statistics().idle_bytes == 9 * MIB + 256 * KIB
    usrbio.trim_gpu_pool(idle_bytes_max=8 * MIB)
    statistics = usrbio.gpu_pool_statistics()
    assert (statistics.idle_blocks, statistics.idle_bytes) == (1, 8 * MIB)
    usrbio.limit_gpu_pool(idle_bytes_max=POOL_IDLE_BYTES_MAX, idle_ms_max=20)
    wait_until(lambda: usrbio.gpu_pool_statistics().idle_blocks == 0, "no block is idle", timeout_s=30)
    assert usrbio.gpu_pool_statistics().trimmed_blocks - trimmed_before == 3


def test_limit_of_zero_turns_the_pool_off(agent: AgentProcess) -> None:
    usrbio.limit_gpu_pool(idle_bytes_max=0)
    statistics_before = usrbio.gpu_pool_statistics()
    for _ in range(2):
        usrbio.make_gpu_iovec(str(agent.mount), length_bytes=MIB).close()
    assert usrbio.gpu_pool_statistics() == statistics_before


def test_idle_memory_of_an_ended_agent_is_not_reused(tmp_path: Path, device: cuda.Device) -> None:
    usrbio.limit_gpu_pool(idle_bytes_max=POOL_IDLE_BYTES_MAX, idle_ms_max=LONG_IDLE_MS)
    with AgentProcess(tmp_path), usrbio.make_gpu_iovec(str(tmp_path), length_bytes=MIB) as iov:
        fill(device, iov, 1)
    misses_before = usrbio.gpu_pool_statistics().misses
    with AgentProcess(tmp_path):
        with usrbio.make_gpu_iovec(str(tmp_path), length_bytes=MIB) as iov:
            assert read_contents(device, iov) == bytes(MIB)
        assert usrbio.gpu_pool_statistics().misses == misses_before + 1
        usrbio.trim_gpu_pool()
    assert usrbio.gpu_pool_statistics().idle_blocks == 0


def test_threads_never_share_memory(agent: AgentProcess, device: cuda.Device) -> None:
    # Addresses of the open iovs of all threads.
    addresses: set[int] = set()
    lock = threading.Lock()

    def use_iovs(thread_index: int) -> None:
        for round_index in range(20):
            # The lengths are 64, 128 and 256 KiB in turn.
            with usrbio.make_gpu_iovec(
                str(agent.mount), length_bytes=(64 << (round_index + thread_index) % 3) * KIB
            ) as iov:
                with lock:
                    assert iov.address not in addresses
                    addresses.add(iov.address)
                assert read_contents(device, iov)[:64] == bytes(64)
                fill(device, iov, thread_index + 1)
                with lock:
                    addresses.remove(iov.address)

    with ThreadPoolExecutor(8) as executor:
        for future in [executor.submit(use_iovs, index) for index in range(8)]:
            future.result()
    statistics = usrbio.gpu_pool_statistics()
    assert statistics.in_use_blocks == 0
    assert statistics.idle_blocks > 0


def test_forked_child_has_an_empty_pool(agent: AgentProcess) -> None:
    program = f"""
import os
from gdrkit import usrbio
usrbio.make_gpu_iovec({str(agent.mount)!r}, length_bytes=1 << 20).close()
assert usrbio.gpu_pool_statistics().idle_blocks == 1
child = os.fork()
if child == 0:
    os._exit(usrbio.gpu_pool_statistics().idle_blocks)
assert os.waitpid(child, 0)[1] == 0
hits_before = usrbio.gpu_pool_statistics().hits
usrbio.make_gpu_iovec({str(agent.mount)!r}, length_bytes=1 << 20).close()
assert usrbio.gpu_pool_statistics().hits == hits_before + 1
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_request_for_unknown_kept_memory_is_refused(agent: AgentProcess) -> None:
    fd = os.memfd_create("not kept")
    try:
        with RawClient(agent.mount) as client, pytest.raises(Refusal) as refusal:
            client.request(AgentRequest.DROP_KEPT, protocol.pack_number(0), [fd])
    finally:
        os.close(fd)
    assert refusal.value.errno == errno.ENOENT


# The limits are: bytes of idle memory, and idle time in milliseconds.
@pytest.mark.parametrize("limits", [(-1, 0), (0, -1), (0, 2**31)])
def test_limit_that_is_no_size_or_time_is_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        usrbio.limit_gpu_pool(idle_bytes_max=limits[0], idle_ms_max=limits[1])
