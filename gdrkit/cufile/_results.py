"""Conversion of the results of libcufile (CUfileOpError or errno) to exceptions with a name, a reason and advice.

Source of the numbers: enum ``CUfileOpError`` in ``cufile.h`` of cuFile 1.20.
"""

from __future__ import annotations

import errno as _errno
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, Unsupported, errno_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "HANDLE_NOT_REGISTERED",
    "STATUS_NAMES",
    "error_of",
    "make_batch_status_error",
    "make_errno_error",
    "make_missing_function_error",
    "make_result_error",
]

SUCCESS = 0
DRIVER_NOT_INITIALIZED = 5001
PLATFORM_NOT_SUPPORTED = 5007
IO_NOT_SUPPORTED = 5008
CUDA_DRIVER_ERROR = 5011
CUDA_MEMORY_TYPE_INVALID = 5013
INVALID_FILE_TYPE = 5018
INVALID_FILE_OPEN_FLAG = 5019
DIO_NOT_SET = 5020
INVALID_VALUE = 5022
PERMISSION_DENIED = 5025
HANDLE_NOT_REGISTERED = 5027
ASYNC_NOT_SUPPORTED = 5038

# Names of the numbers from 5001 on. "-" stands for a number that the header does not define.
_NAMES_IN_ORDER = [
    "DRIVER_NOT_INITIALIZED",
    "DRIVER_INVALID_PROPS",
    "DRIVER_UNSUPPORTED_LIMIT",
    "DRIVER_VERSION_MISMATCH",
    "DRIVER_VERSION_READ_ERROR",
    "DRIVER_CLOSING",
    "PLATFORM_NOT_SUPPORTED",
    "IO_NOT_SUPPORTED",
    "DEVICE_NOT_SUPPORTED",
    "NVFS_DRIVER_ERROR",
    "CUDA_DRIVER_ERROR",
    "CUDA_POINTER_INVALID",
    "CUDA_MEMORY_TYPE_INVALID",
    "CUDA_POINTER_RANGE_ERROR",
    "CUDA_CONTEXT_MISMATCH",
    "INVALID_MAPPING_SIZE",
    "INVALID_MAPPING_RANGE",
    "INVALID_FILE_TYPE",
    "INVALID_FILE_OPEN_FLAG",
    "DIO_NOT_SET",
    "-",
    "INVALID_VALUE",
    "MEMORY_ALREADY_REGISTERED",
    "MEMORY_NOT_REGISTERED",
    "PERMISSION_DENIED",
    "DRIVER_ALREADY_OPEN",
    "HANDLE_NOT_REGISTERED",
    "HANDLE_ALREADY_REGISTERED",
    "DEVICE_NOT_FOUND",
    "INTERNAL_ERROR",
    "GETNEWFD_FAILED",
    "-",
    "NVFS_SETUP_ERROR",
    "IO_DISABLED",
    "BATCH_SUBMIT_FAILED",
    "GPU_MEMORY_PINNING_FAILED",
    "BATCH_FULL",
    "ASYNC_NOT_SUPPORTED",
    "INTERNAL_BATCH_SETUP_ERROR",
    "INTERNAL_BATCH_SUBMIT_ERROR",
    "INTERNAL_BATCH_GETSTATUS_ERROR",
    "INTERNAL_BATCH_CANCEL_ERROR",
    "NOMEM_ERROR",
    "IO_ERROR",
    "INTERNAL_BUF_REGISTER_ERROR",
    "HASH_OPR_ERROR",
    "INVALID_CONTEXT_ERROR",
    "NVFS_INTERNAL_DRIVER_ERROR",
    "BATCH_NOCOMPAT_ERROR",
    "IO_MAX_ERROR",
]
_STATUS_BASE = 5000
STATUS_NAMES: Mapping[int, str] = {
    number: f"CU_FILE_{name}" for number, name in enumerate(_NAMES_IN_ORDER, start=_STATUS_BASE + 1) if name != "-"
}

_CUDA_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_CONTEXT_ADVICE = "make a CUDA context current in the calling thread"
# Advice if cuFileDriverOpen fails with DRIVER_NOT_INITIALIZED. In cuFile 1.15 and 1.20, this means that there is no
# direct path and that compat mode is not allowed.
_DIRECT_PATH_ADVICE = "load nvidia-fs or set up PCI P2PDMA, or allow compat mode (allow_compat_mode in cufile.json)"
_UDEV_ADVICE = (
    "check whether the file is on tmpfs or udev's database is missing; gdrkit.cufile.obstacles reports the cause"
)

