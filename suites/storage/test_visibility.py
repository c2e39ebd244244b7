"""After a read into a GPU, the storage client flushes the writes of the NICs, but only if the GPU needs a flush."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.python_child import suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), software(Api.CUDA))]

# The program prints the number of flushes that had happened by the end of each step.
PROGRAM = """
import json, sys
from pathlib import Path
from gdrkit import cuda, pattern
from gdrkit.errors import Api
from gdrkit.storage.client import IORequest
from support.ledger import read_call_counts
from support.storage import run_storage_server

root, seed = Path(sys.argv[1]), int(sys.argv[2])
data = pattern.payload(1 << 20, seed=seed)
flush_count_by_step = {}
with run_storage_server(root / "store", root / "log") as server, cuda.Device(0) as device:
    (root / "store" / "file").write_bytes(data)
    with server.connect() as client, device.allocate(len(data)) as memory, client.register(memory) as buffer:
        count_flushes = lambda: read_call_counts(Api.CUDA).get("cuFlushGPUDirectRDMAWrites", 0)
        with client.open("file", write=True) as file, client.register(bytearray(len(data))) as host_buffer:
            flushes_before = count_flushes()
            assert file.read(buffer, offset_bytes=0).length_bytes == len(data)
            pattern.check(memory.read(), seed=seed)
            flush_count_by_step["read into the GPU"] = count_flushes() - flushes_before
            # The batch reads each half of the file into the other half of the memory.
            half_bytes = len(data) // 2
            swapped_halves = [buffer.subrange(offset_bytes=begin, length_bytes=half_bytes) for begin in (half_bytes, 0)]
            client.batch_read([IORequest(file, index * half_bytes, swapped_halves[index]) for index in (0, 1)])
            assert memory.read() == data[half_bytes:] + data[:half_bytes]
            flush_count_by_step["batch into the GPU"] = count_flushes() - flushes_before
            file.write(buffer, offset_bytes=0)
            file.read(host_buffer, offset_bytes=0)
            assert bytes(host_buffer.data()) == data[half_bytes:] + data[:half_bytes]
            flush_count_by_step["write, and read into host memory"] = count_flushes() - flushes_before
print(json.dumps(flush_count_by_step))
"""


# The orderings 0, 100 and 200 are CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE, _OWNER and _ALL_DEVICES. A GPU needs flushes
# only with NONE.
@pytest.mark.parametrize(("ordering", "expected_flush_counts"), [(0, (1, 2, 2)), (100, (0, 0, 0)), (200, (0, 0, 0))])
def test_reads_into_a_gpu_flush_only_if_the_gpu_needs_it(
    tmp_path: Path, seed: int, ordering: int, expected_flush_counts: tuple[int, ...]
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(seed)],
        env=suites_environ() | {"GDRKIT_TWINS_WRITES_ORDERING": str(ordering)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert tuple(json.loads(child.stdout).values()) == expected_flush_counts
