"""docs/sharing.md has the tables of the code: the layout of a handle, and the memory that CUDA exports."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit.buffers import MemoryKind
from gdrkit.registration.exports import EXPORTS
from gdrkit.registration.handle import LAYOUT, SHARE_HANDLE_BYTES, ShareKind

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "sharing.md"

# The document has these texts for the values of ExportRow.status: CUDA_SUCCESS (0), CUDA_ERROR_INVALID_VALUE (1) and
# CUDA_ERROR_NOT_SUPPORTED (801).
TEXT_BY_STATUS = {0: "works", 1: "refused (1)", 801: "refused (801)"}
# The document has these texts for the values of ExportRow.part except "whole".
TEXT_BY_PART = {
    "page": "from its second page on",
    "odd_address": "at an odd address",
    "odd_length": "of an odd length",
    "pcie": "by a PCIe mapping (flag 1)",
}


def make_layout_table() -> str:
    lines = ["| offset | bytes | field | value |", "|---|---|---|---|"]
    for field in LAYOUT:
        size_bytes = struct.calcsize(f"<{field.code}")
        lines.append(f"| {field.offset_bytes} | {size_bytes} | {field.name} | {field.meaning} |")
    return "\n".join(lines)


def make_export_table() -> str:
    lines = ["| memory | IPC | VMM | dma-buf |", "|---|---|---|---|"]
    for memory in dict.fromkeys(row.memory for row in EXPORTS):
        cells = []
        for method in ShareKind:
            rows = [row for row in EXPORTS if (row.memory, row.method, row.part) == (memory, method, "whole")]
            # EXPORTS has no row for the method VMM and memory that was not allocated with cuMemCreate.
            cells.append(TEXT_BY_STATUS[rows[0].status] if rows else "not VMM memory")
        lines.append(f"| {memory.value} | {' | '.join(cells)} |")
    lines += ["", "| dma-buf of cuMemAlloc memory | |", "|---|---|"]
    part_rows = [row for row in EXPORTS if row.memory is MemoryKind.CUDA and row.part != "whole"]
    lines += [f"| {TEXT_BY_PART[row.part]} | {TEXT_BY_STATUS[row.status]} |" for row in part_rows]
    return "\n".join(lines)


@pytest.mark.parametrize("make_table", [make_layout_table, make_export_table])
def test_document_has_the_table_of_the_code(make_table: Callable[[], str]) -> None:
    assert make_table() in DOCUMENT.read_text(), f"docs/sharing.md must have:\n{make_table()}"


def test_layout_has_no_gap() -> None:
    end_offset_bytes = 0
    for field in LAYOUT:
        assert field.offset_bytes == end_offset_bytes
        end_offset_bytes += struct.calcsize(f"<{field.code}")
    assert end_offset_bytes == SHARE_HANDLE_BYTES
