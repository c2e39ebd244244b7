"""The binding of NCCL: its types match the header of NCCL, and its failures are typed errors."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit import nccl
from gdrkit.errors import UsageError
from gdrkit.handles import live
from gdrkit.harness.needs import cuda, host, needs
from gdrkit.nccl import _nccl

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device

NEEDS_NCCL = needs(host.module("nvidia.nccl"))
# Sizes of the parameter types in nccl.h, in bytes. Each type with `*` is a pointer of 8 bytes.
TYPE_SIZES_BYTES = {
    "int": 4,
    "ncclDataType_t": 4,
    "ncclRedOp_t": 4,
    "size_t": 8,
    "ncclComm_t": 8,
    "cudaStream_t": 8,
    "ncclUniqueId": 128,
}
CHILD_TIMEOUT_S = 60


def read_header() -> str:
    """Return the text of nccl.h."""
    folder = _nccl.find_package_folder()
    assert folder is not None
    return (folder / "include" / "nccl.h").read_text()


@NEEDS_NCCL
@pytest.mark.parametrize("function_name", _nccl.ARGUMENT_TYPES)
def test_argument_widths_match_the_header(function_name: str) -> None:
    declaration_match = re.search(rf"ncclResult_t\s+{function_name}\(([^)]*)\)", read_header())
    assert declaration_match is not None
    parameters = declaration_match[1].split(",")
    type_names = [re.sub(r"\bconst\b", "", parameter).rpartition(" ")[0].strip() for parameter in parameters]
    expected_bytes = [
        8 if "*" in parameter else TYPE_SIZES_BYTES[type_name]
        for parameter, type_name in zip(parameters, type_names, strict=True)
    ]
    assert [ctypes.sizeof(argument_type) for argument_type in _nccl.ARGUMENT_TYPES[function_name]] == expected_bytes


@NEEDS_NCCL
def test_enumerations_match_the_header() -> None:
    value_by_name = {
        name.lower(): int(value) for name, value in re.findall(r"\bnccl(\w+)\s*=\s*(\d+)\b", read_header())
    }
    assert {data_type.name.lower(): value_by_name[data_type.name.lower()] for data_type in nccl.DataType} == {
        data_type.name.lower(): data_type.value for data_type in nccl.DataType
    }
    header_names = {"SUM": "sum", "PRODUCT": "prod", "MAXIMUM": "max", "MINIMUM": "min", "AVERAGE": "avg"}
    assert [value_by_name[header_names[operation.name]] for operation in nccl.ReduceOperation] == list(
        nccl.ReduceOperation
    )
    for status, name in enumerate(_nccl.STATUS_NAMES):
        assert value_by_name[name.removeprefix("nccl").lower()] == status


@NEEDS_NCCL
def test_communicator_ids_are_unique() -> None:
    # NCCL keeps a thread for each id until the process ends, so a child process creates the ids.
    program = "from gdrkit import nccl; print(*nccl.library_version(), *(nccl.create_unique_id().hex() for _ in '12'))"
    completed = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=CHILD_TIMEOUT_S
    )
    major, _minor, _patch, first_id, second_id = completed.stdout.decode().split()
    assert int(major) >= 2
    assert first_id != second_id
    assert len(first_id) == len(second_id) == 2 * _nccl.UNIQUE_ID_BYTES


@NEEDS_NCCL
def test_failure_is_an_error_with_call_status_and_message(tmp_path: Path) -> None:
    """A null communicator makes NCCL fail before it needs a device."""
    program = (
        "from gdrkit.errors import ApiError\n"
        "from gdrkit.nccl import _nccl\n"
        "try:\n    _nccl.call('ncclCommGetAsyncError', 0, None, comm=0)\n"
        "except ApiError as error:\n    print(error.api.value, error.operation, error.status_name, error.reason.value)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=CHILD_TIMEOUT_S, cwd=tmp_path
    )
    assert completed.stdout.decode().split() == ["nccl", "ncclCommGetAsyncError", "ncclInvalidArgument", "bad_argument"]


@needs(cuda.device())
@pytest.mark.parametrize(
    ("rank", "unique_id", "message"),
    [(2, bytes(128), "rank must be 0 to 1, not 2"), (0, bytes(127), "unique_id must have 128 bytes, not 127")],
    ids=["rank", "unique-id"],
)
def test_bad_communicator_is_refused_without_the_library(
    device: Device, rank: int, unique_id: bytes, message: str
) -> None:
    handles_before = live()
    with pytest.raises(UsageError, match=re.escape(message)):
        nccl.Communicator(device, rank=rank, ranks_count=2, unique_id=unique_id)
    assert live() == handles_before


@needs(cuda.device())
def test_empty_memory_is_refused_without_the_library(device: Device) -> None:
    with pytest.raises(UsageError, match="above 0"):
        nccl.NcclMemory(device, 0)


def test_damaged_library_is_an_error_with_advice(tmp_path: Path) -> None:
    (tmp_path / "libnccl.so.2").write_text("not a library")
    program = (
        "from gdrkit import nccl\nfrom gdrkit.errors import SetupMissing\n"
        "try:\n    nccl.library_version()\nexcept SetupMissing as error:\n    print(error.errno, error.operation)"
    )
    library_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")]))
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": library_path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=CHILD_TIMEOUT_S,
    )
    assert completed.stdout.decode().split() == ["8", "dlopen", "libnccl.so.2"]  # 8 is ENOEXEC.
