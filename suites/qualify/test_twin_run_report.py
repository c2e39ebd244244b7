"""The usage file, to which every process of a `gdrkit run` writes, and the report lines that gdrkit makes from it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from gdrkit.errors import Api
from gdrkit.twin_run.loaded import RealLibrary
from gdrkit.twin_run.report import list_used_apis, report_lines
from gdrkit.twin_run.usage import ProcessUse, RuntimeUse, create_usage_file, read_runtimes, read_usage

if TYPE_CHECKING:
    from pathlib import Path

# native/twins/model/usage.cpp defines this layout. A process claims a slot (state 1), fills it, and sets the state 2.
HEADER_BYTES, SLOT_BYTES = 64, 120
SLOT_COMPLETE = 2


def write_slot(usage_file: Path, slot_index: int, *fields: object) -> None:
    """Write the slot with this index into `usage_file`.

    The fields are the state, the number of the API (1: verbs, 2: CUDA, 5 and 6: CUDA runtimes 12 and 13), the process
    id, an unused 0, the number of created objects, the moved bytes, the program name, and the numbers of queue pairs,
    regions and bytes of regions that exist now.
    """
    with usage_file.open("r+b") as file:
        file.seek(HEADER_BYTES + slot_index * SLOT_BYTES)
        file.write(struct.pack("<IIIIQQ64sqqq", *fields))


def test_slots_that_no_process_completed_are_left_out(tmp_path: Path) -> None:
    usage_file = tmp_path / "run"
    create_usage_file(usage_file)
    assert read_usage(usage_file) == []
    write_slot(usage_file, 0, SLOT_COMPLETE, 1, 12, 0, 2, 1_300_000_000, b"ib_write_bw", 2, 3, 4096)
    write_slot(usage_file, 1, 1, 2, 13, 0, 1, 1, b"claimed", 0, 0, 0)
    write_slot(usage_file, 2, SLOT_COMPLETE, 99, 14, 0, 1, 1, b"unknown API", 0, 0, 0)
    write_slot(usage_file, 3, SLOT_COMPLETE, 2, 15, 0, 0, 0, b"\xff" * 64, 0, -1, -4096)
    assert read_usage(usage_file) == [
        ProcessUse(Api.VERBS, 12, "ib_write_bw", 2, 1_300_000_000, 2, 3, 4096),
        ProcessUse(Api.CUDA, 15, r"\xff" * 64, 0, 0),
    ]


def test_cuda_runtime_has_a_slot_of_its_own(tmp_path: Path) -> None:
    usage_file = tmp_path / "run"
    create_usage_file(usage_file)
    write_slot(usage_file, 0, SLOT_COMPLETE, 5, 12, 0, 0, 0, b"torch", 0, 0, 0)
    write_slot(usage_file, 1, SLOT_COMPLETE, 2, 12, 0, 7, 4096, b"torch", 0, 0, 0)
    write_slot(usage_file, 2, SLOT_COMPLETE, 6, 13, 0, 0, 0, b"nixl", 0, 0, 0)
    process_uses, runtime_uses = read_usage(usage_file), read_runtimes(usage_file)
    assert process_uses == [ProcessUse(Api.CUDA, 12, "torch", 7, 4096)]
    assert runtime_uses == [RuntimeUse("libcudart.so.12", 12, "torch"), RuntimeUse("libcudart.so.13", 13, "nixl")]
    assert report_lines(frozenset({Api.CUDA}), process_uses, [], runtime_uses) == [
        "cuda: twin opened by torch (pid 12); 7 memory allocations; 4.1 kB moved",
        "cuda: twin of libcudart.so.12 opened by torch (pid 12)",
        "cuda: twin of libcudart.so.13 opened by nixl (pid 13)",
    ]


def test_damaged_file_is_an_empty_record(tmp_path: Path) -> None:
    usage_file = tmp_path / "run"
    create_usage_file(usage_file)
    intact_bytes = usage_file.read_bytes()
    for damaged_bytes in (b"", intact_bytes[:-1], b"x" + intact_bytes[1:]):
        usage_file.write_bytes(damaged_bytes)
        assert read_usage(usage_file) == []


def test_lines_name_programs_objects_and_bytes() -> None:
    process_uses = [
        *(ProcessUse(Api.VERBS, pid, "ib_write_bw", 1, 650_000_000) for pid in (123, 124)),
        ProcessUse(Api.CUDA, 125, "python3", 0, 0),
    ]
    real_libraries = [RealLibrary("cufile", "/opt/libcufile.so.0", "python3", 125)]
    assert report_lines(frozenset({Api.VERBS, Api.CUDA, Api.CUFILE, Api.HLTHUNK}), process_uses, real_libraries) == [
        "cuda: twin opened by python3 (pid 125), but not used: no memory allocation",
        "verbs: twin opened by ib_write_bw (pid 123, 124); 2 queue pairs; 1.3 GB moved",
        "cufile: /opt/libcufile.so.0, not the twin, was loaded by python3 (pid 125)",
        "not used: cufile, hlthunk",
    ]
    assert list_used_apis(process_uses) == {Api.VERBS}


def test_long_lists_of_processes_are_shortened() -> None:
    process_uses = [ProcessUse(Api.VERBS, pid, f"p{pid % 6}", 1, 0) for pid in range(60)]
    (line,) = report_lines(frozenset({Api.VERBS}), process_uses, [])
    assert line == (
        "verbs: twin opened by p0 (pid 0, 6, 12, 18 and 6 more), p1 (pid 1, 7, 13, 19 and 6 more), "
        "p2 (pid 2, 8, 14, 20 and 6 more), p3 (pid 3, 9, 15, 21 and 6 more) and 2 more programs; 60 queue pairs"
    )
