"""Reads and writes of files through the whole path: application, ring, agent, server and NIC."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.application import Application
from support.raw_usrbio import AgentProcess, list_shared_memory_files

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence

MEMORY_KINDS = [
    pytest.param("host", marks=needs(verbs.nic())),
    pytest.param("device", marks=needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)),
]
pytestmark = pytest.mark.parametrize("memory_kind", MEMORY_KINDS)

# Length of a transfer, its offset in the file, and its offset in the memory.
LENGTHS_AND_OFFSETS = [
    pytest.param(1, 1, 3, id="1B"),
    pytest.param(4 * KIB - 1, 4097, 1, id="4KiB-1"),
    pytest.param(64 * KIB, 65535, 513, id="64KiB"),
    pytest.param(MIB + 3, 3, 4095, id="1MiB+3"),
    pytest.param(64 * MIB, 12345, 777, id="64MiB"),
    # Creating this pattern and moving it takes 10 s of processor time. On a very busy machine that takes longer than
    # the usual timeout of 120 s.
    pytest.param(GIB, 1, 1, id="1GiB", marks=pytest.mark.timeout(600)),
]
# Files are created and compared in chunks of this length.
CHUNK_BYTES = 16 * MIB
# The memory is filled with this byte, to detect writes outside of a transfer.
CANARY_BYTE = 0xA5


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Yield a running agent. After its end, check that no shared memory is left."""
    with AgentProcess(tmp_path) as agent_process:
        yield agent_process
        memory_files = list_shared_memory_files(tmp_path)
    assert agent_process.process.returncode == 0, agent_process.error_output
    assert [path for path in memory_files if path.exists()] == []


@pytest.fixture
def open_file(agent: AgentProcess) -> Iterator[Callable[[str], int]]:
    """A function that opens and registers a file of the mount, and creates it if it is missing."""
    with contextlib.ExitStack() as stack:

        def open_and_register(name: str) -> int:
            fd = os.open(agent.mount / name, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, fd)
            usrbio.register_fd(fd)
            stack.callback(usrbio.deregister_fd, fd)
            return fd

        yield open_and_register


def make_file(path: Path, length_bytes: int, *, seed: int) -> None:
    """Create a file with the pattern of `seed`."""
    with path.open("wb") as file:
        for offset_bytes in range(0, length_bytes, CHUNK_BYTES):
            chunk_bytes = min(CHUNK_BYTES, length_bytes - offset_bytes)
            file.write(pattern.payload(chunk_bytes, seed=seed, offset_bytes=offset_bytes))


@pytest.mark.parametrize(("length_bytes", "file_offset", "memory_offset"), LENGTHS_AND_OFFSETS)
def test_every_byte_of_a_file_is_read_and_written_back(
    agent: AgentProcess,
    open_file: Callable[[str], int],
    memory_kind: str,
    seed: int,
    length_bytes: int,
    file_offset: int,
    memory_offset: int,
    evidence: Evidence,
) -> None:
    make_file(agent.mount / "file", file_offset + length_bytes, seed=seed)
    modified_ns = (agent.mount / "file").stat().st_mtime_ns
    source_fd, copy_fd = open_file("file"), open_file("copy")
    memory_bytes = memory_offset + length_bytes + 64
    with Application(agent.mount, memory_kind=memory_kind, length_bytes=memory_bytes) as application:
        application.fill(CANARY_BYTE)
        assert application.read((source_fd, memory_offset, file_offset, length_bytes)) == [length_bytes]
        with (agent.mount / "file").open("rb") as original_file:
            original_file.seek(file_offset)
            for begin in range(memory_offset, memory_offset + length_bytes, CHUNK_BYTES):
                chunk = original_file.read(CHUNK_BYTES)
                assert application.read_memory(begin, len(chunk)) == chunk, f"in the chunk at {begin}"
        for begin, length in ((0, memory_offset), (memory_offset + length_bytes, 64)):
            assert application.read_memory(begin, length) == bytes([CANARY_BYTE]) * length, (
                "bytes outside of the transfer have changed"
            )
        assert application.write((copy_fd, memory_offset, 5, length_bytes)) == [length_bytes]
    assert (agent.mount / "file").stat().st_mtime_ns == modified_ns, "the agent has written into the original"
    with (agent.mount / "copy").open("rb") as copied_file, (agent.mount / "file").open("rb") as original_file:
        assert copied_file.read(5) == bytes(5)
        original_file.seek(file_offset)
        while expected_chunk := original_file.read(CHUNK_BYTES):
            assert copied_file.read(len(expected_chunk)) == expected_chunk
        assert copied_file.read() == b""
    evidence["bytes"] = 2 * length_bytes


