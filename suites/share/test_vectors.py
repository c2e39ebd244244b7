"""Handles of shared memory: the C library and this package create and refuse the same bytes (shared vectors)."""

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
    """One line of the file of vectors."""

    kind: str
    verdict: str
    name: str
    data: bytes
    fields: dict[str, str]

    def number(self, field: str) -> int:
        return int(self.fields[field])

    def raw(self, field: str) -> bytes:
        return bytes.fromhex(self.fields[field])


def _vectors(verdict: str) -> list[Vector]:
    vectors = []
    for line in VECTORS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kind, line_verdict, name, data, *fields = line.split(" ")
        assert line_verdict in {"good", "bad"}
        if line_verdict == verdict:
            raw = b"" if data == "-" else bytes.fromhex(data)
            vectors.append(Vector(kind, line_verdict, name, raw, dict(field.split("=") for field in fields)))
    assert vectors
    return vectors


def _id(vector: Vector) -> str:
    return f"{vector.kind}-{vector.name}"


def _expected(vector: Vector) -> ShareHandle | GdrHandle:
    if vector.kind == "gdr":
        return GdrHandle(vector.raw("ipc"), vector.number("length_bytes"), vector.number("device"))
    return ShareHandle(
        kind=ShareKind(vector.number("kind")),
        allocation_bytes=vector.number("allocation_bytes"),
        offset_bytes=vector.number("offset_bytes"),
        length_bytes=vector.number("length_bytes"),
        address=vector.number("address"),
        chunk_bytes=vector.number("chunk_bytes"),
        descriptor_count=vector.number("descriptor_count"),
        device_uuid=vector.raw("device_uuid"),
        owner=ProcessIdentity(
            boot_id=vector.raw("boot_id"),
            process_id=vector.number("process_id"),
            namespace=vector.number("namespace"),
            started_ticks=vector.number("started_ticks"),
        ),
        ipc=vector.raw("ipc"),
    )


_CLASSES: dict[str, type[ShareHandle | GdrHandle]] = {"share": ShareHandle, "gdr": GdrHandle}


@pytest.mark.parametrize("vector", _vectors("good"), ids=_id)
def test_valid_vector_parses_the_same_in_both_languages(vector: Vector) -> None:
    expected = _expected(vector)
    assert expected.pack() == vector.data
    assert _CLASSES[vector.kind].parse(vector.data) == expected


@pytest.mark.parametrize("vector", _vectors("bad"), ids=_id)
def test_invalid_vector_is_refused_in_both_languages(vector: Vector) -> None:
    with pytest.raises(UsageError) as caught:
        _CLASSES[vector.kind].parse(vector.data)
    assert caught.value.reason is Reason.MALFORMED
