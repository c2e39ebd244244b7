"""Wrong calls of an application fail with the documented errno, and lose no data.

These cases use the Python interface and a real agent. native/usrbio/tests has the cases of every errno of the C
interface, test_agent.py the invalid messages to an agent, and suites/storage the invalid network messages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import socket
import subprocess
import sys
import uuid
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from support.fuzz import generate_changed_inputs, run_fuzzer
from support.other_user import folder_for_all_users, run_program
from support.processes import HungError, list_open_paths, wait_until
from support.raw_usrbio import AgentProcess, RawClient, Refusal
from usrbio.fuzz_messages import TARGET as MESSAGE_FUZZ_TARGET

from gdrkit import pattern, usrbio
from gdrkit.errors import UsageError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.usrbio._library import library_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.usrbio.native_types import Ioring, Iovec

pytestmark = needs(verbs.nic())

FUZZ_S = float(os.environ.get("GDRKIT_FUZZ_S", "3"))
# Number of entries of each ring.
RING_ENTRIES = 8
# Values of the argument `read` of Ioring.prepare(), which must fit the direction of the ring.
READ, WRITE = True, False
TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Yield a running agent with an empty mount."""
    mount = tmp_path / "mount"
    mount.mkdir()
    with AgentProcess(mount) as agent_process:
        yield agent_process


def refused_with(expected_errno: int) -> contextlib.AbstractContextManager[pytest.ExceptionInfo[usrbio.UsrbioError]]:
    """Return a context in which a call of the library must fail with this errno."""
    return pytest.raises(usrbio.UsrbioError, check=lambda error: error.errno == expected_errno)


@contextlib.contextmanager
def open_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT, *, is_registered: bool = True) -> Iterator[int]:
    """Open a file until the block ends, register its descriptor for rings if `is_registered`, and yield it."""
    fd = os.open(path, flags, 0o600)
    try:
        if is_registered:
            usrbio.register_fd(fd)
        yield fd
    finally:
        if is_registered:
            usrbio.deregister_fd(fd)
        os.close(fd)


@contextlib.contextmanager
def open_memory_and_rings(mount: Path, *, block_size: int = 0) -> Iterator[tuple[Iovec, Ioring, Ioring]]:
    """Yield memory of 1 MiB, a ring of reads and a ring of writes."""
    with (
        usrbio.create_iovec(str(mount), length_bytes=MIB, block_size=block_size) as iov,
        usrbio.make_ioring(str(mount), RING_ENTRIES) as read_ring,
        usrbio.make_ioring(str(mount), RING_ENTRIES, for_read=False) as write_ring,
    ):
        yield iov, read_ring, write_ring


def submit_and_get_results(ring: Ioring, count: int = 1) -> list[int]:
    """Submit, and return the results of this number of operations."""
    completed_slices = ring.submit().wait(min_results=count, timeout=TIMEOUT)
    assert len(completed_slices) == count
    return [completed_slice.result for completed_slice in completed_slices]


def test_path_outside_of_a_mount_is_refused(agent: AgentProcess, tmp_path: Path) -> None:
    refused_paths = (
        (tmp_path, errno.ENOENT),
        (tmp_path / "none", errno.ENOENT),
        ("/" + "m" * 256, errno.EINVAL),
    )
    for path, expected_errno in refused_paths:
        with refused_with(expected_errno):
            usrbio.create_iovec(str(path), length_bytes=MIB)
        with refused_with(expected_errno):
            usrbio.make_ioring(str(path), RING_ENTRIES)
    assert usrbio.extract_mount_point(tmp_path) is None
    assert usrbio.extract_mount_point(agent.mount) == str(agent.mount)
    with open_file(tmp_path / "outside", is_registered=False) as fd:
        assert not usrbio.is_hf3fs(fd)
        with refused_with(errno.EBADF):
            usrbio.register_fd(fd)
        with refused_with(errno.ENOTTY):
            usrbio.punch_hole(fd, [0], [1])
    with refused_with(errno.EXDEV), open_file(agent.mount / "file", is_registered=False):
        usrbio.hardlink(agent.mount / "file", tmp_path / "second")


