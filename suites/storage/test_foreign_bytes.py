"""Tests of invalid frames on the data connection, and of a checksum file (sums file) that belongs to another file."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from support.storage import run_storage_server

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from support.storage import StorageServer

FILE_BYTES = 64 * KIB
FRAMES_PATH = Path(__file__).resolve().parents[1] / "vectors" / "frames.txt"


def find_sums_file(root: Path, name: str) -> Path:
    """Return the path of the sums file of the file `name`. The sums file is named after the inode of the file."""
    inode = (root / name).stat().st_ino
    return root / ".gdrkit" / "sums" / f"{inode & 255:02x}" / f"{inode:016x}"


@needs(verbs.nic())
def test_invalid_frame_gets_no_result_and_ends_the_session(server: StorageServer) -> None:
    rows = [line.split() for line in FRAMES_PATH.read_text().splitlines() if line and not line.startswith("#")]
    invalid_frames = {name: bytes.fromhex(frame_hex) for validity, name, frame_hex in rows if validity == "wrong"}
    assert {"version", "magic"} <= invalid_frames.keys()
    # This vector is a valid frame and one more byte. On a connection, that byte begins the next frame, so nothing is
    # invalid.
    del invalid_frames["too-long"]
    for name, frame in invalid_frames.items():
        with server.connect() as client:
            data_socket = client._transfers._socket  # noqa: SLF001 - the client itself never sends such a frame.
            data_socket.settimeout(10)
            data_socket.sendall(frame)
            # Some vectors are incomplete frames. The server waits for the rest until the connection ends.
            if not select.select([data_socket], [], [], 2)[0]:
                data_socket.shutdown(socket.SHUT_WR)
            # If the server closes the connection before reading all bytes, the kernel resets the connection.
            with contextlib.suppress(ConnectionResetError):
                assert data_socket.recv(1) == b"", name


@needs(verbs.nic())
def test_sums_of_another_file_are_ignored(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    contents = {name: os.urandom(FILE_BYTES) for name in ("one", "other")}
    with run_storage_server(root, log, "--listen", "127.0.0.1:0") as server, server.connect() as client:
        for name, data in contents.items():
            with client.open(name, write=True, create=True) as file, client.register(bytearray(data)) as buffer:
                file.write(buffer, offset_bytes=0)
    # This state could arise if a new file gets the inode number, the size and the time of a deleted file.
    shutil.copyfile(find_sums_file(root, "one"), find_sums_file(root, "other"))
    status = (root / "one").stat()
    os.utime(root / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    with run_storage_server(root, log, "--listen", "127.0.0.1:0") as server, server.connect() as client:
        received_data = bytearray(FILE_BYTES)
        with client.open("other") as file, client.register(received_data) as buffer:
            assert file.read(buffer, offset_bytes=0).length_bytes == FILE_BYTES
        assert received_data == contents["other"]
        assert client.statistics()["corruptions"] == 0
