"""Mapping of the errnos of libibverbs to exceptions, reasons and advice.

Besides the errno and the failed call, the mapping uses only RLIMIT_MEMLOCK, which can explain an ENOMEM. Sources of the
errnos: ``drivers/infiniband/core`` of Linux, and ``libibverbs`` (manual pages ibv_reg_mr, ibv_open_device).
"""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, SetupMissing, Unsupported, errno_name
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEVICE_LIST", "OPEN_DEVICE", "REG_ADDRESS", "REG_DMABUF_MR", "REG_MR", "error_of"]

DEVICE_LIST = "ibv_get_device_list"
OPEN_DEVICE = "ibv_open_device"
REG_MR = "ibv_reg_mr"
REG_DMABUF_MR = "ibv_reg_dmabuf_mr"

# ibv_reg_mr of a device address. This name distinguishes it from ibv_reg_mr of host memory, because EFAULT for
# a device address means that no kernel driver knows the address.
REG_ADDRESS = "ibv_reg_mr(device address)"

_ENOTSUPP = 524  # ENOTSUPP is internal to the kernel. NVIDIA's dma-buf returns it if the NIC cannot access the GPU.

_DMABUF_UNSUPPORTED_ERRNOS = frozenset({errno.EOPNOTSUPP, errno.EPROTONOSUPPORT, _ENOTSUPP})

_REASON_BY_ERRNO = {
    errno.EINVAL: Reason.BAD_ARGUMENT,
    errno.EBADF: Reason.BAD_DESCRIPTOR,
    errno.ENOMEM: Reason.OUT_OF_MEMORY,
    errno.EOPNOTSUPP: Reason.NOT_SUPPORTED,
    errno.ENOSYS: Reason.NOT_SUPPORTED,
    errno.EPROTONOSUPPORT: Reason.NOT_SUPPORTED,
    errno.ENODEV: Reason.NO_DEVICE,
    errno.ENXIO: Reason.NO_DEVICE,
    errno.ETIMEDOUT: Reason.TIMEOUT,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
}


def error_of(
    *,
    operation: str,
    error_number: int | None,
    arguments: Mapping[str, object],
    detail: str = "",
    pinned_bytes: int = 0,
) -> ApiError:
    """Return the exception for an errno.

    Parameters
    ----------
    operation : str
        Name of the function of libibverbs, or :data:`REG_ADDRESS`.
    error_number : int or None
        The errno. None if pyverbs did not keep it.
    arguments : mapping
        The arguments of the call.
    detail : str
        Further details for the message.
    pinned_bytes : int
        Size of the host memory that the call pins, in bytes. If it is above RLIMIT_MEMLOCK, the advice for ENOMEM is to
        raise this limit.
    """
    error_class, reason, what_to_do = _classify(operation, error_number, pinned_bytes)
    return error_class(
        api=Api.VERBS,
        operation=REG_MR if operation == REG_ADDRESS else operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=reason,
        what_to_do=what_to_do,
        detail=detail,
    )


def _classify(operation: str, error_number: int | None, pinned_bytes: int) -> tuple[type[ApiError], Reason, str]:
    """Return the class of the exception, its reason, and what to do."""
    error_class: type[ApiError] = ApiError
    reason = Reason.OTHER if error_number is None else _REASON_BY_ERRNO.get(error_number, Reason.OTHER)
    what_to_do = ""
    if operation == REG_DMABUF_MR and error_number in _DMABUF_UNSUPPORTED_ERRNOS:
        error_class, reason = Unsupported, Reason.DMABUF_REGION_UNSUPPORTED
        what_to_do = "use a NIC whose kernel driver imports dma-bufs (mlx5: Linux 5.12), or load nvidia-peermem"
    elif operation == REG_ADDRESS and error_number == errno.EFAULT:
        error_class, reason = Unsupported, Reason.PEER_MEMORY_UNSUPPORTED
        what_to_do = "load the kernel module nvidia-peermem, or register by dma-buf"
    elif operation in {OPEN_DEVICE, DEVICE_LIST} and error_number in {errno.EACCES, errno.EPERM}:
        error_class = SetupMissing
        what_to_do = "give this user read and write permission for /dev/infiniband/uverbs*"
    elif operation == DEVICE_LIST and error_number == errno.ENOSYS:
        error_class, reason = SetupMissing, Reason.NO_DEVICE
        what_to_do = "load the kernel module ib_uverbs"
    elif operation == DEVICE_LIST and error_number == errno.EINVAL:
        # The function takes no argument that could be wrong. The library refuses its own configuration, and describes
        # the problem on stderr.
        error_class, reason = SetupMissing, Reason.MALFORMED
        what_to_do = "read the error that the library wrote to stderr, and correct what it names"
    elif error_number == errno.ENOMEM and _is_memlock_below(pinned_bytes):
        error_class, reason = SetupMissing, Reason.MEMLOCK_TOO_LOW
        limit_bytes, _hard_limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        what_to_do = (
            f"raise RLIMIT_MEMLOCK (ulimit -l, or LimitMEMLOCK= of the service): it is {format_bytes(limit_bytes)}, "
            f"and this region alone pins {format_bytes(pinned_bytes)}"
        )
    elif error_number in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EPROTONOSUPPORT}:
        error_class = Unsupported
    return error_class, reason, what_to_do


def _is_memlock_below(pinned_bytes: int) -> bool:
    limit_bytes, _hard_limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return pinned_bytes > 0 and limit_bytes != resource.RLIM_INFINITY and limit_bytes < pinned_bytes