_REASON_AND_ADVICE_BY_STATUS: dict[int, tuple[Reason, str]] = {
    DRIVER_NOT_INITIALIZED: (Reason.CLOSED, "open the driver first"),
    5006: (Reason.BUSY, "wait until the driver is closed"),  # DRIVER_CLOSING
    PLATFORM_NOT_SUPPORTED: (Reason.NOT_SUPPORTED, ""),
    IO_NOT_SUPPORTED: (Reason.NOT_SUPPORTED, "allow compat mode, or put the file where a direct path exists"),
    5009: (Reason.NOT_SUPPORTED, ""),  # DEVICE_NOT_SUPPORTED
    CUDA_DRIVER_ERROR: (Reason.OTHER, "see the CUresult (cu_err) for the error of the CUDA driver"),
    5012: (Reason.NOT_DEVICE_MEMORY, ""),  # CUDA_POINTER_INVALID
    CUDA_MEMORY_TYPE_INVALID: (Reason.NOT_DEVICE_MEMORY, ""),
    5014: (Reason.BAD_ARGUMENT, "stay inside the allocation"),  # CUDA_POINTER_RANGE_ERROR
    5016: (Reason.OUT_OF_MEMORY, "raise max_device_pinned_mem_size_kb, or register less"),  # INVALID_MAPPING_SIZE
    5017: (Reason.BAD_ARGUMENT, "stay inside the registered buffer"),  # INVALID_MAPPING_RANGE
    INVALID_FILE_TYPE: (Reason.BAD_ARGUMENT, "only regular files can be registered"),
    INVALID_FILE_OPEN_FLAG: (Reason.BAD_ARGUMENT, "open the file with O_DIRECT"),
    DIO_NOT_SET: (Reason.BAD_ARGUMENT, "open the file with O_DIRECT"),
    INVALID_VALUE: (Reason.BAD_ARGUMENT, ""),
    5023: (Reason.BUSY, "deregister the memory first; it is already registered"),  # MEMORY_ALREADY_REGISTERED
    5024: (Reason.BAD_ARGUMENT, "register the memory first"),  # MEMORY_NOT_REGISTERED
    PERMISSION_DENIED: (Reason.NO_PERMISSION, ""),
    5026: (Reason.BUSY, "set the parameter while the driver is closed"),  # DRIVER_ALREADY_OPEN
    HANDLE_NOT_REGISTERED: (Reason.NOT_SUPPORTED, _UDEV_ADVICE),
    5028: (Reason.BUSY, "use the existing handle; this descriptor is already registered"),  # HANDLE_ALREADY_REGISTERED
    5029: (Reason.NO_DEVICE, ""),  # DEVICE_NOT_FOUND
    # NVFS_SETUP_ERROR
    5033: (Reason.LIBRARY_MISSING, "load libcuda.so.1 first, and nvidia-fs if direct transfers need it"),
    5034: (Reason.NOT_SUPPORTED, "enable direct transfers for this file in cufile.json"),  # IO_DISABLED
    5036: (Reason.OUT_OF_MEMORY, "register less, or free device memory"),  # GPU_MEMORY_PINNING_FAILED
    5037: (Reason.BUSY, "fetch the results of the submitted transfers first"),  # BATCH_FULL
    ASYNC_NOT_SUPPORTED: (Reason.NOT_SUPPORTED, ""),
    5043: (Reason.OUT_OF_MEMORY, ""),  # NOMEM_ERROR
}
# 5009 is DEVICE_NOT_SUPPORTED.
_UNSUPPORTED_STATUSES = frozenset({PLATFORM_NOT_SUPPORTED, IO_NOT_SUPPORTED, 5009, ASYNC_NOT_SUPPORTED})

_REASON_BY_ERRNO = {
    _errno.EACCES: Reason.NO_PERMISSION,
    _errno.EPERM: Reason.NO_PERMISSION,
    _errno.EBADF: Reason.BAD_DESCRIPTOR,
    _errno.EINVAL: Reason.BAD_ARGUMENT,
    _errno.ENOMEM: Reason.OUT_OF_MEMORY,
}


def error_of(
    *, operation: str, status: int, cuda_status: int | None = None, arguments: Mapping[str, object]
) -> ApiError:
    """Return the exception for a CUfileOpError: ``Unsupported`` if the machine or the file cannot support the call.

    `cuda_status` is the CUresult of the error. The exception shows it as the argument ``cu_err``.
    """
    reason, what_to_do = _REASON_AND_ADVICE_BY_STATUS.get(status, (Reason.OTHER, ""))
    if cuda_status == _CUDA_INVALID_CONTEXT:
        what_to_do = _CONTEXT_ADVICE
    if (operation, status) == ("cuFileDriverOpen", DRIVER_NOT_INITIALIZED):
        reason, what_to_do = Reason.NOT_SUPPORTED, _DIRECT_PATH_ADVICE
    error_class = Unsupported if status in _UNSUPPORTED_STATUSES else ApiError
    return error_class(
        api=Api.CUFILE,
        operation=operation,
        status=status,
        status_name=STATUS_NAMES.get(status, f"CUfileOpError {status}"),
        arguments=dict(arguments) | ({"cu_err": cuda_status} if cuda_status else {}),
        reason=reason,
        what_to_do=what_to_do,
    )


def make_result_error(*, operation: str, result: int, arguments: Mapping[str, object]) -> ApiError:
    """Return the exception for the negative result of a transfer: a negative CUfileOpError, or a negative errno."""
    if result < -_STATUS_BASE:
        return error_of(operation=operation, status=-result, arguments=arguments)
    return make_errno_error(operation=operation, error_number=-result, arguments=arguments)


def make_errno_error(*, operation: str, error_number: int, arguments: Mapping[str, object]) -> ApiError:
    """Return the exception for a call that failed with an errno."""
    return ApiError(
        api=Api.CUFILE,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=_REASON_BY_ERRNO.get(error_number, Reason.OTHER),
        # Without a current CUDA context, an asynchronous call cannot allocate memory and fails with ENOMEM.
        what_to_do=_CONTEXT_ADVICE if error_number == _errno.ENOMEM and operation.endswith("Async") else "",
    )


def make_batch_status_error(*, operation: str, status_name: str, arguments: Mapping[str, object]) -> ApiError:
    """Return the exception for a transfer in a batch whose status is an error, although its result is not negative."""
    return ApiError(
        api=Api.CUFILE,
        operation=operation,
        status=None,
        status_name=status_name,
        arguments=arguments,
        reason=Reason.IO_ERROR,
    )


def make_missing_function_error(operation: str, *, version: str, since: str) -> Unsupported:
    """Return the exception for a call that this version of libcufile does not have."""
    return Unsupported(
        api=Api.CUFILE,
        operation=operation,
        status=None,
        status_name="no such function",
        arguments={"version": version},
        reason=Reason.NOT_SUPPORTED,
        what_to_do=f"install cuFile {since} or newer",
    )
