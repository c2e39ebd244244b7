"""hf3fs_wait_for_ios makes the bytes of a read visible to the GPU by a flush, but only if the GPU needs a flush."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.python_child import suites_environ
from support.raw_usrbio import AgentProcess

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), software(Api.CUDA))]

# This program reads a file into the GPU, checks the bytes by a copy from the GPU, and writes them to another file. It
# prints how often the process flushed during the read, during the write, and during a later read into host memory.
COUNT_FLUSHES_PROGRAM = """
import json, os, sys
from gdrkit import usrbio
from gdrkit.errors import Api
from support.application import Application
from support.ledger import read_call_counts

mount, seed, length_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source_fd, copy_fd = os.open(f"{mount}/file", os.O_RDONLY), os.open(f"{mount}/copy", os.O_RDWR | os.O_CREAT, 0o600)
for fd in (source_fd, copy_fd):
    usrbio.register_fd(fd)

def count_flushes():
    return read_call_counts(Api.CUDA).get("cuFlushGPUDirectRDMAWrites", 0)

total_flush_counts = [0]  # The process cannot have flushed, because it has not loaded the library of CUDA yet.
with Application(mount, memory_kind="device", length_bytes=length_bytes) as application:
    application.fill(0)
    assert application.read((source_fd, 0, 0, length_bytes)) == [length_bytes]
    application.check(0, length_bytes, seed=seed, file_offset=0)
    total_flush_counts.append(count_flushes())
    assert application.write((copy_fd, 0, 0, length_bytes)) == [length_bytes]
    total_flush_counts.append(count_flushes())
with Application(mount, memory_kind="host", length_bytes=length_bytes) as application:
    assert application.read((copy_fd, 0, 0, length_bytes)) == [length_bytes]
    application.check(0, length_bytes, seed=seed, file_offset=0)
total_flush_counts.append(count_flushes())
print(json.dumps([after - before for before, after in zip(total_flush_counts, total_flush_counts[1:])]))
"""


# The orderings are CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE (0) and _OWNER (100).
@pytest.mark.parametrize(("writes_ordering", "flush_counts"), [(0, [1, 0, 0]), (100, [0, 0, 0])])
def test_wait_flushes_reads_into_a_gpu_that_needs_it(
    tmp_path: Path, seed: int, writes_ordering: int, flush_counts: list[int]
) -> None:
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=seed))
    with AgentProcess(tmp_path):
        child = subprocess.run(
            [sys.executable, "-c", COUNT_FLUSHES_PROGRAM, str(tmp_path), str(seed), str(MIB)],
            env=suites_environ() | {"GDRKIT_TWINS_WRITES_ORDERING": str(writes_ordering)},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert child.returncode == 0, child.stdout + child.stderr
    assert json.loads(child.stdout) == flush_counts
