"""Tests of reads and writes of files with many lengths, odd offsets, and holes, and at the end of a file.

They compare every byte.
"""

from __future__ import annotations

import errno
import os
import random
from typing import TYPE_CHECKING

import pytest
from support.ledger import read_traffic
from support.storage import MEMORY_KINDS

from gdrkit.errors import Api, ApiError, DataMismatch
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.storage.batch import Batch
from gdrkit.storage.checksum import crc32c
from gdrkit.storage.client import IORequest
from gdrkit.storage.wire import IoOpcode, Result, ResultFlag
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from support.storage import StorageMemoryKind, StorageServer

    from gdrkit.storage.client import StorageClient
    from gdrkit.verbs import Nic

# Each range has a length and an offset in the file.
RANGES = [
    pytest.param(1, 0, id="1B"),
    pytest.param(1, 4095, id="1B-at-4095"),
    pytest.param(4 * KIB, 0, id="4KiB"),
    pytest.param(4 * KIB, 4096 * 3 + 1, id="4KiB-odd"),
    pytest.param(4 * KIB + 1, 511, id="4KiB+1"),
    pytest.param(256 * KIB, 4095, id="256KiB-odd"),
    pytest.param(MIB + 3, 3, id="1MiB+3"),
    pytest.param(64 * MIB, 12345, id="64MiB"),
]


@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "file_offset"), RANGES)
def test_written_bytes_are_in_the_file_and_are_read_back(
    server: StorageServer, client: StorageClient, memory: StorageMemoryKind, length_bytes: int, file_offset: int
) -> None:
    data = os.urandom(length_bytes)
    with client.open("file", write=True, create=True) as file:
        with memory.register_copy(client, data) as buffer:
            assert file.write(buffer, offset_bytes=file_offset).length_bytes == length_bytes
        assert (server.root / "file").read_bytes() == bytes(file_offset) + data
        with memory.register_copy(client, b"\xa5" * length_bytes) as buffer:
            assert file.read(buffer, offset_bytes=file_offset).length_bytes == length_bytes
            assert memory.read_buffer(buffer) == data
    assert client.statistics()["corruptions"] == 0


@pytest.mark.qualify
@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
def test_read_at_the_end_of_a_file_is_short(
    server: StorageServer, client: StorageClient, memory: StorageMemoryKind
) -> None:
    data = os.urandom(300 * KIB + 7)
    (server.root / "file").write_bytes(data)
    with client.open("file") as file, memory.register_copy(client, b"\xa5" * MIB) as buffer:
        assert file.read(buffer, offset_bytes=100).length_bytes == len(data) - 100
        received_data = memory.read_buffer(buffer)
        assert received_data[: len(data) - 100] == data[100:]
        assert set(received_data[len(data) - 100 :]) == {0xA5}
        assert file.read(buffer, offset_bytes=len(data)).length_bytes == 0
        assert file.read(buffer, offset_bytes=1 << 50).length_bytes == 0


@pytest.mark.qualify
@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
def test_holes_read_as_zeros_or_fail_if_forbidden(
    server: StorageServer, client: StorageClient, memory: StorageMemoryKind
) -> None:
    data = os.urandom(MIB)
    with (server.root / "file").open("wb") as local_file:
        local_file.write(data)
        local_file.seek(3 * MIB)
        local_file.write(data)
        local_file.truncate(5 * MIB + 5)
    with client.open("file") as file, memory.register_copy(client, b"\xa5" * (5 * MIB + 5)) as buffer:
        result = file.read(buffer, offset_bytes=0)
        assert result.length_bytes == 5 * MIB + 5
        assert memory.read_buffer(buffer) == data + bytes(2 * MIB) + data + bytes(MIB + 5)
        # If a read goes to device memory, the server does not send the holes.
        assert result.hole_bytes == (3 * MIB + 5 if buffer.is_device_memory else 0)
        with pytest.raises(ApiError) as error_info:
            file.read(buffer, offset_bytes=0, forbid_holes=True)
        assert error_info.value.errno == errno.ENODATA
        subrange = buffer.subrange(offset_bytes=0, length_bytes=MIB)
        assert file.read(subrange, offset_bytes=3 * MIB, forbid_holes=True).length_bytes == MIB


@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
def test_batch_of_small_transfers_at_random_offsets(
    server: StorageServer, client: StorageClient, memory: StorageMemoryKind, seed: int
) -> None:
    rng = random.Random(seed)
    content = bytearray(os.urandom(2 * MIB))
    (server.root / "file").write_bytes(content)
    with client.open("file", write=True) as file, memory.register_copy(client, os.urandom(MIB)) as buffer:
        buffer_data = memory.read_buffer(buffer)
        write_requests = []
        for index in range(128):
            length = rng.randint(1, 8 * KIB)
            file_offset = index * 16 * KIB + rng.randint(0, 8 * KIB)
            buffer_offset = rng.randint(0, MIB - length)
            buffer_range = buffer.subrange(offset_bytes=buffer_offset, length_bytes=length)
            write_requests.append(IORequest(file, file_offset, buffer_range))
            content[file_offset : file_offset + length] = buffer_data[buffer_offset : buffer_offset + length]
        client.batch_write(write_requests)
        assert (server.root / "file").read_bytes() == content
        read_requests = [
            IORequest(file, 16 * KIB * index + 1, buffer.subrange(offset_bytes=4 * KIB * index, length_bytes=4 * KIB))
            for index in range(100)
        ]
        client.batch_read(read_requests)
        received_data = memory.read_buffer(buffer)
        for index in range(100):
            assert received_data[4 * KIB * index :][: 4 * KIB] == content[16 * KIB * index + 1 :][: 4 * KIB]


