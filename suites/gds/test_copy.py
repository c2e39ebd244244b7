"""Copies by ``gdrkit copy`` and ``gds.copy_file``: their bytes, names and output. A copy that fails changes no file."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from gds.faulty_file import FaultyFile

from gdrkit import gds, pattern
from gdrkit.errors import ApiError, UsageError
from gdrkit.harness.needs import cuda, host, needs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

DEVICE_INDEXES = [
    pytest.param(gds.HOST, id="host"),
    pytest.param(0, marks=needs(cuda.device()), id="device"),
]


def list_file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run_gdrkit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("device_index", DEVICE_INDEXES)
@pytest.mark.parametrize("size_bytes", [0, 1, MIB, 5 * MIB + 3])
def test_copy_equals_its_source(tmp_path: Path, seed: int, device_index: int, size_bytes: int) -> None:
    source, copy = tmp_path / "file", tmp_path / "copy"
    source.write_bytes(pattern.payload(size_bytes, seed=seed))
    source.chmod(0o640)
    copy.write_bytes(b"an older file")
    copy.chmod(0o604)
    progress: list[tuple[int, int]] = []
    start_s = time.monotonic()
    result = gds.copy_file(
        source,
        copy,
        device_index=device_index,
        chunk_bytes=MIB,
        direct="never",
        durable=True,
        check=True,
        on_progress=lambda done_bytes, total_bytes: progress.append((done_bytes, total_bytes)),
    )
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_mode & 0o7777 == 0o604
    assert (result.bytes, result.is_checked) == (size_bytes, True)
    # The duration does not include the comparison.
    assert 0 < result.duration_s < time.monotonic() - start_s
    assert result.read.routes == result.write.routes == ({"engine": size_bytes} if size_bytes else {})
    # The copy of an empty file reports no progress.
    assert not progress or progress[-1] == (size_bytes, size_bytes)
    assert progress == sorted(progress)
    # If the destination is a folder, the copy has the name of the source.
    (tmp_path / "folder").mkdir()
    gds.copy_file(source, tmp_path / "folder", device_index=device_index, direct="never")
    assert (tmp_path / "folder" / "file").read_bytes() == source.read_bytes()
    assert list_file_names(tmp_path) == ["copy", "file", "folder"]


def test_refused_copy_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    for destination in ("file", "link", "."):
        with pytest.raises(UsageError):
            gds.copy_file(tmp_path / "file", tmp_path / destination, device_index=gds.HOST)
    for source, destination, expected_errno, name_in_error in (
        ("missing", "new", errno.ENOENT, "missing"),
        (".", "new", errno.EISDIR, "."),
        ("file", "none/new", errno.ENOENT, "none"),
    ):
        with pytest.raises(ApiError) as error_info:
            gds.copy_file(tmp_path / source, tmp_path / destination, device_index=gds.HOST)
        assert (error_info.value.errno, error_info.value.arguments["path"]) == (
            expected_errno,
            str(tmp_path / name_in_error),
        )
    assert list_file_names(tmp_path) == ["file", "link"]
    assert (tmp_path / "file").read_bytes() == b"1234"


@needs(host.fuse)
@pytest.mark.parametrize("device_index", DEVICE_INDEXES)
def test_failed_copy_leaves_the_old_file(tmp_path: Path, seed: int, device_index: int) -> None:
    (tmp_path / "mount").mkdir()
    copy = tmp_path / "copy"
    copy.write_bytes(b"old")
    with FaultyFile(tmp_path / "mount", length_bytes=4 * MIB, seed=seed) as faulty_file:
        faulty_file.send(f"eio {3 * MIB + 5}")
        with pytest.raises(gds.TransferFailed) as error_info:
            gds.copy_file(faulty_file.path, copy, device_index=device_index, chunk_bytes=MIB, direct="never")
        assert error_info.value.errno == errno.EIO
        # The error is about one chunk, which begins at 3 MiB and of which 5 bytes arrived.
        assert error_info.value.partial_result.bytes == 5
    assert copy.read_bytes() == b"old"
    assert list_file_names(tmp_path) == ["copy", "mount"]


def test_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * MIB))

    def interrupt(done_bytes: int, total_bytes: int) -> None:
        if done_bytes >= 2 * MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gds.copy_file(
            tmp_path / "file", tmp_path / "copy", device_index=gds.HOST, chunk_bytes=MIB, on_progress=interrupt
        )
    assert list_file_names(tmp_path) == ["file"]


@needs(cuda.device())
def test_copy_command_reports_the_routes(tmp_path: Path, seed: int) -> None:
    source, copy = tmp_path / "file", tmp_path / "copy"
    source.write_bytes(pattern.payload(2 * MIB, seed=seed))
    process = run_gdrkit("copy", source, copy, "--check", "--sync", "--json")
    assert (process.returncode, process.stderr) == (0, "")
    output: dict[str, Any] = json.loads(process.stdout)
    assert copy.read_bytes() == source.read_bytes()
    assert (output["bytes"], output["is_checked"], output["destination"]) == (2 * MIB, True, str(copy))
    for totals in (output["read"], output["write"]):
        # If the copy engine moved the bytes, the output has the reason why they took no direct path.
        assert sum(totals["routes"].values()) == 2 * MIB
        assert bool(totals["why_not_direct"]) == ("engine" in totals["routes"])
    assert output["substrate"]["cuda"] in {"twin", "hardware"}
    process = run_gdrkit("copy", source, copy)
    assert process.returncode == 0
    # The command prints a rate only on hardware.
    assert ("GB/s" in process.stdout) == (output["substrate"]["cuda"] == "hardware")
    assert ("not direct: " in process.stdout) == bool(output["read"]["why_not_direct"])


@pytest.mark.parametrize(
    ("arguments", "exit_code", "error_text"),
    [
        (["file", "file", "--host"], 2, "are the same file"),
        (["none", "copy", "--host"], 1, "ENOENT"),
        (["file", "copy", "--host", "--device", "0"], 2, "--host and --device cannot be combined"),
        (["file", "copy", "--host", "--direct", "required"], 1, "NOT_DIRECT"),
        (["file", "copy", "--direct", "maybe"], 2, "maybe"),
    ],
)
def test_copy_command_fails_without_a_traceback(
    tmp_path: Path, arguments: list[str], exit_code: int, error_text: str
) -> None:
    (tmp_path / "file").write_bytes(bytes(64 * KIB))
    paths = [str(tmp_path / name) for name in arguments[:2]]
    process = run_gdrkit("copy", *paths, *arguments[2:])
    assert process.returncode == exit_code
    assert error_text in process.stderr
    assert "Traceback" not in process.stderr
    assert list_file_names(tmp_path) == ["file"]
