"""A wrong file in place of libnvidia-ml.so.1 causes an error with the same errno and reason as for other libraries."""

from __future__ import annotations

import ctypes.util
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit.errors import Reason

QUERY_PROGRAM = """
import json
from gdrkit import host
from gdrkit.errors import SetupMissing
try:
    host.nvml_facts()
except SetupMissing as error:
    print(json.dumps([error.api.value, error.operation, error.status_name, error.errno, error.reason.value]))
"""
MEMORY_MAP = Path("/proc/self/maps")


def query_nvml(folder: Path) -> list[object]:
    """Query NVML in a process whose dynamic loader searches `folder` first, and return the fields of the error."""
    # LD_AUDIT is empty, because it may name a library that loads the software twin of NVML (a library that emulates
    # NVML) instead of the wrong file.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "LD_AUDIT": ""}
    child = subprocess.run(
        [sys.executable, "-c", QUERY_PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    error_fields: list[object] = json.loads(child.stdout)
    return error_fields


def find_libm() -> Path:
    """Return the path of libm, a library that every process can load and that has no function of NVML."""
    ctypes.CDLL(ctypes.util.find_library("m"))
    paths = (line.split()[-1] for line in MEMORY_MAP.read_text().splitlines())
    return next(Path(path) for path in paths if "/libm.so" in path or "/libm-" in path)


# If `content` is a path, the case copies the content of that file.
@pytest.mark.parametrize(
    ("content", "status_name", "error_number", "reason"),
    [
        (b"", "ENOEXEC", errno.ENOEXEC, Reason.LIBRARY_DAMAGED),
        (b"no library" * 100, "ENOEXEC", errno.ENOEXEC, Reason.LIBRARY_DAMAGED),
        (Path(sys.executable).resolve(), "ELIBBAD", errno.ELIBBAD, Reason.LIBRARY_WRONG_ABI),
    ],
    ids=["empty", "text", "program"],
)
def test_file_that_is_not_a_library_is_refused(
    tmp_path: Path, content: bytes | Path, status_name: str, error_number: int, reason: Reason
) -> None:
    library_bytes = content.read_bytes() if isinstance(content, Path) else content
    (tmp_path / "libnvidia-ml.so.1").write_bytes(library_bytes)
    expected_error = ["loader", "dlopen libnvidia-ml.so.1", status_name, error_number, reason.value]
    assert query_nvml(tmp_path) == expected_error


def test_library_without_nvml_functions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(find_libm().read_bytes())
    expected_error = ["nvml", "nvmlInit", "NVML_ERROR_FUNCTION_NOT_FOUND", None, Reason.NOT_SUPPORTED.value]
    assert query_nvml(tmp_path) == expected_error
