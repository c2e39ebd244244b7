"""Regression cases for defects of the storage client in which the CPU accessed device memory (docs/findings.md).

A CPU access to device memory faults, on a GPU and on the CUDA twin. So the client runs in a child process
(storage_client.py), which such an access kills. `nox -s review` restores each defect, and shows that its case then
fails. A twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.storage import run_storage_server

from gdrkit import cuda, pattern
from gdrkit.errors import UsageError
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.storage import StorageServer

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

CLIENT_PROGRAM = Path(__file__).with_name("storage_client.py")
FILE_NAME = "weights.bin"
_CHILD_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageServer]:
    """Yield a server of an empty store. All cases of this module use it."""
    folder = tmp_path_factory.mktemp("storage")
    with run_storage_server(folder / "store", folder / "server.log") as storage_server:
        yield storage_server


def write_from_host(server: StorageServer, data: bytes, nic: Nic, *, offset_bytes: int = 0) -> None:
    """Write the file FILE_NAME with a client in this process, from host memory."""
    with (
        server.connect(nic) as client,
        client.register(bytearray(data)) as buffer,
        client.open(FILE_NAME, write=True, create=True, truncate=True) as file,
    ):
        file.write(buffer, offset_bytes=offset_bytes)


def run_client(server: StorageServer, operation: str, **arguments: int | list[tuple[int, int]]) -> dict[str, Any]:
    """Run one operation of a client with device memory in a child process, and return its result."""
    request = arguments | {
        "operation": operation,
        "address": server.address,
        "token": server.token(),
        "path": FILE_NAME,
    }
    completed = subprocess.run(
        [sys.executable, str(CLIENT_PROGRAM)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=_CHILD_TIMEOUT_S,
    )
    signal_name = "" if completed.returncode >= 0 else signal.Signals(-completed.returncode).name
    assert not signal_name, f"the CPU accessed device memory: {signal_name} killed the client in a {operation}"
    assert completed.returncode == 0, completed.stderr
    result: dict[str, Any] = json.loads(completed.stdout)
    assert result["is_data_correct"], f"wrong bytes in device memory: {result}"
    return result


@NEEDS_DMABUF
def test_read_into_device_memory_avoids_the_cpu(server: StorageServer, device: Device, nic: Nic, seed: int) -> None:
    """Finding 3: the CPU copied inline data into device memory, and computed the checksum of received data."""
    write_from_host(server, pattern.payload(MIB, seed=seed), nic)
    # A server may send the data of the short first read inside its reply instead of by RDMA. The second read goes
    # beyond the end of the file.
    for length_bytes, offset_bytes in ((100, 4097), (MIB, 64 * KIB + 1)):
        result = run_client(
            server, "read", device=device.index, seed=seed, length_bytes=length_bytes, offset_bytes=offset_bytes
        )
        assert result["length_bytes"] == min(length_bytes, MIB - offset_bytes)


@NEEDS_DMABUF
def test_checksum_of_a_device_write_is_the_servers(server: StorageServer, device: Device, nic: Nic, seed: int) -> None:
    """Finding 3: the CPU computed the checksum of a write, and copied short data into the request."""
    for length_bytes in (100, MIB):
        result = run_client(server, "write", device=device.index, seed=seed, length_bytes=length_bytes, offset_bytes=0)
        assert result["length_bytes"] == length_bytes
        assert result["checksums"], "the server returned no checksum of the received data"
        assert (server.root / FILE_NAME).read_bytes()[:length_bytes] == pattern.payload(length_bytes, seed=seed)


@NEEDS_DMABUF
def test_hole_in_a_file_is_zeroed_by_the_device(server: StorageServer, device: Device, nic: Nic, seed: int) -> None:
    """Defect g: the CPU filled a hole with memset."""
    # The file begins with a hole, which ends at this offset.
    hole_end = MIB
    write_from_host(server, pattern.payload(MIB, seed=seed, offset_bytes=hole_end), nic, offset_bytes=hole_end)
    result = run_client(
        server,
        "read",
        device=device.index,
        seed=seed,
        length_bytes=hole_end + 64 * KIB - 3,
        offset_bytes=3,
        holes=[(3, hole_end)],
    )
    assert result["hole_bytes"] == hole_end - 3


@NEEDS_DMABUF
def test_borrowed_device_memory_is_not_a_host_buffer(server: StorageServer, device: Device, nic: Nic) -> None:
    """Finding 6: device memory that another library had allocated was wrapped into a host buffer."""
    with (
        device.allocate(64 * KIB) as memory,
        cuda.borrow(device, memory.address, length_bytes=64 * KIB) as borrowed_memory,
        server.connect(nic) as client,
        client.register(borrowed_memory) as buffer,
    ):
        for buffer_range in (buffer, buffer.subrange(offset_bytes=1, length_bytes=KIB)):
            assert buffer_range.is_device_memory, "device memory is in a host buffer"
            with pytest.raises(UsageError):
                buffer_range.data()
