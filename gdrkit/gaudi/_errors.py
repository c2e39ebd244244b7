"""Conversion of an errno of hl-thunk to the exception of gdrkit, with a reason and advice.

hl-thunk returns the errnos of the kernel driver (habanalabs).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, Unsupported, errno_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPORT_FUNCTIONS", "error_of"]

EXPORT_FUNCTIONS = frozenset(
    {"hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd"},
)
_UNMAP_FUNCTION, _FREE_FUNCTION = "hlthunk_memory_unmap", "hlthunk_device_memory_free"
_UNSUPPORTED_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_REASON_AND_ADVICE_BY_ERRNO: dict[int, tuple[Reason, str]] = {
    errno.EPERM: (
        Reason.NO_PERMISSION,
        "the memory belongs to another context, or the importing device has no PCI peer-to-peer path to this device",
    ),
    errno.ENOENT: (Reason.NO_DEVICE, "check that /dev/accel has a device and that the habanalabs driver is loaded"),
    errno.ENODEV: (Reason.NO_DEVICE, "the device was removed, or this process did not open it"),
    errno.EACCES: (Reason.NO_PERMISSION, "give this user read and write permission for /dev/accel/accel*"),
    errno.EBUSY: (Reason.BUSY, "another program has the device, or it is being reset: see hl-smi"),
    errno.EBADF: (Reason.BAD_DESCRIPTOR, ""),
    errno.ENOTTY: (Reason.BAD_DESCRIPTOR, "the descriptor must be a compute device that hl-thunk has opened"),
    errno.ENOMEM: (Reason.OUT_OF_MEMORY, "free device memory, or request less"),
    errno.EFAULT: (Reason.BAD_ARGUMENT, "the host memory must be mapped and writable"),
    errno.EINVAL: (Reason.BAD_ARGUMENT, ""),
    errno.ETIMEDOUT: (Reason.TIMEOUT, ""),
    errno.EOPNOTSUPP: (Reason.NOT_SUPPORTED, ""),
    errno.ENOSYS: (Reason.NOT_SUPPORTED, ""),
}

# The driver returns EINVAL for many mistakes. The advice for these functions names the likely ones.
_EINVAL_ADVICE = {
    "hlthunk_device_memory_export_dmabuf_fd": "address and size must be multiples of the page, and"
    " the range must be physical memory of this device inside the PCI BAR",
    "hlthunk_device_mapped_memory_export_dmabuf_fd": "the address must be the result of hlthunk_device_memory_map,"
    " size and offset must be multiples of the page and inside the mapping, and flags must be O_RDWR | O_CLOEXEC",
    _UNMAP_FUNCTION: "either nothing is mapped at the address, or a dma-buf of the memory (or a region from it)"
    " is still alive",
    _FREE_FUNCTION: "the memory does not exist, was already freed, or is still mapped",
    "hlthunk_device_memory_map": "the memory of this handle does not exist",
}


def error_of(*, operation: str, error_number: int, arguments: Mapping[str, object], detail: str = "") -> ApiError:
    """Return the exception for an errno; :class:`Unsupported` if the driver does not support the operation at all."""
    reason, what_to_do = _REASON_AND_ADVICE_BY_ERRNO.get(error_number, (Reason.OTHER, ""))
    if error_number == errno.EINVAL:
        what_to_do = _EINVAL_ADVICE.get(operation, "")
    if operation in EXPORT_FUNCTIONS and error_number in _UNSUPPORTED_ERRNOS:
        reason = Reason.DMABUF_EXPORT_UNSUPPORTED
        what_to_do = "use a habanalabs driver and a kernel (5.12 or newer) that export dma-bufs"
    # The usual cause of EINVAL from an unmap is a dma-buf of the memory that is still open.
    if operation == _UNMAP_FUNCTION and error_number == errno.EINVAL:
        reason = Reason.BUSY
    error_type = Unsupported if error_number in _UNSUPPORTED_ERRNOS else ApiError
    return error_type(
        api=Api.HLTHUNK,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=reason,
        what_to_do=what_to_do,
        detail=detail,
    )
