"""Bytes that the server did not write: frames of another version or form, and sums of another file."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from support.storage import serving

from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from support.storage import Service

SIZE = 64 * KIB
VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "frames.txt"


def sums_of(root: Path, name: str) -> Path:
    """Return the file in which the store keeps the sums of a file."""
    inode = (root / name).stat().st_ino
    return root / ".gdrkit" / "sums" / f"{inode & 255:02x}" / f"{inode:016x}"


@needs(verbs.nic())
def test_wrong_frames_get_no_result_and_end_the_session(service: Service) -> None:
    lines = [line.split() for line in VECTORS.read_text().splitlines() if line and not line.startswith("#")]
    wrong = {name: bytes.fromhex(frame) for verdict, name, frame in lines if verdict == "wrong"}
    assert {"version", "magic"} <= wrong.keys()
    # In a stream, a right frame with a byte behind it is the beginning of the next.
    del wrong["too-long"]
    for name, frame in wrong.items():
        with service.connect() as client:
            end = client._transfers._socket  # noqa: SLF001 - a client never sends such a frame by itself.
            end.settimeout(10)
            end.sendall(frame)
            # Some vectors are the beginning of a frame, whose end the server awaits.
            if not select.select([end], [], [], 2)[0]:
                end.shutdown(socket.SHUT_WR)
            # A reset: what the server had not read was thrown away with the connection.
            with contextlib.suppress(ConnectionResetError):
                assert end.recv(1) == b"", name


@needs(verbs.nic())
def test_sums_of_another_file_are_not_believed(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    contents = {name: os.urandom(SIZE) for name in ("one", "other")}
    with serving(root, log, "--listen", "127.0.0.1:0") as service, service.connect() as client:
        for name, data in contents.items():
            with client.open(name, write=True, create=True) as file, client.register(bytearray(data)) as buffer:
                file.write(buffer, offset_bytes=0)
    # As if the inode number of a file that is gone were that of a new one, which even has its size and time.
    shutil.copyfile(sums_of(root, "one"), sums_of(root, "other"))
    found = (root / "one").stat()
    os.utime(root / "other", ns=(found.st_atime_ns, found.st_mtime_ns))
    with serving(root, log, "--listen", "127.0.0.1:0") as service, service.connect() as client:
        target = bytearray(SIZE)
        with client.open("other") as file, client.register(target) as buffer:
            assert file.read(buffer, offset_bytes=0).length_bytes == SIZE
        assert target == contents["other"]
        assert client.statistics()["corruptions"] == 0
