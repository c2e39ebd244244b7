"""A library that is missing, damaged or of another ABI causes a SetupMissing that names the library.

Imports of gdrkit open no library. The cases load libraries in child processes, because a process reads LD_LIBRARY_PATH
once and keeps libraries open. _call_twice() empties LD_AUDIT, which may name the audit library of the software twins.
That library would load a twin (a library that emulates the hardware below an API) in place of the damaged library.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from gdrkit import loader
from gdrkit.errors import Reason, SetupMissing

# This program makes one call twice, and prints a list with the fields of each SetupMissing that the call raised.
_CALL_TWICE_PROGRAM = """
import json, sys
from gdrkit import cuda, verbs
from gdrkit.errors import SetupMissing
errors_of_calls = []
for _ in range(2):
    try:
        {call}
    except SetupMissing as error:
        errors_of_calls.append([error.api.value, error.operation, error.errno, error.reason.value, error.what_to_do])
print(json.dumps(errors_of_calls))
"""


def _call_twice(call: str, library_folder: Path) -> list[list[object]]:
    environment = os.environ | {"LD_LIBRARY_PATH": str(library_folder), "LD_AUDIT": ""}
    program = _CALL_TWICE_PROGRAM.format(call=call)
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    errors_of_calls: list[list[object]] = json.loads(child.stdout)
    return errors_of_calls


CALLS_AND_SONAMES = [
    pytest.param("cuda.device_count()", "libcuda.so.1", id="cuda"),
    pytest.param("verbs.list_nics()", "libibverbs.so.1", id="verbs"),
]


def _assert_same_error_twice(
    errors_of_calls: list[list[object]], *, expected_operation: str, expected_errno: int, expected_reason: Reason
) -> None:
    assert len(errors_of_calls) == 2, "the second call must fail as the first one did"
    assert errors_of_calls[0] == errors_of_calls[1]
    _api, failed_call, error_number, error_reason, what_to_do = errors_of_calls[0]
    assert (failed_call, error_number, error_reason) == (expected_operation, expected_errno, expected_reason.value)
    assert what_to_do


@pytest.mark.parametrize(("call", "soname"), CALLS_AND_SONAMES)
@pytest.mark.parametrize("kept_bytes", [0, 3, 40, 5000])
def test_truncated_library_is_reported_as_damaged(call: str, soname: str, kept_bytes: int, tmp_path: Path) -> None:
    elf_bytes = Path(sys.executable).resolve().read_bytes()  # Any valid ELF file would do.
    (tmp_path / soname).write_bytes(elf_bytes[:kept_bytes])
    errors_of_calls = _call_twice(call, tmp_path)
    _assert_same_error_twice(
        errors_of_calls,
        expected_operation=f"dlopen {soname}",
        expected_errno=errno.ENOEXEC,
        expected_reason=Reason.LIBRARY_DAMAGED,
    )


@pytest.mark.parametrize(
    ("message", "expected_errno", "reason"),
    [
        ("libx.so.1: cannot open shared object file: No such file or directory", errno.ENOENT, Reason.LIBRARY_MISSING),
        ("libx.so.1: cannot open shared object file: Permission denied", errno.EACCES, Reason.NO_PERMISSION),
        ("/lib/libx.so.1: file too short", errno.ENOEXEC, Reason.LIBRARY_DAMAGED),
        ("/lib/libx.so.1: invalid ELF header", errno.ENOEXEC, Reason.LIBRARY_DAMAGED),
        ("/lib/libx.so.1: wrong ELF class: ELFCLASS32", errno.ELIBBAD, Reason.LIBRARY_WRONG_ABI),
        (
            "/lib/libx.so.1: version `IBVERBS_PRIVATE_59' not found (required by /x/device.so)",
            errno.ELIBBAD,
            Reason.LIBRARY_WRONG_ABI,
        ),
        ("/x/device.so: undefined symbol: ibv_new_thing", errno.ELIBBAD, Reason.LIBRARY_WRONG_ABI),
        ("a message of no known loader", errno.ENOENT, Reason.LIBRARY_MISSING),
    ],
)
def test_loader_message_is_mapped_to_an_errno(message: str, expected_errno: int, reason: Reason) -> None:
    error = loader.setup_missing(
        operation="dlopen libx.so.1", text=message, what_to_do="install x", default_errno=errno.ENOENT
    )
    assert (error.errno, error.status, error.reason) == (expected_errno, expected_errno, reason)
    assert error.detail == message
    assert error.what_to_do
    assert (error.what_to_do == "install x") == (expected_errno == errno.ENOENT)


@pytest.mark.parametrize(("call", "soname"), CALLS_AND_SONAMES)
def test_32_bit_library_is_reported_as_wrong_abi(call: str, soname: str, tmp_path: Path) -> None:
    elf_bytes = bytearray(Path(sys.executable).resolve().read_bytes()[:8192])
    elf_bytes[4] = 1  # Byte 4 is EI_CLASS, and 1 is ELFCLASS32.
    (tmp_path / soname).write_bytes(elf_bytes)
    errors_of_calls = _call_twice(call, tmp_path)
    _assert_same_error_twice(
        errors_of_calls,
        expected_operation=f"dlopen {soname}",
        expected_errno=errno.ELIBBAD,
        expected_reason=Reason.LIBRARY_WRONG_ABI,
    )


def test_libcuda_without_its_function_table_is_wrong_abi(tmp_path: Path) -> None:
    # A copy of libm, which lacks cuGetProcAddress_v2, replaces libcuda. /proc/self/maps has the path of libm.
    mapped_paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libm" in line}
    shutil.copy(
        next(path for path in sorted(mapped_paths) if Path(path).name.startswith("libm")), tmp_path / "libcuda.so.1"
    )
    _assert_same_error_twice(
        _call_twice("cuda.device_count()", tmp_path),
        expected_operation="dlopen libcuda.so.1",
        expected_errno=errno.ELIBBAD,
        expected_reason=Reason.LIBRARY_WRONG_ABI,
    )


def test_import_of_packages_opens_no_library() -> None:
    program = """
