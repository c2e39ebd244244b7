"""Readers of evidence: ELF files, libraries and descriptors of a process, RDMA counters, kernel log."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdrkit import evidence, host
from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import needs, software

HYPOTHESIS_SETTINGS = settings(database=None, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))


def pack_note(owner: bytes, note_type: int, content: bytes) -> bytes:
    """Return an ELF note. Owner and content are padded to a multiple of 4 bytes."""

    def pad(data: bytes) -> bytes:
        return data + b"\0" * (-len(data) % 4)

    return struct.pack("<III", len(owner) + 1, len(content), note_type) + pad(owner + b"\0") + pad(content)


def make_elf(*, soname: bytes = b"libexample.so.1", notes: bytes = b"") -> bytes:
    """Return a small complete ELF64 file with one loaded segment, a dynamic section with a SONAME, and notes."""
    headers_bytes = 64 + 3 * 56
    strings = b"\0" + soname + b"\0"
    dynamic_offset = headers_bytes + len(notes)
    strings_offset = dynamic_offset + 4 * 16
    total_bytes = strings_offset + len(strings)
    identification = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    # Type ET_DYN, machine EM_X86_64, the program headers at offset 64, and 3 program headers of 56 bytes.
    header = struct.pack("<16sHHIQQQIHHHHHH", identification, 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    # A program header has type, flags, offset, addresses, sizes and alignment. The types are PT_LOAD (1), PT_NOTE (4)
    # and PT_DYNAMIC (2).
    segments = b"".join(
        struct.pack("<IIQQQQQQ", segment_type, 4, offset, offset, offset, size_bytes, size_bytes, 4)
        for segment_type, offset, size_bytes in (
            (1, 0, total_bytes),
            (4, headers_bytes, len(notes)),
            (2, dynamic_offset, 64),
        )
    )
    # The dynamic section has DT_STRTAB (5), DT_STRSZ (10), DT_SONAME (14, an offset in the strings) and DT_NULL (0).
    dynamic_entries = ((5, strings_offset), (10, len(strings)), (14, 1), (0, 0))
    dynamic_section = b"".join(struct.pack("<qQ", tag, value) for tag, value in dynamic_entries)
    return header + segments + notes + dynamic_section + strings


# The notes are the build ID (type 3 of the owner GNU), and a note like the note in each software twin.
COMPLETE_ELF = make_elf(notes=pack_note(b"GNU", 3, bytes(range(20))) + pack_note(b"GDRKIT", 1, b"verbs twin\0"))


def test_elf_file_has_soname_build_id_and_notes() -> None:
    elf_file = evidence.parse_elf(COMPLETE_ELF)
    assert elf_file.soname == "libexample.so.1"
    assert elf_file.build_id == bytes(range(20)).hex()
    assert elf_file.notes[1] == evidence.ElfNote(owner="GDRKIT", kind=1, content="verbs twin")


def test_truncated_elf_file_is_refused_at_every_length() -> None:
    for size_bytes in range(len(COMPLETE_ELF)):
        with pytest.raises(ApiError) as error_info:
            evidence.parse_elf(COMPLETE_ELF[:size_bytes])
        assert error_info.value.reason is Reason.LIBRARY_DAMAGED
        assert error_info.value.errno is None


@HYPOTHESIS_SETTINGS
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError):
        evidence.parse_elf(data)


@HYPOTHESIS_SETTINGS
@given(st.lists(st.tuples(st.integers(0, len(COMPLETE_ELF) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_elf_file_is_parsed_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(COMPLETE_ELF)
    for offset, new_byte in changes:
        data[offset] = new_byte
    # Any other exception fails the case.
    with contextlib.suppress(ApiError):
        assert isinstance(evidence.parse_elf(bytes(data)), evidence.ElfFile)


def test_packet_counters_are_read_from_either_folder(tmp_path: Path) -> None:
    port_folder = tmp_path / "sys/class/infiniband/rxe0/ports/1"
    for name, value in {"hw_counters/sent_pkts": 7, "hw_counters/rcvd_pkts": 8}.items():
        (port_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (port_folder / name).write_text(f"{value}\n")
    (rxe_counters,) = host.port_counters(host.HostTree(tmp_path))
    assert (rxe_counters.sent_packets, rxe_counters.received_packets, rxe_counters.sent_bytes) == (7, 8, None)
    # A counter in the folder `counters` has priority.
    (port_folder / "counters").mkdir()
    (port_folder / "counters/port_xmit_packets").write_text("9\n")
    (counters_of_both_folders,) = host.port_counters(host.HostTree(tmp_path))
    assert (counters_of_both_folders.sent_packets, counters_of_both_folders.received_packets) == (9, 8)


def test_libraries_of_this_process_are_those_of_its_map() -> None:
    library_by_path = {library.path: library for library in evidence.libraries()}
    # These are the files with an executable mapping.
    mapped_paths = set(re.findall(r"^\S+ ..x. \S+ \S+ \d+ +(/.*)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    assert set(library_by_path) == mapped_paths
    (libc,) = [library for library in library_by_path.values() if library.soname == "libc.so.6"]
    assert libc.build_id
    assert libc.error is None


def test_deleted_or_damaged_libraries_have_an_error(tmp_path: Path) -> None:
    (tmp_path / "libcut.so").write_bytes(COMPLETE_ELF[:100])
    maps_path = tmp_path / "proc" / "self" / "maps"
    maps_path.parent.mkdir(parents=True)
    mapping_lines = [
        f"7f00-7f01 r-xp 00000000 08:01 12 {' ' * 20}{tmp_path}/libcut.so",
        f"7f02-7f03 r-xp 00000000 08:01 13 {' ' * 20}/opt/libgone.so (deleted)",
        f"7f04-7f05 r-xp 00000000 08:01 14 {' ' * 20}{tmp_path}/never there.so",
        f"7f06-7f07 rw-p 00000000 08:01 15 {' ' * 20}{tmp_path}/data.bin",
        "7f08-7f09 r-xp 00000000 00:00 0 [vdso]",
    ]
    maps_path.write_text("\n".join(mapping_lines) + "\n")
    truncated, deleted, absent = evidence.libraries(host.HostTree(tmp_path))
    assert truncated.error is not None
    assert "cut" in truncated.path
    assert deleted.error == "the file was deleted since it was loaded"
    assert absent.error is not None
    assert absent.path.endswith("never there.so")


def test_program_without_soname_is_described() -> None:
    program = evidence.describe_library(str(Path(sys.executable).resolve()))
    assert program.error is None


@needs(software("verbs"))
def test_twin_has_a_note() -> None:
    from gdrkit import verbs

    verbs.list_nics()
    (twin,) = [library for library in evidence.libraries() if library.soname == "libibverbs.so.1"]
    assert [elf_note.owner for elf_note in twin.notes if elf_note.owner != "GNU"] == ["GDRKIT"]
    assert twin.build_id


def test_descriptors_are_listed_while_they_are_open() -> None:
    read_end, write_end = os.pipe()
    try:
        target_by_descriptor = evidence.descriptor_targets()
        assert target_by_descriptor[read_end].startswith("pipe:")
        assert target_by_descriptor[read_end] == target_by_descriptor[write_end]
    finally:
        os.close(read_end)
        os.close(write_end)
    assert read_end not in evidence.descriptor_targets()


def test_unreadable_kernel_log_differs_from_an_empty_one(tmp_path: Path) -> None:
    log = evidence.kernel_log(host.HostTree(tmp_path))
    assert (log.lines, log.unreadable) == ((), "/dev/kmsg: ENOENT")


def test_kernel_log_has_lines_that_name_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    # A read of the real device returns one record. This file has one record: its text, and a line with a property.
    (tmp_path / "dev" / "kmsg").write_text("4,100,5000,-;NVRM: Xid (PCI:0000:1b:00): 31, MMU Fault\n SUBSYSTEM=pci\n")
    assert evidence.kernel_log(host.HostTree(tmp_path)).lines == ("NVRM: Xid (PCI:0000:1b:00): 31, MMU Fault",)
