"""Table of the export methods that each kind of device memory supports, as measured.

Every row was measured on an H200 with driver 580 (CUDA 13.0). The code always calls the driver. The table only explains
its errors, and the test suites repeat the measurement of every row.
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
    """The driver's result for one kind of memory and one export method.

    Attributes
    ----------
    memory : MemoryKind
        The kind of memory.
    way : ShareKind
        The export method.
    part : str
        The exported part: ``whole``. For a dma-buf also ``page`` (from the second 4 KiB page on), ``odd_address``,
        ``odd_length`` and ``pcie`` (whole, with CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, flag 1).
    status : int
        The CUresult that the driver returned.
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
    """Return the export methods that worked for this kind of memory; none if the table has no rows of it."""
    return tuple(row.way for row in EXPORTS if row.memory is memory and row.part == "whole" and row.status == _SUCCESS)


def advice(memory: MemoryKind) -> str:
    """Return what the user can do instead for this kind of memory."""
    if memory is MemoryKind.CUDA_IMPORTED:
        return "let the process that allocated it share it"
    ways = [way.name for way in ways_of(memory)]
    return f"share it as {' or '.join(ways)}" if ways else "copy it to memory of cuMemAlloc"


def explained(error: ApiError, memory: MemoryKind) -> ApiError:
    """Return a clearer error for INVALID_VALUE of cuIpcGetMemHandle, or any other error unchanged.

    For the kinds of memory where this was measured, INVALID_VALUE means that such memory has no IPC handle.
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
