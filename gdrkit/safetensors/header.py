"""The header of a safetensors file: its strict parser, and the function that packs a header.

A file begins with the size of the header (8 bytes, little endian). The header is JSON. It has, for each tensor, the
data type, the shape, and the begin and the end of its bytes in the rest of the file. Source: the section "Format" of
the README of https://github.com/huggingface/safetensors. The parser refuses everything that this section forbids, also
where other parsers accept it: duplicate keys, holes and overlaps between tensors, bytes after the last tensor.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from gdrkit.errors import Reason, UsageError
from gdrkit.gds.opening import make_kernel_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gdrkit.gds import File

__all__ = [
    "ELEMENT_TYPES",
    "ElementType",
    "Header",
    "TensorEntry",
    "pack_header",
    "parse_header",
    "pause_collector",
    "read_header",
]

# The largest header that safetensors accepts.
HEADER_BYTES_MAX = 100_000_000
_SIZE_FIELD = struct.Struct("<Q")
_METADATA_KEY = "__metadata__"
_ENTRY_FIELDS = {"dtype", "shape", "data_offsets"}
_NUMBER = "(?:0|[1-9][0-9]{0,18})"
# Matches the entry of one tensor in the form that safetensors writes: without blanks.
_COMPACT_ENTRY = re.compile(
    r'("([^"\\\x00-\x1f]*)":{"dtype":"([A-Z0-9_]+)",'
    rf'"shape":\[((?:{_NUMBER}(?:,{_NUMBER})*)?)\],"data_offsets":\[({_NUMBER}),({_NUMBER})\]}}(?:,|}}\Z))'
)
# Matches the beginning of a header in this form: the brace, and the metadata if there are any.
_COMPACT_BEGIN = re.compile(r'{(?:"__metadata__":({[^{}\\]*}),)?')
_INTEGER_MAX = (1 << 63) - 1
# torch supports at most this number of dimensions.
_DIMENSIONS_MAX = 64


class ElementType(NamedTuple):
    """A data type of the format.

    Attributes
    ----------
    bits : int
        Size of an element, in bits. Elements of 4 and 6 bits are packed.
    dlpack_code : int
        The code of the type in DLPack (``DLDataTypeCode``).
    torch_name : str
        The name of the type in torch. torch has no types of 6 bits, so their tensors in torch are tensors of bytes.
    """

    bits: int
    dlpack_code: int
    torch_name: str


# Name, bits, DLPack code and name in torch, in the order in which safetensors sorts the types for a new file.
_TYPE_TABLE = """
BOOL 8 6 bool
F4 4 17 float4_e2m1fn_x2
F6_E2M3 6 15 uint8
F6_E3M2 6 16 uint8
U8 8 1 uint8
I8 8 0 int8
F8_E5M2 8 12 float8_e5m2
F8_E4M3 8 10 float8_e4m3fn
F8_E8M0 8 14 float8_e8m0fnu
F8_E4M3FNUZ 8 11 float8_e4m3fnuz
F8_E5M2FNUZ 8 13 float8_e5m2fnuz
I16 16 0 int16
U16 16 1 uint16
F16 16 2 float16
BF16 16 4 bfloat16
I32 32 0 int32
U32 32 1 uint32
F32 32 2 float32
C64 64 5 complex64
F64 64 2 float64
I64 64 0 int64
U64 64 1 uint64
"""
ELEMENT_TYPES: Mapping[str, ElementType] = {
    name: ElementType(int(bits), int(code), torch_name)
    for name, bits, code, torch_name in map(str.split, _TYPE_TABLE.strip().splitlines())
}
_BITS_BY_DTYPE = {name: element_type.bits for name, element_type in ELEMENT_TYPES.items()}


class TensorEntry(NamedTuple):
    """The entry of one tensor in the header.

    Attributes
    ----------
    dtype : str
        A key of :data:`ELEMENT_TYPES`.
    shape : tuple of int
        Number of elements in each dimension; the last dimension is contiguous.
    begin, end : int
        Offsets of the first byte and of the byte after the last one, from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The header of a file.

    Attributes
    ----------
    tensors : dict
        The entry of each tensor by its name, in the order of their bytes in the file.
    metadata : dict or None
        The texts that the file has beside its tensors.
    data_offset_bytes : int
        Offset in the file of the first byte after the header.
    data_bytes : int
        Size of all tensors, in bytes.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str] | None
    data_offset_bytes: int
    data_bytes: int


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Pause Python's collector of reference cycles during the block, unless it is off anyway.

    A header of 20,000 tensors becomes 100,000 objects without a cycle. Without the pause, they start many collections,
    which take most of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_header(file: File) -> Header:
    """Read and parse the header of an open file.

    Raises
    ------
    UsageError
        MALFORMED: the file is not a valid safetensors file. The message has the path and the cause.
    ApiError
        The kernel cannot read the file.
    """
    path, file_bytes = file.path, file.size_bytes
    if file_bytes < _SIZE_FIELD.size:
        raise _make_malformed_error(path, f"the file has {file_bytes} bytes; the size of the header alone needs 8")
    (header_bytes,) = _SIZE_FIELD.unpack(_read(file, 0, _SIZE_FIELD.size))
    if header_bytes > HEADER_BYTES_MAX:
        raise _make_malformed_error(path, f"the header may have at most {HEADER_BYTES_MAX} bytes, not {header_bytes}")
    data_bytes = file_bytes - _SIZE_FIELD.size - header_bytes
    if data_bytes < 0:
        message = f"the header should have {header_bytes} bytes, but the file has only {file_bytes}"
        raise _make_malformed_error(path, message)
    return parse_header(_read(file, _SIZE_FIELD.size, header_bytes), data_bytes=data_bytes, path=path)


