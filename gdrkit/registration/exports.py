"""Which memory goes to other processes and to NICs by which way, as measured.

Level 3, pure: every row was run on an H200 with driver 580 (CUDA 13.0). The driver is always asked; the table only
explains what it answers, and the suites ask it again for every row.
"""

from __future__ import annotations

from typing import NamedTuple

from gdrkit.buffers import MemoryKind
from gdrkit.errors import ApiError, Reason, Unsupported
from gdrkit.registration.handle import ShareKind

__all__ = ["EXPORTS", "ExportRow", "advice", "explained", "ways_of"]

_SUCCESS = 0
_INVALID_VALUE = 1
_NOT_SUPPORTED = 801


class ExportRow(NamedTuple):
    """What the driver answers.

    Attributes
    ----------
    memory : MemoryKind
        Which memory.
    way : ShareKind
        How it is exported.
    part : str
        ``whole``; of a dma-buf also ``page`` (from the second 4 KiB page on), ``odd_address``, ``odd_length`` and
        ``pcie`` (whole, by a PCIe mapping: flag 1).
    status : int
        The CUresult.
    """

    memory: MemoryKind
    way: ShareKind
    part: str
    status: int


EXPORTS: tuple[ExportRow, ...] = (
    ExportRow(MemoryKind.CUDA, ShareKind.IPC, "whole", _SUCCESS),
    ExportRow(MemoryKind.CUDA_POOL, ShareKind.IPC, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA_VMM, ShareKind.IPC, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA_MANAGED, ShareKind.IPC, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA_IMPORTED, ShareKind.IPC, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA_VMM, ShareKind.VMM, "whole", _SUCCESS),
    ExportRow(MemoryKind.CUDA, ShareKind.DMABUF, "whole", _SUCCESS),
    ExportRow(MemoryKind.CUDA_POOL, ShareKind.DMABUF, "whole", _SUCCESS),
    ExportRow(MemoryKind.CUDA_VMM, ShareKind.DMABUF, "whole", _SUCCESS),
    ExportRow(MemoryKind.CUDA_MANAGED, ShareKind.DMABUF, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA_IMPORTED, ShareKind.DMABUF, "whole", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA, ShareKind.DMABUF, "page", _SUCCESS),
    ExportRow(MemoryKind.CUDA, ShareKind.DMABUF, "odd_address", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA, ShareKind.DMABUF, "odd_length", _INVALID_VALUE),
    ExportRow(MemoryKind.CUDA, ShareKind.DMABUF, "pcie", _NOT_SUPPORTED),
)


def ways_of(memory: MemoryKind) -> tuple[ShareKind, ...]:
    """By which ways memory of this kind was seen to go out; none for memory that the table does not know."""
    return tuple(row.way for row in EXPORTS if row.memory is memory and row.part == "whole" and row.status == _SUCCESS)


def advice(memory: MemoryKind) -> str:
    """What to do with memory of this kind instead."""
    if memory is MemoryKind.CUDA_IMPORTED:
        return "let the process that allocated it share it"
    ways = [way.name for way in ways_of(memory)]
    return f"share it as {' or '.join(ways)}" if ways else "copy it to memory of cuMemAlloc"


def explained(error: ApiError, memory: MemoryKind) -> ApiError:
    """What INVALID_VALUE of cuIpcGetMemHandle means: that this kind of memory has no such handle, where that was
    measured; any other error as it is.
    """
    if error.status != _INVALID_VALUE or ShareKind.IPC in ways_of(memory):
        return error
    return Unsupported(
        api=error.api,
        operation=error.operation,
        status=error.status,
        status_name=error.status_name,
        arguments=error.arguments,
        reason=Reason.NOT_SUPPORTED,
        what_to_do=advice(memory),
        detail=f"{memory.value} memory has no IPC handle",
    )
