"""Parser of ELF files that returns SONAME, build id and notes.

The parser is strict. It checks every offset and length against the file before use, so that a truncated or damaged file
gives an error and never a wrong result. It ignores only the end of a segment that is too short for another entry.
Sources: the System V ABI (gABI chapters 4 and 5) and elf.h.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, errno_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ElfFile", "ElfNote", "parse_elf", "read_elf"]

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_NOTE_HEADER = struct.Struct("<III")  # Elf64_Nhdr: size of the name, size of the descriptor, type
_DYNAMIC_ENTRY = struct.Struct("<qQ")  # Elf64_Dyn: tag, value

_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_NULL, _DT_STRTAB, _DT_STRSZ, _DT_SONAME = 0, 5, 10, 14
_NT_GNU_BUILD_ID = 3

# These limits are larger than any linker output. A damaged length must not make the parser read gigabytes.
_NOTES_BYTES_MAX = 1 << 20
_DYNAMIC_BYTES_MAX = 1 << 20
_SONAME_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class ElfNote:
    """One note of an ELF file.

    Attributes
    ----------
    owner : str
        Name of the organization that defined the note, e.g. ``GNU``.
    kind : int
        Type number of the note, defined by the owner.
    content : str
        The descriptor of the note: text if it is printable, else hexadecimal digits.
    """

    owner: str
    kind: int
    content: str


@dataclass(frozen=True, slots=True)
class ElfFile:
    """The properties that were read from one ELF file."""

    soname: str | None
    build_id: str | None
    notes: tuple[ElfNote, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment from the table of program headers: its range in the file, and its address when the file is loaded."""

    segment_type: int
    offset: int
    address: int
    length_bytes: int
    alignment_bytes: int


def read_elf(path: str | os.PathLike[str]) -> ElfFile:
    """Parse the file at `path`; see :func:`parse_elf`.

    Raises
    ------
    ApiError
        ``LIBRARY_DAMAGED``, without an errno: the file is not ELF64, or is damaged. ``NO_PERMISSION``,
        ``LIBRARY_MISSING`` or ``OTHER``, with the errno of the kernel: the file could not be read.
    """
    try:
        with Path(path).open("rb") as file:
            fd = file.fileno()
            size_bytes = os.fstat(fd).st_size
            return _parse_file(lambda offset, length: os.pread(fd, length, offset), size_bytes, str(path))
    except OSError as error:
        reason_by_error_type = {PermissionError: Reason.NO_PERMISSION, FileNotFoundError: Reason.LIBRARY_MISSING}
        raise ApiError(
            api=Api.KERNEL,
            operation="read",
            status=error.errno,
            status_name=errno_name(error.errno),
            errno=error.errno,
            arguments={"path": str(path)},
            reason=reason_by_error_type.get(type(error), Reason.OTHER),
        ) from error


def parse_elf(data: bytes, *, name: str = "bytes") -> ElfFile:
    """Parse the bytes of an ELF64 little-endian file. `name` is the name of the file in errors.

    Raises
    ------
    ApiError
        ``LIBRARY_DAMAGED``: `data` is not such a file, or an offset in it points outside of it.
    """
    return _parse_file(lambda offset, length: data[offset : offset + length], len(data), name)


def _parse_file(pread: Callable[[int, int], bytes], size_bytes: int, file_label: str) -> ElfFile:
    """Parse a file of `size_bytes` bytes, which `pread(offset, length)` reads. Errors name the file as `file_label`."""

    def read_range(offset: int, length_bytes: int, description: str) -> bytes:
        if offset + length_bytes > size_bytes:
            raise _make_damaged_error(
                file_label, f"{description} ends at byte {offset + length_bytes} of a file of {size_bytes}"
            )
        data = pread(offset, length_bytes)
        if len(data) != length_bytes:
            raise _make_damaged_error(file_label, f"{description} was cut off while it was read")
        return data

    segments = tuple(_read_segments(read_range, file_label))
    for segment in segments:
        if segment.segment_type == _PT_LOAD and segment.offset + segment.length_bytes > size_bytes:
            segment_end = segment.offset + segment.length_bytes
            raise _make_damaged_error(
                file_label, f"a loaded segment ends at byte {segment_end} of a file of {size_bytes}"
            )
    notes = tuple(_read_notes(read_range, segments, file_label))
    build_id = next((note.content for note in notes if (note.owner, note.kind) == ("GNU", _NT_GNU_BUILD_ID)), None)
    return ElfFile(soname=_read_soname(read_range, segments, file_label), build_id=build_id, notes=notes)


def _read_segments(read_range: Callable[[int, int, str], bytes], file_label: str) -> Iterator[_Segment]:
    header = _HEADER.unpack(read_range(0, _HEADER.size, "the ELF header"))
    # The fields e_ident, e_phoff, e_phentsize and e_phnum.
    e_ident, table_offset, entry_bytes, header_count = header[0], header[5], header[9], header[10]
    if e_ident[:4] != b"\x7fELF":
        raise _make_damaged_error(file_label, "it does not begin with the ELF magic")
    if e_ident[4:7] != b"\x02\x01\x01":  # ELFCLASS64, ELFDATA2LSB, EV_CURRENT
        raise _make_damaged_error(file_label, "it is not an ELF64 file in little-endian order, version 1")
    if entry_bytes != _PROGRAM_HEADER.size or header_count == 0:
        detail = f"it has {header_count} program headers of {entry_bytes} bytes; it must have at least one, of 56 bytes"
        raise _make_damaged_error(file_label, detail)
    header_table = read_range(table_offset, entry_bytes * header_count, "the table of program headers")
    for header_fields in _PROGRAM_HEADER.iter_unpack(header_table):
        segment_type, _flags, offset, address, _physical_address, length_bytes, _memory_bytes, alignment_bytes = (
            header_fields
        )
        yield _Segment(segment_type, offset, address, length_bytes, alignment_bytes)