def test_full_ring_is_eagain_and_loses_nothing(agent: AgentProcess, seed: int) -> None:
    expected_bytes = pattern.payload(RING_ENTRIES * KIB, seed=seed)
    with open_file(agent.mount / "file") as fd, open_memory_and_rings(agent.mount) as (iov, _, write_ring):
        memoryview(iov)[: len(expected_bytes)] = expected_bytes
        for index in range(RING_ENTRIES):
            write_ring.prepare(iov[index * KIB : (index + 1) * KIB], WRITE, fd, index * KIB)
        with refused_with(errno.EAGAIN):
            write_ring.prepare(iov[:KIB], WRITE, fd, 0)
        assert submit_and_get_results(write_ring, RING_ENTRIES) == [KIB] * RING_ENTRIES
        write_ring.prepare(iov[:KIB], WRITE, fd, len(expected_bytes))
        assert submit_and_get_results(write_ring) == [KIB]
    assert (agent.mount / "file").read_bytes() == expected_bytes + expected_bytes[:KIB]


def test_unregistered_descriptor_is_ebadf(agent: AgentProcess) -> None:
    with (
        open_memory_and_rings(agent.mount) as (iov, read_ring, _),
        open_file(agent.mount / "file", is_registered=False) as fd,
    ):
        with refused_with(errno.EBADF):
            read_ring.prepare(iov[:1], READ, fd, 0)
        usrbio.register_fd(fd)
        with refused_with(errno.EINVAL):
            usrbio.register_fd(fd)
        usrbio.deregister_fd(fd)
        for unregistered_fd in (fd, -1, -fd, 1 << 30):
            usrbio.deregister_fd(unregistered_fd)
            with refused_with(errno.EBADF):
                read_ring.prepare(iov[:1], READ, unregistered_fd, 0)
        for unregistered_fd in (-1, 1 << 30):
            with refused_with(errno.EBADF):
                usrbio.register_fd(unregistered_fd)


def test_descriptor_without_the_access_right_is_refused(agent: AgentProcess) -> None:
    (agent.mount / "file").write_bytes(b"x" * KIB)
    with open_memory_and_rings(agent.mount) as (iov, read_ring, write_ring):
        with open_file(agent.mount / "file", os.O_RDONLY) as fd:
            with refused_with(errno.EACCES):
                write_ring.prepare(iov[:1], WRITE, fd, 0)
            with refused_with(errno.EBADF):
                usrbio.punch_hole(fd, [0], [1])
        with open_file(agent.mount / "file", os.O_WRONLY) as fd, refused_with(errno.EACCES):
            read_ring.prepare(iov[:1], READ, fd, 0)
        with open_file(agent.mount / "file") as fd, refused_with(errno.EINVAL):
            read_ring.prepare(iov[:1], WRITE, fd, 0)
    assert (agent.mount / "file").read_bytes() == b"x" * KIB


def test_invalid_range_is_einval(agent: AgentProcess) -> None:
    with (
        open_file(agent.mount / "file") as fd,
        open_memory_and_rings(agent.mount, block_size=64 * KIB) as (iov, read_ring, _),
    ):
        for invalid_slice in (iov[64 * KIB - 1 : 64 * KIB + 1], iov[: 64 * KIB + 1], iov[:0]):
            with refused_with(errno.EINVAL):
                read_ring.prepare(invalid_slice, READ, fd, 0)
        # The end of these reads is above the largest file offset, 2**63 - 1.
        for offset in ((1 << 63) - 1, 1 << 63, (1 << 64) - 1):
            with refused_with(errno.EINVAL):
                read_ring.prepare(iov[:2], READ, fd, offset)
        for starts, ends in ([], []), ([2], [1]):
            with refused_with(errno.EINVAL):
                usrbio.punch_hole(fd, starts, ends)
        with pytest.raises(UsageError, match="1000"):
            usrbio.punch_hole(fd, [0] * 1001, [1] * 1001)
        # The last argument is flags, which must be 0.
        with refused_with(errno.EINVAL):
            usrbio.punch_hole(fd, [0], [1], 1)
        read_ring.prepare(iov[64 * KIB : 128 * KIB], READ, fd, 0)
        assert submit_and_get_results(read_ring) == [0]


