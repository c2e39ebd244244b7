"""Test vectors of handles of shared memory: the C library and this package create and refuse the same bytes.

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

VECTORS = Path(__file__).parents[1] / "vectors" / "share_handles.txt"


class Vector(NamedTuple):
    """One line of the file of vectors: a packed handle, the verdict (good or bad), and the fields of a good handle."""

    kind: str
    verdict: str
    name: str
    data: bytes
    fields: dict[str, str]

    def integer(self, field: str) -> int:
        return int(self.fields[field])

    def from_hex(self, field: str) -> bytes:
        return bytes.fromhex(self.fields[field])


def _read_vectors(verdict: str) -> list[Vector]:
    """Return the vectors with this verdict, good or bad."""
    vectors = []
    for line in VECTORS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, line_verdict, name, data, *fields = line.split(" ")
        assert line_verdict in {"good", "bad"}
        if line_verdict == verdict:
            packed = b"" if data == "-" else bytes.fromhex(data)
            vectors.append(Vector(kind, line_verdict, name, packed, dict(field.split("=") for field in fields)))
    assert vectors
    return vectors


def _case_id(vector: Vector) -> str:
    return f"{vector.kind}-{vector.name}"


def _make_handle(vector: Vector) -> ShareHandle | GdrHandle:
    """Return the handle with the fields of a good vector."""
    if vector.kind == "gdr":
        return GdrHandle(vector.from_hex("ipc"), vector.integer("length_bytes"), vector.integer("device"))
    return ShareHandle(
        kind=ShareKind(vector.integer("kind")),
        allocation_bytes=vector.integer("allocation_bytes"),
        offset_bytes=vector.integer("offset_bytes"),
        length_bytes=vector.integer("length_bytes"),
        address=vector.integer("address"),
        chunk_bytes=vector.integer("chunk_bytes"),
        descriptor_count=vector.integer("descriptor_count"),
        device_uuid=vector.from_hex("device_uuid"),
        owner=ProcessIdentity(
            boot_id=vector.from_hex("boot_id"),
            process_id=vector.integer("process_id"),
            namespace=vector.integer("namespace"),
            started_ticks=vector.integer("started_ticks"),
        ),
        ipc=vector.from_hex("ipc"),
    )


_HANDLE_CLASSES: dict[str, type[ShareHandle | GdrHandle]] = {"share": ShareHandle, "gdr": GdrHandle}


@pytest.mark.parametrize("vector", _read_vectors("good"), ids=_case_id)
def test_valid_vector_parses_the_same_in_both_languages(vector: Vector) -> None:
    handle = _make_handle(vector)
    assert handle.pack() == vector.data
    assert _HANDLE_CLASSES[vector.kind].parse(vector.data) == handle


@pytest.mark.parametrize("vector", _read_vectors("bad"), ids=_case_id)
def test_invalid_vector_is_refused_in_both_languages(vector: Vector) -> None:
    with pytest.raises(UsageError) as caught:
        _HANDLE_CLASSES[vector.kind].parse(vector.data)
    assert caught.value.reason is Reason.MALFORMED
