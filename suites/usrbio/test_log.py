"""The log of the usrbio client library: which lines each value of HF3FS_USRBIO_LIB_LOG adds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.python_child import suites_environ
from support.raw_usrbio import AgentProcess

from gdrkit import pattern
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(verbs.nic())

READ_BYTES = 64 * KIB
# Program that reads a file once, and then prepares a read of a descriptor that is not registered.
READ_PROGRAM = """
import sys
from datetime import timedelta
from gdrkit import usrbio

mount, path, memory_kind = sys.argv[1:]
length_bytes = 65536
with open(path, "rb") as file, usrbio.make_ioring(mount, 4, for_read=True) as ring:
    make_iov = usrbio.make_gpu_iovec if memory_kind == "device" else usrbio.create_iovec
    with make_iov(mount, length_bytes=length_bytes) as iov:
        usrbio.register_fd(file.fileno())
        ring.prepare(iov[:length_bytes], True, file.fileno(), 4096)
        (completion,) = ring.submit().wait(min_results=1, timeout=timedelta(seconds=60))
        assert completion.result == length_bytes
        usrbio.deregister_fd(file.fileno())
        try:
            ring.prepare(iov[:length_bytes], True, file.fileno(), 0)
        except OSError:
            pass
"""
_LOG_LINE = re.compile(r"hf3fs_usrbio (DBG|INFO|WARN|ERR): (.+)")


def run_and_read_log(mount: Path, path: Path, level: str | None, *, memory_kind: str = "host") -> list[tuple[str, str]]:
    """Run the program, and return level and text of each line that the library logged. Fail on any other line."""
    environ = {name: value for name, value in os.environ.items() if name != "HF3FS_USRBIO_LIB_LOG"}
    environ |= {} if level is None else {"HF3FS_USRBIO_LIB_LOG": level}
    command = [sys.executable, "-c", READ_PROGRAM, str(mount), str(path), memory_kind]
    child = subprocess.run(command, env=suites_environ(environ), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    matches = [_LOG_LINE.fullmatch(line) for line in child.stderr.splitlines()]
    assert all(matches), child.stderr
    return [(match[1], match[2]) for match in matches if match]


def join_texts(levels_and_texts: list[tuple[str, str]], level: str) -> str:
    """Return the texts of the lines of one level, with the words UUID and ADDRESS for UUIDs and addresses."""
    text = "\n".join(text for line_level, text in levels_and_texts if line_level == level)
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text)
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


@pytest.fixture
def mounted_file(tmp_path: Path, seed: int) -> Path:
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=seed))
    return tmp_path / "file"


@pytest.mark.parametrize("level", [None, "OFF", "ERR", "WARN", "nonsense"])
def test_program_without_failures_logs_nothing_by_default(mounted_file: Path, level: str | None) -> None:
    # The last prepare of the program fails, but the library logs a refused operation only at the level DBG.
    with AgentProcess(mounted_file.parent):
        assert run_and_read_log(mounted_file.parent, mounted_file, level) == []


def test_info_says_what_was_created_and_by_which_route(mounted_file: Path) -> None:
    mount = mounted_file.parent
    with AgentProcess(mount):
        levels_and_texts = run_and_read_log(mount, mounted_file, "INFO")
    assert {level for level, _text in levels_and_texts} == {"INFO"}
    info_lines = join_texts(levels_and_texts, "INFO")
    assert f"connected to the agent of {mount}" in info_lines
    assert f"published UUID to the agent of {mount}, with 1 descriptor" in info_lines
    assert f"created iov UUID: {READ_BYTES} bytes of shared memory" in info_lines
    assert re.search(r"^created ring UUID\.r\S*: \d+ bytes of shared memory$", info_lines, re.MULTILINE)
    assert re.search(r"^registered descriptor \d+: inode \d+, by the agent$", info_lines, re.MULTILINE)
    assert re.search(r"^deregistered descriptor \d+: inode \d+$", info_lines, re.MULTILINE)
    assert f"withdrew UUID from the agent of {mount}" in info_lines
    # The iov and the ring were destroyed.
    assert info_lines.count("destroyed UUID") == 2


@needs(verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
def test_info_names_the_route_of_device_memory(mounted_file: Path) -> None:
    with AgentProcess(mounted_file.parent):
        info_lines = join_texts(
            run_and_read_log(mounted_file.parent, mounted_file, "INFO", memory_kind="device"), "INFO"
        )
    assert re.search(
        r"^UUID\.gdr\.d0 goes to the agent by a dma-buf of \d+ bytes, at offset \d+$", info_lines, re.MULTILINE
    )
    assert f"created GPU iov: {READ_BYTES} bytes at ADDRESS on device 0, with IPC handle" in info_lines
    assert "destroyed GPU iov at ADDRESS on device 0" in info_lines


def test_debug_shows_each_operation(mounted_file: Path) -> None:
    with AgentProcess(mounted_file.parent):
        levels_and_texts = run_and_read_log(mounted_file.parent, mounted_file, "DBG")
    assert {level for level, _text in levels_and_texts} == {"INFO", "DBG"}
    prepared_line, submitted_line, completed_line, refused_line = join_texts(levels_and_texts, "DBG").splitlines()
    operation_pattern = rf"ring ADDRESS: read {READ_BYTES} bytes at offset %s of descriptor \d+, memory ADDRESS: %s"
    assert re.fullmatch(operation_pattern % ("4096", r"entry \d+"), prepared_line)
    assert re.fullmatch(r"ring ADDRESS: submitted; the agent (slept and was woken|is awake)", submitted_line)
    assert re.fullmatch(rf"ring ADDRESS: entry \d+ completed: {READ_BYTES}", completed_line)
    # The number -9 is -EBADF.
    assert re.fullmatch(operation_pattern % ("0", "refused with -9"), refused_line)


def test_failed_call_is_logged_as_an_error(mounted_file: Path) -> None:
    program = "import sys; from gdrkit import usrbio; usrbio.make_ioring(sys.argv[1], 4, for_read=True)"
    command = [sys.executable, "-c", program, str(mounted_file.parent)]
    for level, line_count in (("ERR", 1), ("OFF", 0)):
        environ = suites_environ({**os.environ, "HF3FS_USRBIO_LIB_LOG": level})
        child = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert child.returncode == 1
        error_lines = [line for line in child.stderr.splitlines() if line.startswith("hf3fs_usrbio ERR: readlink(")]
        assert len(error_lines) == line_count
