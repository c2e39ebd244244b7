"""What is found in a process: libraries by their ELF files, descriptors, the kernel's log."""

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

QUIET = settings(database=None, deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))


def note(owner: bytes, kind: int, content: bytes) -> bytes:
    def padded(data: bytes) -> bytes:
        return data + b"\0" * (-len(data) % 4)

    return struct.pack("<III", len(owner) + 1, len(content), kind) + padded(owner + b"\0") + padded(content)


def elf(*, soname: bytes = b"libexample.so.1", notes: bytes = b"") -> bytes:
    """A whole small ELF64 file: one loaded segment, a dynamic section with a SONAME, notes."""
    headers_bytes = 64 + 3 * 56
    strings = b"\0" + soname + b"\0"
    dynamic_at = headers_bytes + len(notes)
    strings_at = dynamic_at + 4 * 16
    total = strings_at + len(strings)
    ident = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, 4, at, at, at, size, size, 4)
        for kind, at, size in ((1, 0, total), (4, headers_bytes, len(notes)), (2, dynamic_at, 64))
    )
    entries = ((5, strings_at), (10, len(strings)), (14, 1), (0, 0))
    dynamic = b"".join(struct.pack("<qQ", tag, value) for tag, value in entries)
    return header + segments + notes + dynamic + strings


WHOLE = elf(notes=note(b"GNU", 3, bytes(range(20))) + note(b"GDRKIT", 1, b"verbs twin\0"))


def test_a_file_says_its_name_its_build_and_its_notes() -> None:
    found = evidence.parse_elf(WHOLE)
    assert found.soname == "libexample.so.1"
    assert found.build_id == bytes(range(20)).hex()
    assert found.notes[1] == evidence.ElfNote(owner="GDRKIT", kind=1, content="verbs twin")


def test_a_truncated_file_gives_one_error_wherever_it_ends() -> None:
    for size in range(len(WHOLE)):
        with pytest.raises(ApiError) as caught:
            evidence.parse_elf(WHOLE[:size])
        assert caught.value.reason is Reason.LIBRARY_DAMAGED
        assert caught.value.errno is None


@QUIET
@given(st.binary(max_size=400))
def test_no_bytes_are_too_strange(data: bytes) -> None:
    with pytest.raises(ApiError):
        evidence.parse_elf(data)


@QUIET
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_file_gives_an_answer_or_an_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    # Any other exception than this one would be raised here.
    with contextlib.suppress(ApiError):
        assert isinstance(evidence.parse_elf(bytes(data)), evidence.ElfFile)


def test_packets_are_counted_where_the_driver_counts_them(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/rxe0/ports/1"
    for name, value in {"hw_counters/sent_pkts": 7, "hw_counters/rcvd_pkts": 8}.items():
        (port / name).parent.mkdir(parents=True, exist_ok=True)
        (port / name).write_text(f"{value}\n")
    (rxe,) = evidence.counters(host.HostTree(tmp_path))
    assert (rxe.sent_packets, rxe.received_packets, rxe.sent_bytes) == (7, 8, None)
    (port / "counters").mkdir()
    (port / "counters/port_xmit_packets").write_text("9\n")
    (other,) = evidence.counters(host.HostTree(tmp_path))
    assert (other.sent_packets, other.received_packets) == (9, 8)


def test_the_libraries_of_this_process_are_those_of_its_map() -> None:
    found = {library.path: library for library in evidence.libraries()}
    mapped = set(re.findall(r"^\S+ ..x. \S+ \S+ \d+ +(/.*)$", Path("/proc/self/maps").read_text(), re.MULTILINE))
    assert set(found) == mapped
    (libc,) = [library for library in found.values() if library.soname == "libc.so.6"]
    assert libc.build_id
    assert libc.error is None


def test_files_that_are_gone_or_damaged_are_entries_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "libcut.so").write_bytes(WHOLE[:100])
    maps = tmp_path / "proc" / "self" / "maps"
    maps.parent.mkdir(parents=True)
    lines = [
        f"7f00-7f01 r-xp 00000000 08:01 12 {' ' * 20}{tmp_path}/libcut.so",
        f"7f02-7f03 r-xp 00000000 08:01 13 {' ' * 20}/opt/libgone.so (deleted)",
        f"7f04-7f05 r-xp 00000000 08:01 14 {' ' * 20}{tmp_path}/never there.so",
        f"7f06-7f07 rw-p 00000000 08:01 15 {' ' * 20}{tmp_path}/data.bin",
        "7f08-7f09 r-xp 00000000 00:00 0 [vdso]",
    ]
    maps.write_text("\n".join(lines) + "\n")
    cut, gone, absent = evidence.libraries(host.HostTree(tmp_path))
    assert cut.error is not None
    assert "cut" in cut.path
    assert gone.error == "the file was deleted since it was loaded"
    assert absent.error is not None
    assert absent.path.endswith("never there.so")


def test_the_program_itself_has_a_build_id_or_an_honest_none() -> None:
    described = evidence.describe_library(str(Path(sys.executable).resolve()))
    assert described.error is None


@needs(software("verbs"))
def test_a_twin_says_what_it_is() -> None:
    from gdrkit import verbs

    verbs.list_nics()
    (twin,) = [library for library in evidence.libraries() if library.soname == "libibverbs.so.1"]
    assert [note.owner for note in twin.notes if note.owner != "GNU"] == ["GDRKIT"]
    assert twin.build_id


def test_open_descriptors_are_seen_and_closed_ones_are_not() -> None:
    read_end, write_end = os.pipe()
    try:
        seen = evidence.descriptors()
        assert seen[read_end].startswith("pipe:")
        assert seen[read_end] == seen[write_end]
    finally:
        os.close(read_end)
        os.close(write_end)
    assert read_end not in evidence.descriptors()


def test_a_kernel_log_that_cannot_be_read_does_not_look_empty(tmp_path: Path) -> None:
    log = evidence.kernel_log(host.HostTree(tmp_path))
    assert (log.lines, log.unreadable) == ((), "/dev/kmsg: ENOENT")


def test_the_kernel_log_keeps_what_names_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    # A read of the real device gives one record; a file gives all at once, of which the first is taken.
    (tmp_path / "dev" / "kmsg").write_text("4,100,5000,-;NVRM: Xid (PCI:0000:1b:00): 31, MMU Fault\n SUBSYSTEM=pci\n")
    assert evidence.kernel_log(host.HostTree(tmp_path)).lines == ("NVRM: Xid (PCI:0000:1b:00): 31, MMU Fault",)