@pytest.mark.qualify
def test_read_at_the_end_of_a_file_is_short(
    agent: AgentProcess, open_file: Callable[[str], int], memory_kind: str, seed: int
) -> None:
    file_bytes = 70_001
    make_file(agent.mount / "file", file_bytes, seed=seed)
    fd = open_file("file")
    with Application(agent.mount, memory_kind=memory_kind, length_bytes=MIB) as application:
        application.fill(CANARY_BYTE)
        # The fields of each transfer are the descriptor, the memory offset, the file offset, and the length.
        transfers = [(fd, 0, 0, 128 * KIB), (fd, 128 * KIB, file_bytes - 1, 4096), (fd, 256 * KIB, file_bytes, 4096)]
        assert application.read(*transfers, (fd, 512 * KIB, file_bytes + MIB, 1)) == [file_bytes, 1, 0, 0]
        application.check(0, file_bytes, seed=seed, file_offset=0)
        application.check(128 * KIB, 1, seed=seed, file_offset=file_bytes - 1)
        assert application.read_memory(file_bytes, 100) == bytes([CANARY_BYTE]) * 100
        assert application.read_memory(256 * KIB, 4096) == bytes([CANARY_BYTE]) * 4096


@pytest.mark.qualify
def test_hole_of_a_file_is_read_as_zeros(
    agent: AgentProcess, open_file: Callable[[str], int], memory_kind: str, seed: int
) -> None:
    with (agent.mount / "file").open("wb") as file:
        file.truncate(MIB)
        for offset in (0, 300 * KIB):
            file.seek(offset)
            file.write(pattern.payload(5000, seed=seed, offset_bytes=offset))
    fd = open_file("file")
    expected_bytes = (agent.mount / "file").read_bytes()
    with Application(agent.mount, memory_kind=memory_kind, length_bytes=2 * MIB) as application:
        application.fill(CANARY_BYTE)
        assert application.read((fd, 1, 0, MIB), (fd, MIB + 7, 2000, 64 * KIB)) == [MIB, 64 * KIB]
        assert application.read_memory(1, MIB) == expected_bytes
        assert application.read_memory(MIB + 7, 64 * KIB) == expected_bytes[2000 : 2000 + 64 * KIB]
        assert application.read_memory(0, 1) == bytes([CANARY_BYTE])


def test_hole_is_enodata_if_holes_are_forbidden(
    agent: AgentProcess, open_file: Callable[[str], int], memory_kind: str
) -> None:
    (agent.mount / "file").touch()
    os.truncate(agent.mount / "file", MIB)
    fd = open_file("file")
    with (
        Application(agent.mount, memory_kind=memory_kind, length_bytes=MIB) as application,
        # The flag 2 is HF3FS_IOR_FORBID_READ_HOLES.
        usrbio.make_ioring(str(agent.mount), 8, for_read=True, flags=2) as ring,
    ):
        ring.prepare(application.iov[0:4096], True, fd, 0)  # noqa: FBT003 - the signature of 3FS.
        assert [completion.result for completion in ring.submit().wait(min_results=1)] == [-errno.ENODATA]


@pytest.mark.qualify
def test_64_rings_read_their_own_parts_at_once(
    agent: AgentProcess, open_file: Callable[[str], int], memory_kind: str, seed: int
) -> None:
    make_file(agent.mount / "file", 4 * MIB, seed=seed)
    fd, bytes_per_ring = open_file("file"), 64 * KIB
    with Application(
        agent.mount, memory_kind=memory_kind, length_bytes=4 * MIB, entries=16, ring_count=64
    ) as application:
        for index, ring in enumerate(application.read_rings):
            for offset in range(index * bytes_per_ring, (index + 1) * bytes_per_ring, 8 * KIB):
                ring.prepare(application.iov[offset : offset + 8 * KIB], True, fd, offset)  # noqa: FBT003
            ring.submit()
        for ring in application.read_rings:
            assert [completion.result for completion in ring.wait(min_results=8)] == [8 * KIB] * 8
        application.check(0, 4 * MIB, seed=seed, file_offset=0)


def test_eight_applications_read_and_write_concurrently(
    agent: AgentProcess, memory_kind: str, seed: int, evidence: Evidence
) -> None:
    command = [sys.executable, "-m", "support.application", str(agent.mount), f"--kind={memory_kind}"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for index in range(8):
        make_file(agent.mount / f"file{index}", MIB, seed=seed + index)
    processes = [
        subprocess.Popen(
            [
                *command,
                str(agent.mount / f"file{index}"),
                str(agent.mount / f"copy{index}"),
                f"--seed={seed + index}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        for index in range(8)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, [errors.decode()[-2000:] for _, errors in outputs]
    evidence["bytes"] = sum(json.loads(output)["bytes"] for output, _ in outputs)