def _read_notes(
    read_range: Callable[[int, int, str], bytes], segments: tuple[_Segment, ...], file_label: str
) -> Iterator[ElfNote]:
    for segment in segments:
        if segment.segment_type != _PT_NOTE:
            continue
        if segment.length_bytes > _NOTES_BYTES_MAX:
            raise _make_damaged_error(file_label, f"a note segment has {segment.length_bytes} bytes, which is too much")
        data = read_range(segment.offset, segment.length_bytes, "a note segment")
        for owner, kind, content in _parse_notes(data, segment, file_label):
            yield ElfNote(owner=owner, kind=kind, content=_describe_content(owner, content))


def _parse_notes(data: bytes, segment: _Segment, file_label: str) -> Iterator[tuple[str, int, bytes]]:
    # The gABI pads ELF64 notes to 8 bytes. Linkers pad to 4, except in a segment with alignment 8 (GNU properties).
    alignment_bytes = 8 if segment.alignment_bytes == 8 else 4  # noqa: PLR2004 - see the comment above.
    offset = 0
    while offset + _NOTE_HEADER.size <= len(data):
        owner_length_bytes, content_length_bytes, kind = _NOTE_HEADER.unpack_from(data, offset)
        owner_offset = offset + _NOTE_HEADER.size
        content_offset = _align_up(owner_offset + owner_length_bytes, alignment_bytes)
        if content_offset + content_length_bytes > len(data):
            raise _make_damaged_error(
                file_label,
                f"a note of {owner_length_bytes} + {content_length_bytes} bytes does not fit into its segment",
            )
        owner = data[owner_offset : owner_offset + owner_length_bytes].rstrip(b"\0").decode("ascii", "backslashreplace")
        yield owner, kind, data[content_offset : content_offset + content_length_bytes]
        offset = _align_up(content_offset + content_length_bytes, alignment_bytes)


def _read_soname(
    read_range: Callable[[int, int, str], bytes], segments: tuple[_Segment, ...], file_label: str
) -> str | None:
    """Return the SONAME, or None if the file has none.

    The dynamic section has the address of the string table (DT_STRTAB), and the offset of the SONAME in the table.
    """
    dynamic_segment = next((segment for segment in segments if segment.segment_type == _PT_DYNAMIC), None)
    if dynamic_segment is None:
        return None
    if dynamic_segment.length_bytes > _DYNAMIC_BYTES_MAX:
        raise _make_damaged_error(
            file_label, f"the dynamic section has {dynamic_segment.length_bytes} bytes, which is too much"
        )
    data = read_range(dynamic_segment.offset, dynamic_segment.length_bytes, "the dynamic section")
    value_by_tag: dict[int, int] = {}
    for tag, value in _DYNAMIC_ENTRY.iter_unpack(data[: len(data) // _DYNAMIC_ENTRY.size * _DYNAMIC_ENTRY.size]):
        if tag == _DT_NULL:
            break
        value_by_tag.setdefault(tag, value)
    if _DT_SONAME not in value_by_tag:
        return None
    if _DT_STRTAB not in value_by_tag or value_by_tag[_DT_SONAME] >= value_by_tag.get(_DT_STRSZ, 0):
        raise _make_damaged_error(file_label, "the SONAME lies outside of the string table")
    soname_offset = _find_file_offset(segments, value_by_tag[_DT_STRTAB], file_label) + value_by_tag[_DT_SONAME]
    soname_bytes_max = min(value_by_tag[_DT_STRSZ] - value_by_tag[_DT_SONAME], _SONAME_BYTES_MAX)
    soname, terminator, _rest = read_range(soname_offset, soname_bytes_max, "the string table").partition(b"\0")
    if not terminator:
        raise _make_damaged_error(file_label, "the SONAME has no end")
    return soname.decode("utf-8", "backslashreplace")


def _find_file_offset(segments: tuple[_Segment, ...], address: int, file_label: str) -> int:
    """Return the offset in the file of a byte that is loaded at `address`."""
    for segment in segments:
        if segment.segment_type == _PT_LOAD and segment.address <= address < segment.address + segment.length_bytes:
            return segment.offset + address - segment.address
    raise _make_damaged_error(file_label, f"address {address:#x} lies in no loaded segment")


def _describe_content(owner: str, content: bytes) -> str:
    text = content.rstrip(b"\0")
    # The notes of the owner GNU, such as the build id, are binary, even if all their bytes are printable.
    if owner != "GNU" and text.isascii() and text.decode("ascii", "replace").isprintable():
        return text.decode("ascii")
    return content.hex()


def _align_up(offset: int, alignment_bytes: int) -> int:
    return (offset + alignment_bytes - 1) // alignment_bytes * alignment_bytes


def _make_damaged_error(file_label: str, detail: str) -> ApiError:
    return ApiError(
        api=Api.LOADER,
        operation="parse ELF",
        status=None,
        status_name="a damaged file",
        arguments={"path": file_label},
        reason=Reason.LIBRARY_DAMAGED,
        what_to_do="install the package of this library again",
        detail=detail,
    )
