"""Fuzz target of the parser of safetensors headers: ``python -m models.fuzz_headers --seconds 10``.

The parser may refuse a header with UsageError (Reason.MALFORMED). If the parser accepts the header, the entries equal
the result of json.loads, and they cover the data without a gap. If the entries are packed and parsed again, they are
unchanged.
"""

from __future__ import annotations

import json
import math

from support import fuzz

from gdrkit.errors import Reason, UsageError
from gdrkit.safetensors import ELEMENT_TYPES, header

__all__ = ["TARGETS"]

# Size of the data after the header, in bytes.
_DATA_BYTES = 64
_VALID_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]},
        "b": {"dtype": "F4", "shape": [2, 16], "data_offsets": [32, 48]},
        "c": {"dtype": "F64", "shape": [], "data_offsets": [48, 56]},
        "d": {"dtype": "I64", "shape": [0, 3], "data_offsets": [56, 56]},
        "e": {"dtype": "C64", "shape": [1], "data_offsets": [56, 64]},
    },
    separators=(",", ":"),
).encode()
# The fuzzer inserts these words into headers.
_TOKENS = (
    b'"a":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}',
    b'"dtype"',
    b'"\\ud800"',
    b"9223372036854775808",
    b"-1",
    b"1e3",
    b"NaN",
    b"true",
    b"[[[[",
    b"null",
    b"{",
    b"}",
    b",",
    b"\xff",
)


def _check_header(header_bytes: bytes) -> None:
    try:
        parsed_header = header.parse_header(header_bytes, data_bytes=_DATA_BYTES, path="model.safetensors")
    except UsageError as error:
        if error.reason is not Reason.MALFORMED:
            raise
        return
    json_object = json.loads(header_bytes)
    assert json_object.pop("__metadata__", None) == parsed_header.metadata
    for name, fields in json_object.items():
        entry = parsed_header.tensors[name]
        assert [entry.dtype, list(entry.shape), [entry.begin, entry.end]] == [
            fields["dtype"],
            fields["shape"],
            fields["data_offsets"],
        ]
    assert len(json_object) == len(parsed_header.tensors)
    data_offset = 0
    for name, entry in parsed_header.tensors.items():
        assert entry.begin == data_offset, name
        assert (entry.end - entry.begin) * 8 == math.prod(entry.shape) * ELEMENT_TYPES[entry.dtype].bits, name
        data_offset = entry.end
    assert data_offset == _DATA_BYTES
    # pack_header() begins with the size of the header, in 8 bytes.
    packed_header = header.pack_header(parsed_header.tensors.items(), parsed_header.metadata)[8:]
    reparsed_header = header.parse_header(packed_header, data_bytes=_DATA_BYTES, path="model.safetensors")
    assert (reparsed_header.tensors, reparsed_header.metadata) == (parsed_header.tensors, parsed_header.metadata)


TARGETS = {
    "header": fuzz.FuzzTarget(
        _check_header,
        [_VALID_HEADER, _VALID_HEADER + b"   ", b'{"x":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}'],
        (header,),
        change_count_range=(1, 5),
        alphabet=b'0123456789[]{},:"ef-',
        tokens=_TOKENS,
        length_max_bytes=4096,
    )
}

if __name__ == "__main__":
    fuzz.main(TARGETS)
