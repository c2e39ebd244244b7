"""Mapping of CUresult values to reasons and advice.

Source of the numbers: ``cuda.h``, enum ``cudaError_enum``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "INVALID_VALUE",
    "NOT_READY",
    "NOT_SUPPORTED",
    "NO_DEVICE",
    "OPERATING_SYSTEM",
    "PEER_ACCESS_ALREADY_ENABLED",
    "UNKNOWN",
    "error_of",
]

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
DEINITIALIZED = 4
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
CONTEXT_IS_DESTROYED = 709
OPERATING_SYSTEM = 304
INVALID_HANDLE = 400
NOT_FOUND = 500
NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
UNKNOWN = 999

_REASONS_AND_ADVICE: dict[int, tuple[Reason, str]] = {
    INVALID_VALUE: (Reason.BAD_ARGUMENT, ""),
    OUT_OF_MEMORY: (Reason.OUT_OF_MEMORY, "free device memory, or ask for less"),
    DEINITIALIZED: (Reason.CLOSED, "the driver is shutting down: close everything before the interpreter exits"),
    NO_DEVICE: (Reason.NO_DEVICE, "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it"),
    INVALID_DEVICE: (Reason.NO_DEVICE, "cuda.device_count() returns the number of devices"),
    INVALID_CONTEXT: (Reason.BAD_ARGUMENT, ""),
    CONTEXT_IS_DESTROYED: (Reason.CLOSED, "the device's primary context was reset by other code of this process"),
    INVALID_HANDLE: (Reason.BAD_ARGUMENT, ""),
    NOT_FOUND: (Reason.NOT_SUPPORTED, "update the NVIDIA driver"),
    NOT_PERMITTED: (Reason.NO_PERMISSION, ""),
    NOT_SUPPORTED: (Reason.NOT_SUPPORTED, ""),
}

# If this driver function returns NOT_SUPPORTED, the driver or the device cannot export dma-bufs at all.
_DMABUF_EXPORT_FUNCTION = "cuMemGetHandleForAddressRange"
_DMABUF_EXPORT_ADVICE = (
    "load the open NVIDIA kernel modules (CUDA 11.7 or newer, Linux 5.12 or newer), or use nvidia-peermem"
)


def error_of(
    *, operation: str, status: int, status_name: str, arguments: Mapping[str, object], detail: str = ""
) -> ApiError:
    """Return the exception for a CUresult that is not success: Unsupported for NOT_SUPPORTED, otherwise ApiError."""
    reason, what_to_do = _REASONS_AND_ADVICE.get(status, (Reason.OTHER, ""))
    if operation == _DMABUF_EXPORT_FUNCTION and status == NOT_SUPPORTED:
        reason, what_to_do = Reason.DMABUF_EXPORT_UNSUPPORTED, _DMABUF_EXPORT_ADVICE
    error_class = Unsupported if status == NOT_SUPPORTED else ApiError
    return error_class(
        api=Api.CUDA,
        operation=operation,
        status=status,
        status_name=status_name,
        arguments=arguments,
        reason=reason,
        what_to_do=what_to_do,
        detail=detail,
    )
