"""Checksums of chunks: a corruption is an error, and a change by another program is not."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

import pytest
from support.storage import storage_server

from gdrkit.errors import ApiError
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import Service

    from gdrkit.storage.client import StorageClient, StorageFile

SIZE = 64 * KIB


def write(client: StorageClient, file: StorageFile, data: bytes | bytearray, *, offset_bytes: int = 0) -> None:
    with client.register(bytearray(data)) as buffer:
        file.write(buffer, offset_bytes=offset_bytes)


def read(client: StorageClient, file: StorageFile, *, offset_bytes: int, length_bytes: int) -> bytes:
    target = bytearray(length_bytes)
    with client.register(target) as buffer:
        result = file.read(buffer, offset_bytes=offset_bytes)
    return bytes(target[: result.length_bytes])


def corrupt(path: Path, offset_bytes: int) -> None:
    """Change a byte of a file and restore its times, as if the disk had changed it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@needs(verbs.nic())
def test_corrupt_chunk_fails_each_read_that_contains_it(service: Service, client: StorageClient) -> None:
    data = os.urandom(SIZE)
    with client.open("file", write=True, create=True) as file:
        write(client, file, data)
        corrupt(service.root / "file", 5 * 4 * KIB + 17)
        for offset, length in ((0, SIZE), (5 * 4 * KIB, 1), (6 * 4 * KIB - 1, 1)):
            with pytest.raises(ApiError) as error:
                read(client, file, offset_bytes=offset, length_bytes=length)
            assert error.value.errno == errno.EIO
        # A write of a part of the chunk would give the corrupt rest a valid checksum.
        with pytest.raises(ApiError) as error:
            write(client, file, b"x", offset_bytes=5 * 4 * KIB)
        assert error.value.errno == errno.EIO
        # The session goes on, and the other chunks can be read.
        assert read(client, file, offset_bytes=0, length_bytes=5 * 4 * KIB) == data[: 5 * 4 * KIB]
        assert read(client, file, offset_bytes=6 * 4 * KIB, length_bytes=SIZE) == data[6 * 4 * KIB :]
        assert client.statistics()["corruptions"] == 4
        assert service.log_text().count("the data differ from those written") == 4
        write(client, file, data[5 * 4 * KIB :][: 4 * KIB], offset_bytes=5 * 4 * KIB)
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data


@needs(verbs.nic())
def test_change_by_another_program_is_not_corruption(service: Service, client: StorageClient) -> None:
    data = bytearray(os.urandom(SIZE))
    with client.open("file", write=True, create=True) as file:
        write(client, file, data)
        with (service.root / "file").open("r+b") as local_file:
            local_file.seek(20_000)
            local_file.write(b"changed")
            data[20_000:20_007] = b"changed"
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data
        assert client.statistics()["outside_changes"] == 1
        # A write by the server makes checksums again. It detects an earlier change by another program.
        write(client, file, b"again", offset_bytes=20_000)
        data[20_000:20_005] = b"again"
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data
        (service.root / "file").write_bytes(b"short")
        write(client, file, b"!", offset_bytes=5)
        assert read(client, file, offset_bytes=0, length_bytes=100) == b"short!"
        assert client.statistics()["corruptions"] == 0


@needs(verbs.nic())
def test_sums_outlive_the_server_and_belong_to_one_file(tmp_path: Path) -> None:
    data = os.urandom(SIZE + 100)
    with storage_server(tmp_path / "store", tmp_path / "log", "--listen", "127.0.0.1:0") as service:
        with service.connect() as client, client.open("file", write=True, create=True) as file:
            write(client, file, data)
        service.kill()
    corrupt(tmp_path / "store" / "file", SIZE + 99)
    again = storage_server(tmp_path / "store", tmp_path / "log", "--listen", "127.0.0.1:0")
    with again as service, service.connect() as client:
        with client.open("file") as file:
            assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data[:SIZE]
            with pytest.raises(ApiError) as error:
                read(client, file, offset_bytes=SIZE, length_bytes=100)
            assert error.value.errno == errno.EIO
        # A new file with the name, and perhaps the inode, of the old one has none of its checksums.
        (service.root / "file").unlink()
        (service.root / "file").write_bytes(bytes(SIZE))
        with client.open("file") as file:
            assert read(client, file, offset_bytes=0, length_bytes=SIZE) == bytes(SIZE)


@needs(verbs.nic())
def test_partly_written_chunk_has_no_sum(service: Service, client: StorageClient) -> None:
    before, after = os.urandom(SIZE), os.urandom(SIZE)
    # The limit applies to all files of the server, also to those of the software twins.
    begin, moved = 2 * MIB, 20 * KIB + 100
    with client.open("file", write=True, create=True) as file:
        write(client, file, before, offset_bytes=begin)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (begin + moved, resource.RLIM_INFINITY))
        with pytest.raises(ApiError) as error:
            write(client, file, after, offset_bytes=begin)
        assert error.value.errno == errno.EFBIG
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert read(client, file, offset_bytes=begin, length_bytes=SIZE) == after[:moved] + before[moved:]
        for chunk, has_sum in ((4, True), (5, False), (6, True)):
            at = begin + chunk * 4 * KIB
            corrupt(service.root / "file", at)
            if has_sum:
                with pytest.raises(ApiError) as error:
                    read(client, file, offset_bytes=at, length_bytes=1)
                assert error.value.errno == errno.EIO
            else:
                assert len(read(client, file, offset_bytes=at, length_bytes=1)) == 1


@needs(verbs.nic())
def test_truncate_and_punch_hole_update_the_sums(service: Service, client: StorageClient) -> None:
    data = bytearray(os.urandom(SIZE))
    with client.open("file", write=True, create=True) as file:
        write(client, file, data)
        file.truncate(30_000)
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data[:30_000]
        file.truncate(50_000)
        data[30_000:] = bytes(20_000)
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data
        write(client, file, b"tail", offset_bytes=60_000)
        data[50_000:] = bytes(10_000) + b"tail"
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data
        file.punch_hole((100, 200), (4_000, 20_000), (59_999, 1 << 40))
        data[100:200] = bytes(100)
        data[4_000:20_000] = bytes(16_000)
        data[59_999:] = bytes(len(data) - 59_999)
        assert read(client, file, offset_bytes=0, length_bytes=SIZE) == data
        assert (service.root / "file").read_bytes() == data
        corrupt(service.root / "file", 3_999)
        with pytest.raises(ApiError) as error:
            read(client, file, offset_bytes=0, length_bytes=1)
        assert error.value.errno == errno.EIO
        assert client.statistics()["outside_changes"] == 0


@needs(verbs.nic())
def test_corruption_is_detected_after_utimens(service: Service, client: StorageClient) -> None:
    from gdrkit.storage import messages

    with client.open("file", write=True, create=True) as file:
        write(client, file, bytes(SIZE))
        client.request(messages.Utimens("file", modification_time_ns=10**18), messages.FileStat)
        corrupt(service.root / "file", 0)
        with pytest.raises(ApiError) as error:
            read(client, file, offset_bytes=0, length_bytes=1)
        assert error.value.errno == errno.EIO
