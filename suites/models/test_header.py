"""The header of a model file: what the parser accepts, and one clear error for everything that the format forbids."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING

import pytest
from models.model_files import TENSORS_OF_EVERY_TYPE, compute_size_bytes, pack_file, write_model
from support.fuzz import run_fuzzer

from gdrkit import gds
from gdrkit.errors import Reason, UsageError
from gdrkit.safetensors import TensorEntry
from gdrkit.safetensors.header import pack_header, parse_header, read_header

if TYPE_CHECKING:
    from pathlib import Path

FUZZ_S = float(os.environ.get("GDRKIT_FUZZ_S", "3"))
ENTRY_A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
ENTRY_B = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}
HEADER_TEXT = json.dumps({"a": ENTRY_A}).encode()


def test_header_of_every_data_type_is_read(tmp_path: Path, seed: int) -> None:
    model = write_model(tmp_path / "file", TENSORS_OF_EVERY_TYPE, seed=seed, metadata={"format": "pt"})
    with gds.File(model.path, direct="never") as file:
        header = read_header(file)
        tensor_data = model.path.read_bytes()[header.data_offset_bytes :]
    assert header.metadata == {"format": "pt"}
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == {
        name: (dtype, shape) for name, dtype, shape in TENSORS_OF_EVERY_TYPE
    }
    assert {name: tensor_data[entry.begin : entry.end] for name, entry in header.tensors.items()} == model.tensor_data
    assert header.data_bytes == len(tensor_data)


def test_packed_header_is_padded_and_read_again() -> None:
    entries = {"a": TensorEntry("F32", (2, 3), 0, 24), "\N{GREEK SMALL LETTER ALPHA}": TensorEntry("U8", (), 24, 25)}
    packed_header = pack_header(entries.items(), {"k": "v"})
    # The packed header begins with its size, in 8 bytes.
    assert len(packed_header) % 8 == 0
    assert struct.unpack("<Q", packed_header[:8]) == (len(packed_header) - 8,)
    header = parse_header(packed_header[8:], data_bytes=25, path="x")
    assert (header.tensors, header.metadata, header.data_offset_bytes) == (entries, {"k": "v"}, len(packed_header))


@pytest.mark.parametrize(
    ("entries", "metadata", "message"),
    [
        ([("a", TensorEntry("U8", (1,), 0, 1))] * 2, None, "'a' occurs twice"),
        ([("__metadata__", TensorEntry("U8", (1,), 0, 1))], None, "no tensor may be named '__metadata__'"),
        ([], {"k": 1}, "must have texts as keys and values"),
    ],
    ids=["twice", "reserved", "metadata"],
)
def test_header_that_cannot_be_packed_is_refused(
    entries: list[tuple[str, TensorEntry]], metadata: dict[str, str] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pack_header(entries, metadata)


# The header of HEADER_TEXT without blanks, as safetensors writes it. The parser has a faster path for this form.
COMPACT_HEADER_TEXT = json.dumps({"a": ENTRY_A}, separators=(",", ":")).encode()


def _pack_changed_entry(**changes: object) -> bytes:
    return pack_file({"a": {**ENTRY_A, **changes}}, bytes(4))


# Each value has the contents of a file, and a part of the message that explains why the parser refuses the file.
INVALID_FILES = {
    "empty-file": (b"", "the file has 0 bytes"),
    "no-size": (b"1234567", "the file has 7 bytes"),
    "truncated-header": (pack_file(HEADER_TEXT)[:20], "should have 60 bytes, but the file has only 20"),
    "truncated-data": (pack_file(HEADER_TEXT, bytes(3)), "the tensors have 4 bytes, but 3 bytes follow"),
    "bytes-at-the-end": (pack_file(HEADER_TEXT, bytes(5)), "the tensors have 4 bytes, but 5 bytes follow"),
    "huge-header": (struct.pack("<Q", 100_000_001) + bytes(64), "at most 100000000 bytes, not 100000001"),
    "largest-header": (struct.pack("<Q", (1 << 64) - 1) + HEADER_TEXT, "not 18446744073709551615"),
    "list": (pack_file([ENTRY_A], bytes(4)), "must begin with"),
    "blank-first": (pack_file(b" " + HEADER_TEXT, bytes(4)), "must begin with"),
    "newline-last": (pack_file(HEADER_TEXT + b"\n", bytes(4)), "padded with blanks only"),
    "text-last": (pack_file(HEADER_TEXT + b"{}", bytes(4)), "not valid JSON"),
    "not-utf8": (pack_file(HEADER_TEXT.replace(b'"a"', b'"\xff"'), bytes(4)), "not valid JSON"),
    "half-surrogate": (pack_file(HEADER_TEXT.replace(b'"a"', b'"\\ud800"'), bytes(4)), "not valid JSON"),
    "duplicate-tensor": (pack_file(HEADER_TEXT[:-1] + b"," + HEADER_TEXT[1:], bytes(4)), "the key 'a' occurs twice"),
    "duplicate-field": (
        pack_file(HEADER_TEXT.replace(b'"shape"', b'"dtype":"U8","shape"'), bytes(4)),
        "'dtype' occurs twice",
    ),
    "duplicate-metadata": (pack_file(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' occurs twice"),
    "deep": (pack_file(b'{"a":' * 100_000), "not valid JSON"),
    "float": (pack_file(HEADER_TEXT.replace(b"[4]", b"[4.0]"), bytes(4)), "numbers must be whole, not 4.0"),
    "infinity": (
        pack_file(HEADER_TEXT.replace(b"[4]", b"[Infinity]"), bytes(4)),
        "numbers must be whole, not Infinity",
    ),
    "many-digits": (pack_file(HEADER_TEXT.replace(b"[4]", b"[" + b"4" * 5000 + b"]"), bytes(4)), "not valid JSON"),
    "metadata-number": (pack_file({"__metadata__": {"k": 1}}), "an object whose values are texts"),
    "metadata-list": (pack_file({"__metadata__": []}), "an object whose values are texts"),
    "entry-list": (pack_file({"a": [1, 2, 3]}, bytes(4)), "'a': an entry must be an object with"),
    "entry-null": (pack_file({"a": None}, bytes(4)), "'a': an entry must be an object with"),
    "missing-field": (pack_file({"a": {"dtype": "U8", "shape": [4]}}, bytes(4)), "an object with"),
    "unknown-field": (_pack_changed_entry(strides=[1]), "an object with data_offsets, dtype, shape"),
    "wrong-dtype": (_pack_changed_entry(dtype="FLOAT"), "dtype must be one of BOOL, F4"),
    "dtype-list": (_pack_changed_entry(dtype=["U8"]), "dtype must be one of BOOL, F4"),
    "wrong-size": (_pack_changed_entry(dtype="F32"), "4 bytes do not fit to shape .4. of F32"),
    "shape-text": (_pack_changed_entry(shape="4"), "shape must be"),
    "shape-empty-text": (pack_file({"a": {**ENTRY_A, "shape": "", "data_offsets": [0, 1]}}, bytes(1)), "shape must be"),
    "shape-bool": (pack_file({"a": {**ENTRY_A, "shape": [True], "data_offsets": [0, 1]}}, bytes(1)), "shape must be"),
    "shape-negative": (_pack_changed_entry(shape=[-2, -2]), "shape must be"),
    "shape-too-large": (_pack_changed_entry(shape=[1 << 63, 0]), "shape must be"),
    "shape-too-long": (_pack_changed_entry(shape=[4] + [1] * 64), "shape must be at most 64 numbers"),
    "half-byte": (
        pack_file({"a": {"dtype": "F4", "shape": [7], "data_offsets": [0, 3]}}, bytes(3)),
        "3 bytes do not fit",
    ),
    "three-offsets": (_pack_changed_entry(data_offsets=[0, 2, 4]), "data_offsets must be two numbers"),
    "offsets-in-wrong-order": (_pack_changed_entry(data_offsets=[4, 0]), "data_offsets must be two numbers"),
    "offset-negative": (_pack_changed_entry(data_offsets=[-4, 0]), "data_offsets must be two numbers"),
    "offset-float": (pack_file(HEADER_TEXT.replace(b"[0, 4]", b"[0, 4e0]"), bytes(4)), "numbers must be whole"),
    "overlap": (
        pack_file({"a": ENTRY_A, "b": {**ENTRY_B, "data_offsets": [2, 6]}}, bytes(6)),
        "tensor 'b' begin at 2 and overlap",
    ),
    "same-bytes": (pack_file({"a": ENTRY_A, "b": ENTRY_A}, bytes(4)), "tensor 'b' begin at 0 and overlap"),
    "hole": (
        pack_file({"a": ENTRY_A, "b": {**ENTRY_B, "data_offsets": [5, 9]}}, bytes(9)),
        "'b' begin at 5 and leave a hole",
    ),
    "compact-comma-last": (pack_file(COMPACT_HEADER_TEXT[:-1] + b",", bytes(4)), "not valid JSON"),
    "compact-comma-missing": (
        pack_file(COMPACT_HEADER_TEXT[:-1] + COMPACT_HEADER_TEXT[1:], bytes(4)),
        "not valid JSON",
    ),
    "compact-text-between": (
        pack_file(COMPACT_HEADER_TEXT[:-1] + b",x" + COMPACT_HEADER_TEXT[1:], bytes(4)),
        "not valid JSON",
    ),
    "compact-duplicate": (
        pack_file(COMPACT_HEADER_TEXT[:-1] + b"," + COMPACT_HEADER_TEXT[1:], bytes(4)),
        "the key 'a' occurs twice",
    ),
    "compact-metadata": (
        pack_file(COMPACT_HEADER_TEXT.replace(b'"a"', b'"__metadata__"'), bytes(4)),
        "whose values are texts",
    ),
    "compact-wrong-dtype": (
        pack_file(COMPACT_HEADER_TEXT.replace(b"U8", b"U9"), bytes(4)),
        "dtype must be one of BOOL, F4",
    ),
    "compact-wrong-size": (pack_file(COMPACT_HEADER_TEXT.replace(b"[4]", b"[5]"), bytes(4)), "4 bytes do not fit"),
    "compact-zero-first": (pack_file(COMPACT_HEADER_TEXT.replace(b"[4]", b"[04]"), bytes(4)), "not valid JSON"),
    "compact-control-character": (pack_file(COMPACT_HEADER_TEXT.replace(b'"a"', b'"\n"'), bytes(4)), "not valid JSON"),
    "compact-hole": (
        pack_file(COMPACT_HEADER_TEXT.replace(b"[0,4]", b"[4,8]"), bytes(8)),
        "'a' begin at 4 and leave a hole",
    ),
    "hole-at-the-beginning": (pack_file({"b": ENTRY_B}, bytes(8)), "'b' begin at 4 and leave a hole"),
}


@pytest.mark.parametrize("case_id", INVALID_FILES)
def test_invalid_file_is_refused_with_its_cause(tmp_path: Path, case_id: str) -> None:
    contents, message = INVALID_FILES[case_id]
    (tmp_path / "model").write_bytes(contents)
    with gds.File(tmp_path / "model", direct="never") as file:
        with pytest.raises(UsageError, match=message) as error_info:
            read_header(file)
        assert error_info.value.reason is Reason.MALFORMED
        assert str(error_info.value).startswith(f"{tmp_path / 'model'} is not a valid safetensors file: ")


def test_tensors_are_in_the_order_of_their_bytes() -> None:
    header = parse_header(json.dumps({"b": ENTRY_B, "a": ENTRY_A}).encode(), data_bytes=8, path="x")
    assert list(header.tensors) == ["a", "b"]
    assert sum(compute_size_bytes(entry.dtype, entry.shape) for entry in header.tensors.values()) == 8


@pytest.mark.timeout(FUZZ_S + 120)
def test_fuzzer_finds_no_defect_in_the_header_parser() -> None:
    run_fuzzer("models.fuzz_headers", seconds=FUZZ_S)
