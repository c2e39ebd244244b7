"""Checksums of chunks: a read of corrupt bytes fails, and a change by another program is not a corruption."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

import pytest
from support.storage import run_storage_server

from gdrkit.errors import ApiError
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import StorageServer

    from gdrkit.storage.client import StorageClient, StorageFile

# The store has one checksum for each chunk of this length.
CHUNK_BYTES = 4 * KIB
FILE_BYTES = 16 * CHUNK_BYTES


def write_to_file(client: StorageClient, file: StorageFile, data: bytes | bytearray, *, offset_bytes: int = 0) -> None:
    """Write data from host memory to a file."""
    with client.register(bytearray(data)) as buffer:
        file.write(buffer, offset_bytes=offset_bytes)


def read_from_file(client: StorageClient, file: StorageFile, *, offset_bytes: int, length_bytes: int) -> bytes:
    """Read bytes of a file into host memory and return them."""
    received_data = bytearray(length_bytes)
    with client.register(received_data) as buffer:
        result = file.read(buffer, offset_bytes=offset_bytes)
    return bytes(received_data[: result.length_bytes])


def corrupt_byte(path: Path, offset_bytes: int) -> None:
    """Change a byte of a file and restore the times of the file, as if the disk had changed the byte."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def list_inodes_with_sums(server: StorageServer) -> set[int]:
    """Return the inode numbers of the files whose checksums the store has. Each number is the name of a sums file."""
    return {int(path.name, 16) for path in (server.root / ".gdrkit" / "sums").glob("*/*")}


@needs(verbs.nic())
def test_corrupt_chunk_fails_each_read_that_contains_it(server: StorageServer, client: StorageClient) -> None:
    data = os.urandom(FILE_BYTES)
    with client.open("file", write=True, create=True) as file:
        write_to_file(client, file, data)
        corrupt_byte(server.root / "file", 5 * CHUNK_BYTES + 17)
        for offset, length in ((0, FILE_BYTES), (5 * CHUNK_BYTES, 1), (6 * CHUNK_BYTES - 1, 1)):
            with pytest.raises(ApiError) as error_info:
                read_from_file(client, file, offset_bytes=offset, length_bytes=length)
            assert error_info.value.errno == errno.EIO
        # A write of a part of the chunk fails too. Otherwise, the server would compute a valid checksum for the corrupt
        # bytes.
        with pytest.raises(ApiError) as error_info:
            write_to_file(client, file, b"x", offset_bytes=5 * CHUNK_BYTES)
        assert error_info.value.errno == errno.EIO
        # The session continues, and the other chunks can be read.
        assert read_from_file(client, file, offset_bytes=0, length_bytes=5 * CHUNK_BYTES) == data[: 5 * CHUNK_BYTES]
        assert (
            read_from_file(client, file, offset_bytes=6 * CHUNK_BYTES, length_bytes=FILE_BYTES)
            == data[6 * CHUNK_BYTES :]
        )
        # Three reads and one write needed the corrupt chunk.
        assert client.statistics()["corruptions"] == 4
        assert server.read_log().count("the data differ from those written") == 4
        write_to_file(client, file, data[5 * CHUNK_BYTES :][:CHUNK_BYTES], offset_bytes=5 * CHUNK_BYTES)
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data


@needs(verbs.nic())
def test_change_by_another_program_is_not_corruption(server: StorageServer, client: StorageClient) -> None:
    data = bytearray(os.urandom(FILE_BYTES))
    with client.open("file", write=True, create=True) as file:
        write_to_file(client, file, data)
        with (server.root / "file").open("r+b") as local_file:
            local_file.seek(20_000)
            local_file.write(b"changed")
            data[20_000:20_007] = b"changed"
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data
        assert client.statistics()["outside_changes"] == 1
        # Before the server computes new checksums for a write, it detects the change by another program.
        write_to_file(client, file, b"again", offset_bytes=20_000)
        data[20_000:20_005] = b"again"
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data
        (server.root / "file").write_bytes(b"short")
        write_to_file(client, file, b"!", offset_bytes=5)
        assert read_from_file(client, file, offset_bytes=0, length_bytes=100) == b"short!"
        assert client.statistics()["corruptions"] == 0


@needs(verbs.nic())
def test_sums_outlive_the_server_and_belong_to_one_file(tmp_path: Path) -> None:
    data = os.urandom(FILE_BYTES + 100)
    with run_storage_server(tmp_path / "store", tmp_path / "log", "--listen", "127.0.0.1:0") as server:
        with server.connect() as client, client.open("file", write=True, create=True) as file:
            write_to_file(client, file, data)
        server.kill()
    corrupt_byte(tmp_path / "store" / "file", FILE_BYTES + 99)
    second_server = run_storage_server(tmp_path / "store", tmp_path / "log", "--listen", "127.0.0.1:0")
    with second_server as server, server.connect() as client:
        with client.open("file") as file:
            assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data[:FILE_BYTES]
            with pytest.raises(ApiError) as error_info:
                read_from_file(client, file, offset_bytes=FILE_BYTES, length_bytes=100)
            assert error_info.value.errno == errno.EIO
        # A new file does not inherit the checksums of the old file with the same name and perhaps the same inode.
        (server.root / "file").unlink()
        (server.root / "file").write_bytes(bytes(FILE_BYTES))
        with client.open("file") as file:
            assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == bytes(FILE_BYTES)