def test_pointer_outside_of_the_iov_is_einval_in_c(agent: AgentProcess) -> None:
    """Only the C interface has a pointer argument, so this case calls the library by ctypes."""
    library = ctypes.CDLL(str(library_path()))
    mount = os.fsencode(agent.mount)
    # The sizes of struct hf3fs_iov and struct hf3fs_ior.
    iov, ring = ctypes.create_string_buffer(312), ctypes.create_string_buffer(600)
    iov_bytes = ctypes.c_size_t(64 * KIB)
    # The last arguments are: the block size 0 (none) or the I/O depth 0, and the NUMA node -1 (any).
    assert library.hf3fs_iovcreate(iov, mount, iov_bytes, ctypes.c_size_t(0), -1) == 0
    assert library.hf3fs_iorcreate(ring, mount, RING_ENTRIES, READ, 0, -1) == 0
    # The first field of struct hf3fs_iov is the address of the memory.
    base_address = int.from_bytes(iov.raw[:8], sys.byteorder)
    fd = os.open(agent.mount / "file", os.O_RDWR | os.O_CREAT, 0o600)
    assert library.hf3fs_reg_fd(fd, ctypes.c_uint64(0)) <= 0
    # The functions hf3fs_reg_fd, hf3fs_hardlink and hf3fs_punchhole return a positive errno if they fail.
    assert library.hf3fs_reg_fd(fd, ctypes.c_uint64(0)) == errno.EINVAL
    assert (
        library.hf3fs_hardlink(os.fsencode(agent.mount / "none"), os.fsencode(agent.mount / "second")) == errno.ENOENT
    )
    assert library.hf3fs_punchhole(fd, 0, None, None, ctypes.c_size_t(0)) == errno.EINVAL
    for address, length in (
        (base_address - 1, 2),
        (base_address + 64 * KIB, 1),
        (base_address + 64 * KIB - 1, 2),
        (base_address + 8, (1 << 64) - 8),
        (base_address, (1 << 64) - 1),
        (0, 1),
    ):
        result = library.hf3fs_prep_io(
            ring, iov, READ, ctypes.c_void_p(address), fd, ctypes.c_size_t(0), ctypes.c_uint64(length), None
        )
        assert result == -errno.EINVAL, (address - base_address, length)
    library.hf3fs_dereg_fd(fd)
    os.close(fd)
    library.hf3fs_iordestroy(ring)
    library.hf3fs_iovdestroy(iov)


@needs(host.capability("CAP_SYS_ADMIN"))
def test_full_disk_is_enospc_and_keeps_acknowledged_writes(tmp_path: Path, seed: int) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "gdrkit-small", str(mount)], check=True)
    try:
        with (
            AgentProcess(mount),
            open_file(mount / "file") as fd,
            open_memory_and_rings(mount) as (iov, read_ring, write_ring),
        ):
            acknowledged_bytes = 0
            results: list[int] = []
            # Write until the disk is full.
            while not results or results[-1] == MIB:
                memoryview(iov)[:] = pattern.payload(MIB, seed=seed, offset_bytes=acknowledged_bytes)
                write_ring.prepare(iov[:], WRITE, fd, acknowledged_bytes)
                results += submit_and_get_results(write_ring)
                acknowledged_bytes += max(results[-1], 0)
                assert acknowledged_bytes <= 8 * MIB
            assert results[-1] == -errno.ENOSPC
            assert acknowledged_bytes >= 4 * MIB
            for offset in range(0, acknowledged_bytes, MIB):
                read_ring.prepare(iov[:], READ, fd, offset)
                assert submit_and_get_results(read_ring) == [MIB]
                pattern.check(memoryview(iov)[:], seed=seed, offset_bytes=offset)
            # After space was freed, the file and the ring can be used again.
            usrbio.punch_hole(fd, [0], [4 * MIB])
            write_ring.prepare(iov[:], WRITE, fd, acknowledged_bytes)
            assert submit_and_get_results(write_ring) == [MIB]
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