@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
def test_write_of_device_memory_returns_its_checksum(client: StorageClient, memory: StorageMemoryKind) -> None:
    data = os.urandom(300 * KIB)
    with client.open("file", write=True, create=True) as file, memory.register_copy(client, data) as buffer:
        result = file.write(buffer, offset_bytes=1)
        assert result.checksums == ((crc32c(data),) if buffer.is_device_memory else ())


@needs(verbs.nic())
def test_bytes_with_another_checksum_name_both_checksums(server: StorageServer, nics: tuple[Nic, ...]) -> None:
    """The reply of the server has the checksum of other bytes than the bytes that the NIC delivered."""
    data = os.urandom(4 * KIB)
    (server.root / "file").write_bytes(data)
    with server.connect(nics[0]) as client, client.open("file") as file, client.register(bytearray(data)) as buffer:
        batch = Batch(IoOpcode.READ, client.limits, forbid_holes=False, checksum=True)
        # The queue pair with index 0 uses the first NIC.
        batch.add(IORequest(file, 0, buffer), iter([(0, nics[0])]))
        sent_checksum = crc32c(data[:-1])
        result = Result(tag=0, result=len(data), checksum=sent_checksum, flags=ResultFlag.CHECKSUM_VALID)
        with pytest.raises(DataMismatch) as error_info:
            batch.join([result])
    message = f"the checksum of 4096 bytes differs: expected {sent_checksum:08x}, found {crc32c(data):08x}"
    assert (error_info.value.message, error_info.value.first_offset_bytes) == (message, None)


@needs(verbs.nic(count_min=2))
def test_transfers_work_with_any_subset_of_the_nics(server: StorageServer, nics: tuple[Nic, ...]) -> None:
    data = os.urandom(8 * MIB)
    (server.root / "file").write_bytes(data)
    for subset in (nics, nics[:1], nics[1:], nics[::-1]):
        with server.connect(*subset) as client, client.open("file") as file:
            received_data = bytearray(len(data))
            with client.register(received_data) as buffer:
                requests = [
                    IORequest(file, offset_bytes, buffer.subrange(offset_bytes=offset_bytes, length_bytes=MIB))
                    for offset_bytes in range(0, len(data), MIB)
                ]
                client.batch_read(requests)
            assert received_data == data
            assert len(client.nics) == len(subset)


@needs(verbs.nic(count_min=2), software(Api.VERBS))
@pytest.mark.parametrize("is_write", [False, True])
def test_each_nic_carries_its_share_of_the_bytes(
    server: StorageServer, nics: tuple[Nic, ...], *, is_write: bool
) -> None:
    # The server is the RDMA initiator, so the NICs of this process count its RDMA READs and WRITEs as served.
    data, counter_name = os.urandom(8 * MIB), f"served_{'read' if is_write else 'write'}_bytes"
    (server.root / "file").write_bytes(bytes(len(data)) if is_write else data)
    for subset in (nics, nics[:1], nics[1:]):
        with server.connect(*subset) as client, client.open("file", write=is_write) as file:
            received_data = bytearray(data if is_write else len(data))
            with client.register(received_data) as buffer:
                requests = [
                    IORequest(file, offset_bytes, buffer.subrange(offset_bytes=offset_bytes, length_bytes=MIB))
                    for offset_bytes in range(0, len(data), MIB)
                ]
                traffic_before = read_traffic(Api.VERBS)
                (client.batch_write if is_write else client.batch_read)(requests)
                traffic_after = read_traffic(Api.VERBS)
        served_bytes_by_nic = {
            name: counters[counter_name] - traffic_before.get(name, {}).get(counter_name, 0)
            for name, counters in traffic_after.items()
        }
        assert {name for name, served_bytes in served_bytes_by_nic.items() if served_bytes} == {
            nic.name for nic in subset
        }
        assert sum(served_bytes_by_nic.values()) == len(data)
        # The client distributes the requests over the NICs in turn.
        nonzero_bytes = [served_bytes for served_bytes in served_bytes_by_nic.values() if served_bytes]
        assert max(nonzero_bytes) - min(nonzero_bytes) <= MIB, served_bytes_by_nic


@pytest.mark.qualify
@needs(verbs.nic())
def test_two_clients_write_and_read_the_same_file(server: StorageServer) -> None:
    with server.connect() as writing_client, server.connect() as reading_client:
        with (
            writing_client.open("file", write=True, create=True) as written_file,
            reading_client.open("file") as read_file,
        ):
            for round_number in range(20):
                data = os.urandom(10_000)
                with writing_client.register(bytearray(data)) as buffer:
                    written_file.write(buffer, offset_bytes=round_number * 5_000)
                received_data = bytearray(10_000)
                with reading_client.register(received_data) as buffer:
                    assert read_file.read(buffer, offset_bytes=round_number * 5_000).length_bytes == 10_000
                assert received_data == data
        assert writing_client.statistics()["corruptions"] == 0