@needs(verbs.nic())
def test_sums_are_removed_with_the_last_name(server: StorageServer, client: StorageClient) -> None:
    with client.open("first", write=True, create=True) as file:
        write_to_file(client, file, bytes(FILE_BYTES))
    inode = (server.root / "first").stat().st_ino
    client.request(messages.HardLink("first", "second"), messages.FileStat)
    assert list_inodes_with_sums(server) == {inode}
    client.request(messages.Unlink("first"), messages.Done)
    assert list_inodes_with_sums(server) == {inode}
    client.request(messages.Unlink("second"), messages.Done)
    assert list_inodes_with_sums(server) == set()


@needs(verbs.nic())
def test_rename_removes_the_sums_of_the_replaced_file(server: StorageServer, client: StorageClient) -> None:
    for name in ("new", "old", "other"):
        with client.open(name, write=True, create=True) as file:
            write_to_file(client, file, bytes(FILE_BYTES))
    new_inode, other_inode = ((server.root / name).stat().st_ino for name in ("new", "other"))
    client.request(messages.Rename("new", "old"), messages.Done)
    assert list_inodes_with_sums(server) == {new_inode, other_inode}
    # Neither an exchange nor a rename to the same name replaces a file.
    client.request(messages.Rename("old", "other", exchange=True), messages.Done)
    client.request(messages.Rename("other", "other"), messages.Done)
    assert list_inodes_with_sums(server) == {new_inode, other_inode}


@needs(verbs.nic())
def test_partly_written_chunk_has_no_sum(server: StorageServer, client: StorageClient) -> None:
    old_data, new_data = os.urandom(FILE_BYTES), os.urandom(FILE_BYTES)
    # RLIMIT_FSIZE applies to all files of the server. This offset is larger than the files of the software twins
    # (libraries that emulate the hardware), so the limit does not affect them.
    write_offset_bytes, written_bytes = 2 * MIB, 20 * KIB + 100
    with client.open("file", write=True, create=True) as file:
        write_to_file(client, file, old_data, offset_bytes=write_offset_bytes)
        resource.prlimit(
            server.process.pid, resource.RLIMIT_FSIZE, (write_offset_bytes + written_bytes, resource.RLIM_INFINITY)
        )
        with pytest.raises(ApiError) as error_info:
            write_to_file(client, file, new_data, offset_bytes=write_offset_bytes)
        assert error_info.value.errno == errno.EFBIG
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert (
            read_from_file(client, file, offset_bytes=write_offset_bytes, length_bytes=FILE_BYTES)
            == new_data[:written_bytes] + old_data[written_bytes:]
        )
        # The failed write ended inside chunk 5.
        for chunk_index, has_sum in ((4, True), (5, False), (6, True)):
            offset_bytes = write_offset_bytes + chunk_index * CHUNK_BYTES
            corrupt_byte(server.root / "file", offset_bytes)
            if has_sum:
                with pytest.raises(ApiError) as error_info:
                    read_from_file(client, file, offset_bytes=offset_bytes, length_bytes=1)
                assert error_info.value.errno == errno.EIO
            else:
                assert len(read_from_file(client, file, offset_bytes=offset_bytes, length_bytes=1)) == 1


@needs(verbs.nic())
def test_truncate_and_punch_hole_update_the_sums(server: StorageServer, client: StorageClient) -> None:
    data = bytearray(os.urandom(FILE_BYTES))
    with client.open("file", write=True, create=True) as file:
        write_to_file(client, file, data)
        file.truncate(30_000)
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data[:30_000]
        file.truncate(50_000)
        data[30_000:] = bytes(20_000)
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data
        write_to_file(client, file, b"tail", offset_bytes=60_000)
        data[50_000:] = bytes(10_000) + b"tail"
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data
        file.punch_hole((100, 200), (4_000, 20_000), (59_999, 1 << 40))
        data[100:200] = bytes(100)
        data[4_000:20_000] = bytes(16_000)
        data[59_999:] = bytes(len(data) - 59_999)
        assert read_from_file(client, file, offset_bytes=0, length_bytes=FILE_BYTES) == data
        assert (server.root / "file").read_bytes() == data
        corrupt_byte(server.root / "file", 3_999)
        with pytest.raises(ApiError) as error_info:
            read_from_file(client, file, offset_bytes=0, length_bytes=1)
        assert error_info.value.errno == errno.EIO
        assert client.statistics()["outside_changes"] == 0


@needs(verbs.nic())
def test_corruption_is_detected_after_utimens(server: StorageServer, client: StorageClient) -> None:
    with client.open("file", write=True, create=True) as file:
        write_to_file(client, file, bytes(FILE_BYTES))
        client.request(messages.Utimens("file", modification_time_ns=10**18), messages.FileStat)
        corrupt_byte(server.root / "file", 0)
        with pytest.raises(ApiError) as error_info:
            read_from_file(client, file, offset_bytes=0, length_bytes=1)
        assert error_info.value.errno == errno.EIO