CREATE_IOV_AND_RING_PROGRAM = """
import sys
from gdrkit import usrbio
from support.other_user import become_unprivileged
usrbio.capabilities()  # Opens the library.
become_unprivileged()
for call in (lambda: usrbio.create_iovec(sys.argv[1], length_bytes=4096), lambda: usrbio.make_ioring(sys.argv[1], 4)):
    try:
        call()
    except usrbio.UsrbioError as error:
        print(error.errno)
"""


@needs(host.capability("CAP_SETUID"))
def test_other_user_gets_eacces_from_the_library() -> None:
    with folder_for_all_users() as mount, AgentProcess(mount):
        result = run_program(CREATE_IOV_AND_RING_PROGRAM, str(mount))
    assert result.stdout.split() == [str(errno.EACCES)] * 2, result.stderr


@pytest.mark.parametrize("target", ["gdr://v2/device/0", "gdr://v2/device/1/allocation/9/offset/0/size/9/dmabuf"])
def test_refused_publication_closes_its_descriptors(agent: AgentProcess, target: str) -> None:
    with open_file(agent.mount / "file", is_registered=False) as fd, RawClient(agent.mount) as client:
        with pytest.raises(Refusal, check=lambda error: error.errno == errno.EINVAL):
            client.publish(f"{uuid.uuid4()}.gdr.d0", target, bytes(384), [fd])
        assert str(agent.mount / "file") not in list_open_paths(agent.process.pid)


def test_hostile_peer_loses_only_its_own_connection(agent: AgentProcess, seed: int) -> None:
    rng, agent_process_id = random.Random(seed), agent.process.pid
    with open_file(agent.mount / "file") as fd, open_memory_and_rings(agent.mount) as (iov, _, write_ring):
        # The first transfer through a NIC opens descriptors that stay open.
        for index in range(2 * RING_ENTRIES):
            write_ring.prepare(iov[:KIB], WRITE, fd, index * KIB)
            assert submit_and_get_results(write_ring) == [KIB]
        path_counts_before = Counter(list_open_paths(agent_process_id))
        for message_bytes in generate_changed_inputs(MESSAGE_FUZZ_TARGET, seed, 500):
            with RawClient(agent.mount) as peer, contextlib.suppress(ConnectionError):
                peer.send(message_bytes, [fd] * rng.randrange(4))
                # Some peers wait for the reply, others close the connection at once.
                if rng.randrange(2):
                    peer.socket.shutdown(socket.SHUT_WR)
                    peer.receive()
        with contextlib.ExitStack() as idle_clients:
            for _ in range(64):
                idle_clients.enter_context(RawClient(agent.mount))
            write_ring.prepare(iov[:], WRITE, fd, 0)
            assert submit_and_get_results(write_ring) == [MIB]
        try:
            wait_until(
                lambda: Counter(list_open_paths(agent_process_id)) == path_counts_before,
                "the agent has closed its descriptors",
                timeout_s=60,
            )
        except HungError as error:
            path_counts_after = Counter(list_open_paths(agent_process_id))
            error.add_note(
                f"opened: {path_counts_after - path_counts_before}, closed: {path_counts_before - path_counts_after}"
            )
            raise


@pytest.mark.timeout(FUZZ_S + 120)
def test_message_fuzzer_finds_nothing() -> None:
    """The fuzzer of the agent's messages runs for GDRKIT_FUZZ_S seconds."""
    print(run_fuzzer("usrbio.fuzz_messages", seconds=FUZZ_S))  # noqa: T201 - the number of inputs.
