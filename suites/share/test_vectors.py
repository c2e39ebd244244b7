"""Test vectors of handles of shared memory: the C library and gdrkit create and refuse the same bytes.

The native tests of the C library read the same file of vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.host import ProcessIdentity
from gdrkit.registration.gdr_handle import GdrHandle
from gdrkit.registration.handle import ShareHandle, ShareKind

VECTORS_PATH = Path(__file__).parents[1] / "vectors" / "share_handles.txt"


class Vector(NamedTuple):
    """One line of the file of vectors: a packed handle, the verdict (good or bad), and the fields of a good handle.

    `handle_format` is ``share`` (192 bytes) or ``gdr`` (80 bytes).
    """

    handle_format: str
    verdict: str
    name: str
    packed_handle: bytes
    fields: dict[str, str]

    def parse_integer(self, field_name: str) -> int:
        return int(self.fields[field_name])

    def parse_hex(self, field_name: str) -> bytes:
        return bytes.fromhex(self.fields[field_name])


def _read_vectors(verdict: str) -> list[Vector]:
    """Return the vectors with this verdict, good or bad."""
    vectors = []
    for line in VECTORS_PATH.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        handle_format, line_verdict, name, data_hex, *field_texts = line.split(" ")
        assert line_verdict in {"good", "bad"}
        if line_verdict == verdict:
            packed_handle = b"" if data_hex == "-" else bytes.fromhex(data_hex)
            fields = dict(field_text.split("=") for field_text in field_texts)
            vectors.append(Vector(handle_format, line_verdict, name, packed_handle, fields))
    assert vectors
    return vectors


def _make_case_id(vector: Vector) -> str:
    return f"{vector.handle_format}-{vector.name}"


def _make_handle(vector: Vector) -> ShareHandle | GdrHandle:
    """Return the handle with the fields of a good vector."""
    if vector.handle_format == "gdr":
        return GdrHandle(vector.parse_hex("ipc"), vector.parse_integer("length_bytes"), vector.parse_integer("device"))
    return ShareHandle(
        kind=ShareKind(vector.parse_integer("kind")),
        allocation_bytes=vector.parse_integer("allocation_bytes"),
        offset_bytes=vector.parse_integer("offset_bytes"),
        length_bytes=vector.parse_integer("length_bytes"),
        address=vector.parse_integer("address"),
        chunk_bytes=vector.parse_integer("chunk_bytes"),
        descriptor_count=vector.parse_integer("descriptor_count"),
        device_uuid=vector.parse_hex("device_uuid"),
        owner=ProcessIdentity(
            boot_id=vector.parse_hex("boot_id"),
            process_id=vector.parse_integer("process_id"),
            pid_namespace=vector.parse_integer("namespace"),
            started_ticks=vector.parse_integer("started_ticks"),
        ),
        ipc=vector.parse_hex("ipc"),
    )


_HANDLE_CLASS_BY_FORMAT: dict[str, type[ShareHandle | GdrHandle]] = {"share": ShareHandle, "gdr": GdrHandle}


@pytest.mark.parametrize("vector", _read_vectors("good"), ids=_make_case_id)
def test_valid_vector_parses_the_same_in_both_languages(vector: Vector) -> None:
    handle = _make_handle(vector)
    assert handle.pack() == vector.packed_handle
    assert _HANDLE_CLASS_BY_FORMAT[vector.handle_format].parse(vector.packed_handle) == handle


@pytest.mark.parametrize("vector", _read_vectors("bad"), ids=_make_case_id)
def test_invalid_vector_is_refused_in_both_languages(vector: Vector) -> None:
    with pytest.raises(UsageError) as error_info:
        _HANDLE_CLASS_BY_FORMAT[vector.handle_format].parse(vector.packed_handle)
    assert error_info.value.reason is Reason.MALFORMED