import sys
import gdrkit, gdrkit.cuda, gdrkit.verbs, gdrkit.registration
print([name for name in sys.modules if name.split(".")[0] in {"pyverbs", "cuda", "numpy"}])
memory_map = open("/proc/self/maps").read()
print([name for name in ("libcuda", "libibverbs", "librdmacm", "libcufile", "libhl-thunk") if name in memory_map])
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.split("\n")[:2] == ["[]", "[]"]


def test_failed_import_of_pyverbs_is_a_new_error_each_time(tmp_path: Path) -> None:
    # Each call must raise a new error object: the traceback of a reused object would grow with each call.
    package_folder = tmp_path / "pyverbs"
    package_folder.mkdir()
    (package_folder / "__init__.py").write_text("raise ImportError('cannot be imported')")
    # gdrkit.loader imports pyverbs only if the package has an extension module for this Python.
    (package_folder / f"device{EXTENSION_SUFFIXES[0]}").touch()
    program = """
import traceback
from gdrkit import verbs
from gdrkit.errors import SetupMissing
traceback_lengths, error_texts = [], []
for _ in range(5):
    try:
        verbs.list_nics()
    except SetupMissing as error:
        traceback_lengths.append(len(traceback.extract_tb(error.__traceback__)))
        error_texts.append(str(error))
print(len(set(traceback_lengths)), len(set(error_texts)), "cannot be imported" in error_texts[-1])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert child.stdout.split() == ["1", "1", "True"], child.stderr


def test_missing_library_of_verbs_is_searched_again(tmp_path: Path) -> None:
    program = """
import os, shutil, sys
from gdrkit import verbs
from gdrkit.errors import SetupMissing
try:
    verbs.list_nics()
except SetupMissing as error:
    print(error.reason.value)
os.unlink(sys.argv[1])
print(isinstance(verbs.list_nics(), tuple))
"""
    damaged_library = tmp_path / "libibverbs.so.1"
    damaged_library.touch()
    environment = os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    command = [sys.executable, "-c", program, str(damaged_library)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.stdout.split() == ["library_damaged", "True"], child.stderr


def test_special_attribute_of_a_lazy_module_imports_nothing() -> None:
    module = loader.LazyModule("gdrkit.no_such_module")
    assert not hasattr(module, "__wrapped__")
    with pytest.raises(SetupMissing):
        _ = module.function
