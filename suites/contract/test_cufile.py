"""Error numbers and layouts in gdrkit match the Python bindings of libcufile. An error names a damaged libcufile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.cufile import _cufile, _layout, _results
from gdrkit.errors import Reason
from gdrkit.harness.needs import cufile, needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(cufile.driver)

# This program prints the fields of the error that library_version() raises.
_PRINT_VERSION_ERROR_PROGRAM = """
import json
from gdrkit import cufile
from gdrkit.errors import SetupMissing
try:
    cufile.library_version()
except SetupMissing as error:
    print(json.dumps([error.operation, error.errno, error.reason.value, bool(error.what_to_do)]))
"""


def test_every_cufile_error_number_has_its_name() -> None:
    name_by_number = {int(member): f"CU_FILE_{member.name}" for member in _cufile.load().OpError if member != 0}
    assert name_by_number == dict(_results.STATUS_NAMES)


def test_statistics_layout_is_that_of_the_bindings() -> None:
    # Each word of 8 bytes contains its index, so that a counter that is read from a wrong offset has a wrong value.
    # numpy's ``dtype.fields[name]`` is a tuple of type and offset.
    layout = _cufile.load().stats_level3_dtype
    library_version = _get_layout_version()
    counter_words = b"".join(index.to_bytes(8, "little") for index in range(layout.itemsize // 8))
    basic_layout = layout["detailed"]["basic"]
    for name, word_index in _layout.unpack_basic_counters(counter_words, version=library_version).items():
        # A pair of counters has the successes in the first word and the errors in the second.
        offset_in_pair = 8 if name.endswith("_err") else 0
        assert word_index * 8 == basic_layout.fields[name.removesuffix("_err")][1] + offset_in_pair, name
    read_histogram, write_histogram = _layout.unpack_histograms(counter_words, version=library_version)
    detailed_fields = layout["detailed"].fields
    assert (read_histogram[0] * 8, write_histogram[0] * 8) == (
        detailed_fields["read_size_kb_hist"][1],
        detailed_fields["write_size_kb_hist"][1],
    )
    assert (len(read_histogram), len(write_histogram)) == (32, 32)
    gpu_offset, gpu_fields = layout.fields["per_gpu_stats"][1], layout["per_gpu_stats"].base.fields
    _uuid, index_by_counter = next(iter(_layout.unpack_gpu_counters(counter_words, version=library_version)))
    assert len(index_by_counter) == len(gpu_fields) - 1
    for name, word_index in index_by_counter.items():
        assert word_index * 8 == gpu_offset + gpu_fields[name][1], name


def _get_layout_version() -> int:
    """Return the version of libcufile whose layout the bindings have. Bindings of CUDA 13.0 lack vectored transfers."""
    basic = _cufile.load().stats_level3_dtype["detailed"]["basic"]
    return _layout.VECTORS_VERSION_MIN if "readv_ops" in basic.fields else _layout.STATISTICS_VERSION_MIN


def test_batch_parameter_layout_is_that_of_the_bindings() -> None:
    # The request is (file handle, opcode, address, file offset, buffer offset, length, cookie).
    parameter_bytes = bytes(memoryview(_cufile.make_io_parameters([(11, 1, 22, 33, 44, 55, 66)])))
    layout = _cufile.load().io_params_dtype
    assert len(parameter_bytes) == layout.itemsize
    batch_offset, batch_fields = layout.fields["u"][1], layout["u"]["batch"].fields
    offset_by_name = {name: offset for name, (_type, offset, *_) in layout.fields.items() if name != "u"}
    offset_by_name |= {name: batch_offset + offset for name, (_type, offset, *_) in batch_fields.items()}
    fields = {
        name: int.from_bytes(parameter_bytes[offset : offset + 4], "little") for name, offset in offset_by_name.items()
    }
    assert (fields["mode"], fields["fh"], fields["opcode"], fields["cookie"]) == (1, 11, 1, 66)
    assert (fields["dev_ptr_base"], fields["file_offset"], fields["dev_ptr_offset"]) == (22, 33, 44)
    assert fields["size_"] == 55


@pytest.mark.parametrize("size_bytes", [0, 40, 5000])
def test_damaged_libcufile_is_one_error_that_names_it(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "libcufile.so.0").write_bytes(b"\x7fELF\x02\x01\x01".ljust(size_bytes, b"\0")[:size_bytes])
    environ = os.environ | {"LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
    child = subprocess.run(
        [sys.executable, "-c", _PRINT_VERSION_ERROR_PROGRAM], env=environ, capture_output=True, text=True, check=True
    )
    expected_fields = ["dlopen libcufile.so.0", errno.ENOEXEC, Reason.LIBRARY_DAMAGED.value, True]
    assert json.loads(child.stdout) == expected_fields