def parse_header(text: bytes, *, data_bytes: int, path: str) -> Header:
    """Parse the JSON text of a header.

    Parameters
    ----------
    text : bytes
        The header in UTF-8, without the size field before it.
    data_bytes : int
        Number of bytes in the file after the header.
    path : str
        Path of the file, for errors.

    Raises
    ------
    UsageError
        MALFORMED: see :func:`read_header`.
    """
    tensors, metadata = _parse_compact(text) or _parse_any(text, path)
    # The entries may be in another order than the bytes. They are then sorted, and checked for holes and overlaps.
    # entry[2] is the begin of a tensor, and entry[3] its end.
    end_offsets = [entry[3] for entry in tensors.values()]
    if [entry[2] for entry in tensors.values()] != [0, *end_offsets][:-1]:
        tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
        _check_positions(tensors, path)
    tensors_end = max(end_offsets, default=0)
    if tensors_end != data_bytes:
        message = f"the tensors have {tensors_end} bytes, but {data_bytes} bytes follow the header"
        raise _make_malformed_error(path, message)
    return Header(tensors, metadata, _SIZE_FIELD.size + len(text), data_bytes)


def pack_header(tensors: Iterable[tuple[str, TensorEntry]], metadata: Mapping[str, str] | None) -> bytes:
    """Return the beginning of a file: the size of the header, and the header padded to a multiple of 8 bytes.

    Raises
    ------
    UsageError
        A name occurs twice or is ``__metadata__``, the metadata are not texts, or the header is too large.
    """
    document: dict[str, object] = {} if metadata is None else {_METADATA_KEY: dict(metadata)}
    if metadata is not None and not _is_metadata(document[_METADATA_KEY]):
        message = "metadata must have texts as keys and values"
        raise UsageError(message, reason=Reason.MALFORMED)
    for name, entry in tensors:
        if name in document or name == _METADATA_KEY:
            message = f"tensor {name!r} occurs twice" if name in document else f"no tensor may be named {name!r}"
            raise UsageError(message)
        document[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (entry.begin, entry.end)}
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        message = f"the header may have at most {HEADER_BYTES_MAX} bytes, not {len(text)}"
        raise UsageError(message, what_to_do="save the tensors in several files")
    return _SIZE_FIELD.pack(len(text)) + text


def _parse_compact(text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str] | None] | None:
    """Return the entries and the metadata of a header that has the form in which safetensors writes it.

    For every other text, and for every error, return None: :func:`_parse_any` then parses it or finds the cause. This
    function takes half as long as :func:`_parse_any`, because it does not create an object for each JSON value.
    """
    try:
        header_text = text.decode().rstrip(" ")
        begin_match = _COMPACT_BEGIN.match(header_text)
        if begin_match is None:
            return None
        metadata = json.loads(begin_match[1], object_pairs_hook=_make_unique_dict) if begin_match[1] else None
        if begin_match[1]:
            _check_metadata(metadata, "")
        tensors: dict[str, TensorEntry] = {}
        shapes_and_element_counts: dict[str, tuple[tuple[int, ...], int]] = {}
        entry_matches = _COMPACT_ENTRY.findall(header_text, begin_match.end())
        matched_length = begin_match.end()
        for entry_text, name, dtype, sizes_text, begin_text, end_text in entry_matches:
            if sizes_text not in shapes_and_element_counts:
                shape = tuple(map(int, sizes_text.split(","))) if sizes_text else ()
                if len(shape) > _DIMENSIONS_MAX or max(shape, default=0) > _INTEGER_MAX:
                    return None
                shapes_and_element_counts[sizes_text] = shape, math.prod(shape)
            shape, element_count = shapes_and_element_counts[sizes_text]
            begin, end = int(begin_text), int(end_text)
            if (end - begin) * 8 != element_count * _BITS_BY_DTYPE[dtype]:
                return None
            # tuple.__new__ is faster than a call of TensorEntry.
            tensors[name] = tuple.__new__(TensorEntry, (dtype, shape, begin, end))
            matched_length += len(entry_text)
    except (ValueError, KeyError, RecursionError, UsageError):
        return None
    # The pattern may have skipped characters, the text may end with a comma, or a name may occur twice.
    is_complete = matched_length == len(header_text) and header_text.endswith("}")
    is_complete = is_complete and len(tensors) == len(entry_matches) and _METADATA_KEY not in tensors
    return (tensors, metadata) if is_complete else None


