"""Table of the export methods that each kind of device memory supports, as measured.

Every row was measured on an H200 with driver 580 (CUDA 13.0), and the test suites measure it again. gdrkit tries every
export that a user requests, even if the table says that it fails. The table only explains the errors of the driver.
"""

from __future__ import annotations

from typing import NamedTuple

from gdrkit.buffers import MemoryKind
from gdrkit.errors import ApiError, Reason, Unsupported
from gdrkit.registration.handle import ShareKind

__all__ = ["EXPORTS", "ExportRow", "explain_export_error", "export_methods", "sharing_advice"]

# The CUresult values of the table.
_SUCCESS = 0
_INVALID_VALUE = 1
_NOT_SUPPORTED = 801


class ExportRow(NamedTuple):
    """The driver's result for one kind of memory and one export method.

    Attributes
    ----------
    memory : MemoryKind
        The kind of memory.
    method : ShareKind
        The export method.
    part : str
        The exported part: ``whole`` is all of the memory, ``page`` begins at its second 4 KiB page. The address of
        ``odd_address`` and the length of ``odd_length`` are not multiples of 4 KiB. ``pcie`` is all of the memory, with
        the flag CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE.
    status : int
        The CUresult that the driver returned.
    """

    memory: MemoryKind
    method: ShareKind
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


def export_methods(memory: MemoryKind) -> tuple[ShareKind, ...]:
    """Return the methods that can export a whole memory of this kind. The tuple is empty if no method can."""
    return tuple(
        row.method for row in EXPORTS if row.memory is memory and row.part == "whole" and row.status == _SUCCESS
    )


def sharing_advice(memory: MemoryKind) -> str:
    """Return what the user can do if an export of this kind of memory is refused."""
    if memory is MemoryKind.CUDA_IMPORTED:
        return "let the process that allocated the memory share it"
    methods = [method.name for method in export_methods(memory)]
    return f"share it as {' or '.join(methods)}" if methods else "copy it to memory of cuMemAlloc"


def explain_export_error(error: ApiError, memory: MemoryKind) -> ApiError:
    """Return a clearer error for INVALID_VALUE of cuIpcGetMemHandle. Return any other error unchanged.

    INVALID_VALUE means that this kind of memory has no IPC handle, unless the table says that it has one.
    """
    if error.status != _INVALID_VALUE or ShareKind.IPC in export_methods(memory):
        return error
    return Unsupported(
        api=error.api,
        operation=error.operation,
        status=error.status,
        status_name=error.status_name,
        arguments=error.arguments,
        reason=Reason.NOT_SUPPORTED,
        what_to_do=sharing_advice(memory),
        detail=f"{memory.value} memory has no IPC handle",
    )
