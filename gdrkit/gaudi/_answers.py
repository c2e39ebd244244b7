"""Mapping of the errnos of hl-thunk to reasons and advice.

The library passes on the errnos of the kernel driver.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, Unsupported, errno_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EXPORTS", "error_of"]

EXPORTS = frozenset(
    {"hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd"},
)
_UNMAP, _FREE = "hlthunk_memory_unmap", "hlthunk_device_memory_free"
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_MEANINGS: dict[int, tuple[Reason, str]] = {
    errno.EPERM: (Reason.NO_PERMISSION, "the memory belongs to another context, or importing needs PCI peer-to-peer"),
    errno.ENOENT: (Reason.NO_DEVICE, "check that /dev/accel has a device and that the habanalabs driver is loaded"),
    errno.ENODEV: (Reason.NO_DEVICE, "the device went away, or this process did not open it"),
    errno.EACCES: (Reason.NO_PERMISSION, "give this user read and write permission for /dev/accel/accel*"),
    errno.EBUSY: (Reason.BUSY, "another program has the device, or it is being reset: see hl-smi"),
    errno.EBADF: (Reason.BAD_DESCRIPTOR, ""),
    errno.ENOTTY: (Reason.BAD_DESCRIPTOR, "the descriptor is no compute device of hl-thunk"),
    errno.ENOMEM: (Reason.OUT_OF_MEMORY, "free device memory, or ask for less"),
    errno.EFAULT: (Reason.BAD_ARGUMENT, "the host memory is not mapped and writable"),
    errno.EINVAL: (Reason.BAD_ARGUMENT, ""),
    errno.ETIMEDOUT: (Reason.TIMEOUT, ""),
    errno.EOPNOTSUPP: (Reason.NOT_SUPPORTED, ""),
    errno.ENOSYS: (Reason.NOT_SUPPORTED, ""),
}

# The driver returns EINVAL for many mistakes. For these functions the likely ones are known.
_EINVAL_ADVICE = {
    "hlthunk_device_memory_export_dmabuf_fd": "the address must be a physical one of this device's memory, address and"
    " size multiples of the page, and all of it inside the PCI BAR",
    "hlthunk_device_mapped_memory_export_dmabuf_fd": "the address must be exactly what hlthunk_device_memory_map gave,"
    " size and offset multiples of the page and inside the mapping, flags O_RDWR | O_CLOEXEC",
    _UNMAP: "either nothing is mapped there, or a dma-buf of it, or a region made from one, is still alive somewhere",
    _FREE: "either there is no such memory, it was freed before, or it is still mapped",
    "hlthunk_device_memory_map": "there is no such memory",
}


def error_of(*, operation: str, number: int, arguments: Mapping[str, object], detail: str = "") -> ApiError:
    """Return the exception for an errno; :class:`Unsupported` if the driver does not support the operation at all."""
    reason, what_to_do = _MEANINGS.get(number, (Reason.OTHER, ""))
    if number == errno.EINVAL:
        what_to_do = _EINVAL_ADVICE.get(operation, "")
    if operation in EXPORTS and number in _UNSUPPORTED:
        reason = Reason.DMABUF_EXPORT_UNSUPPORTED
        what_to_do = "use a habanalabs driver and a kernel (5.12 or newer) that export dma-bufs"
    if operation == _UNMAP and number == errno.EINVAL:
        reason = Reason.BUSY
    kind = Unsupported if number in _UNSUPPORTED else ApiError
    return kind(
        api=Api.HLTHUNK,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments=arguments,
        reason=reason,
        what_to_do=what_to_do,
        detail=detail,
    )