def _parse_any(text: bytes, path: str) -> tuple[dict[str, TensorEntry], dict[str, str] | None]:
    """Return the entries and the metadata of a header, or raise UsageError with the cause."""
    document = _parse_json(text, path)
    metadata = document.pop(_METADATA_KEY, None)
    if metadata is not None:
        _check_metadata(metadata, path)
    tensors = {}
    for name, value in document.items():
        try:
            tensors[name] = _parse_entry(value)
        except ValueError as error:
            raise _make_malformed_error(path, f"tensor {name!r}: {error}") from error
    return tensors, metadata


def _parse_json(text: bytes, path: str) -> dict[str, Any]:
    """Parse the JSON text to an object without duplicate keys."""
    if not text.startswith(b"{"):
        raise _make_malformed_error(path, f"the header must begin with '{{', not with {text[:1]!r}")
    try:
        header_text = text.decode()
        document = json.loads(
            header_text, object_pairs_hook=_make_unique_dict, parse_float=_refuse_number, parse_constant=_refuse_number
        )
        if "\\u" in header_text:
            # JSON can name one half of a surrogate pair. encode() refuses it, because no UTF-8 text can contain it.
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        # UnicodeError and JSONDecodeError are ValueErrors.
        raise _make_malformed_error(path, f"the header is not valid JSON: {error}") from error
    if header_text.rstrip(" ") != header_text.rstrip():
        raise _make_malformed_error(path, "the header may be padded with blanks only")
    assert isinstance(document, dict)  # noqa: S101 - the text begins with a brace.
    return document


def _make_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    dictionary = dict(pairs)
    if len(dictionary) != len(pairs):
        names = [name for name, _value in pairs]
        message = f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice"
        raise ValueError(message)
    return dictionary


def _refuse_number(text: str) -> NoReturn:
    message = f"numbers must be whole, not {text}"
    raise ValueError(message)


def _is_metadata(metadata: object) -> bool:
    return isinstance(metadata, dict) and all(isinstance(text, str) for item in metadata.items() for text in item)


def _check_metadata(metadata: object, path: str) -> None:
    if not _is_metadata(metadata):
        raise _make_malformed_error(path, f"{_METADATA_KEY} must be an object whose values are texts")


def _check_positions(tensors: Mapping[str, TensorEntry], path: str) -> None:
    """Require that each tensor begins where the one before it ends."""
    previous_end = 0
    for name, entry in tensors.items():
        if entry.begin != previous_end:
            relation = "overlap" if entry.begin < previous_end else "leave a hole after"
            message = (
                f"the bytes of tensor {name!r} begin at {entry.begin} and {relation} those that end at {previous_end}"
            )
            raise _make_malformed_error(path, message)
        previous_end = entry.end


def _parse_entry(value: Any) -> TensorEntry:  # noqa: ANN401 - any JSON value.
    """Return the entry of a tensor. Raise ValueError with the cause if the value is invalid."""
    if not isinstance(value, dict) or set(value) != _ENTRY_FIELDS:
        message = f"an entry must be an object with {', '.join(sorted(_ENTRY_FIELDS))}"
        raise ValueError(message)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        message = f"dtype must be one of {', '.join(ELEMENT_TYPES)}, not {dtype!r:.40}"
    elif not _is_size_list(shape) or len(shape) > _DIMENSIONS_MAX:
        message = f"shape must be at most {_DIMENSIONS_MAX} numbers from 0 to 2**63 - 1, not {shape!r:.80}"
    elif not _is_size_list(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:  # noqa: PLR2004 - begin and end.
        message = f"data_offsets must be two numbers from 0 to 2**63 - 1 in order, not {offsets!r:.80}"
    elif (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _BITS_BY_DTYPE[dtype]:
        message = f"{offsets[1] - offsets[0]} bytes do not fit to shape {shape} of {dtype}"
    else:
        return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])
    raise ValueError(message)


def _is_size_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _INTEGER_MAX for item in value)


def _read(file: File, offset_bytes: int, length_bytes: int) -> bytes:
    """Read a part of the file. A read may return fewer bytes than requested, so it is repeated."""
    data = bytearray()
    while len(data) < length_bytes:
        try:
            chunk = os.pread(file.fileno(), length_bytes - len(data), offset_bytes + len(data))
        except OSError as error:
            raise make_kernel_error("pread", file.path, error) from error
        if not chunk:
            message = f"the file ended {length_bytes - len(data)} bytes before the end of its header"
            raise _make_malformed_error(file.path, message)
        data += chunk
    return bytes(data)


def _make_malformed_error(path: str, cause: str) -> UsageError:
    return UsageError(f"{path} is not a valid safetensors file: {cause}", reason=Reason.MALFORMED)
