"""gdrkit finds hl-thunk by both of its names, and refuses a missing, a damaged or an old library.

The allocation function of an old library has another signature.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Reason
from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

# This program evaluates an expression, and prints the value or the fields of the error as JSON.
EVALUATE_PROGRAM = """
import json
from gdrkit import gaudi
from gdrkit.errors import ApiError
try:
    print(json.dumps({{"value": {expression}}}))
except ApiError as error:
    print(json.dumps({{"kind": type(error).__name__, "operation": error.operation, "errno": error.errno,
        "reason": error.reason.value, "what_to_do": error.what_to_do, "detail": error.detail}}))
"""
ALLOCATE_EXPRESSION = "gaudi.Device(pci_bus_id='0000:33:00.0').allocate(4096)"

# This is the source of a minimal hl-thunk with one device. With -DOLD, the library has the allocation function of 2021,
# which has no page size. A call of this function crashes. gdrkit recognizes the new signature by a newer function,
# which this library does not export.
LIBRARY_SOURCE = """
#include <stdint.h>
#include <stdbool.h>
#include <string.h>
int hlthunk_open(int name, const char *bus) { (void)name; (void)bus; return 100; }
int hlthunk_close(int fd) { (void)fd; return 0; }
int hlthunk_get_device_count(int name) { (void)name; return 1; }
int hlthunk_open_control(int number, const char *bus) { (void)bus; return number == 0 ? 101 : -2; }
int hlthunk_get_pci_bus_id_from_fd(int fd, char *id, int length) {
    (void)fd; strncpy(id, "0000:33:00.0", length);
    return 0;
}
int hlthunk_get_hw_ip_info(int fd, void *info) {
    // hlthunk_hw_ip_info has 336 bytes, device_id at 32 and module_id at 188. 0x1020 is the device_id of Gaudi 2.
    uint32_t device = 0x1020, module = 5;
    (void)fd; memset(info, 0, 336);
    memcpy((char *)info + 32, &device, 4); memcpy((char *)info + 188, &module, 4);
    return 0;
}
#ifdef OLD
uint64_t hlthunk_device_memory_alloc(int fd, uint64_t size, bool contiguous, bool shared) {
    (void)fd; (void)size; (void)contiguous; (void)shared; __builtin_trap();
}
#endif
"""


def evaluate_in_child(expression: str, folder: Path) -> dict[str, object]:
    """Evaluate the expression in a child process that loads libraries from `folder`. Return the printed object."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "LD_AUDIT": ""}
    command = [sys.executable, "-c", EVALUATE_PROGRAM.format(expression=expression)]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    result: dict[str, object] = json.loads(completed.stdout)
    return result


def build_library(folder: Path, file_name: str, *compiler_options: str) -> None:
    """Compile LIBRARY_SOURCE to the shared library `folder`/`file_name`."""
    (folder / "thunk.c").write_text(LIBRARY_SOURCE)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / file_name), *compiler_options, str(folder / "thunk.c")]
    subprocess.run(command, check=True, capture_output=True)


def test_missing_library_is_one_error_with_advice(tmp_path: Path) -> None:
    error_fields = evaluate_in_child("gaudi.device_count()", tmp_path)
    assert (error_fields["kind"], error_fields["errno"]) == ("SetupMissing", errno.ENOENT)
    assert error_fields["reason"] == Reason.LIBRARY_MISSING.value
    assert "habanalabs" in str(error_fields["what_to_do"])


@pytest.mark.parametrize("library_name", ["libhl-thunk.so", "libhlthunk.so"])
def test_damaged_library_is_named(tmp_path: Path, library_name: str) -> None:
    (tmp_path / library_name).write_bytes(b"\x7fELF\x02\x01\x01" + b"\0" * 30)
    error_fields = evaluate_in_child("gaudi.device_count()", tmp_path)
    assert (error_fields["kind"], error_fields["reason"]) == ("SetupMissing", Reason.LIBRARY_DAMAGED.value)
    assert library_name in str(error_fields["operation"])


@needs(host.compiler)
@pytest.mark.parametrize("library_name", ["libhl-thunk.so", "libhlthunk.so"])
def test_both_library_names_are_found(tmp_path: Path, library_name: str) -> None:
    build_library(tmp_path, library_name)
    assert evaluate_in_child("gaudi.list_devices()[0].module_id", tmp_path) == {"value": 5}


@needs(host.compiler)
@pytest.mark.parametrize("compiler_options", [["-DOLD"], []], ids=["the form of 2021", "no allocation at all"])
def test_allocation_of_unknown_signature_is_never_called(tmp_path: Path, compiler_options: list[str]) -> None:
    build_library(tmp_path, "libhl-thunk.so", *compiler_options)
    error_fields = evaluate_in_child(ALLOCATE_EXPRESSION, tmp_path)
    assert (error_fields["kind"], error_fields["operation"]) == ("SetupMissing", "hlthunk_device_memory_alloc")
    assert (error_fields["errno"], error_fields["reason"]) == (errno.ELIBBAD, Reason.LIBRARY_WRONG_ABI.value)
    assert "2022-06" in str(error_fields["what_to_do"])


@needs(host.compiler)
def test_library_without_count_is_probed_by_device_number(tmp_path: Path) -> None:
    # This option renames the function, so the library does not export hlthunk_get_device_count().
    build_library(tmp_path, "libhl-thunk.so", "-Dhlthunk_get_device_count=hlthunk_something_else")
    assert evaluate_in_child("gaudi.device_count()", tmp_path) == {"value": 1}
