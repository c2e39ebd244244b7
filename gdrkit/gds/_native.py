"""Access to the native copy engine, and conversion of its errors to the errors of gdrkit.

The native module ``_engine`` (``native/engine``) is imported at the first use. The module loads libcuda when a device
is first used, so transfers of host memory need no libcuda.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from gdrkit.errors import Api, ApiError, Reason, SetupMissing, errno_name
from gdrkit.loader import LazyModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gdrkit.gds import _engine as native
else:
    native = LazyModule("gdrkit.gds._engine")

__all__ = ["Failure", "api_error", "call_native", "native", "reason_of"]

# A failed call, as the engine reports it: (API, function, errno or CUresult, name of the CUresult).
Failure = tuple[str, str, int, str]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_CUDA_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
# CUDA_ERROR_NO_DEVICE and CUDA_ERROR_INVALID_DEVICE.
_CUDA_NO_DEVICE_STATUSES = frozenset({100, 101})
_REASON_BY_ERRNO = {
    errno.ENOENT: Reason.BAD_ARGUMENT,
    errno.EISDIR: Reason.BAD_ARGUMENT,
    errno.EINVAL: Reason.BAD_ARGUMENT,
    errno.EBADF: Reason.BAD_DESCRIPTOR,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
    errno.EROFS: Reason.NO_PERMISSION,
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.NO_SPACE,
    errno.EIO: Reason.IO_ERROR,
    errno.ENOMEM: Reason.OUT_OF_MEMORY,
    errno.ESHUTDOWN: Reason.CLOSED,
    errno.EDEADLK: Reason.BUSY,
}
_ADVICE_BY_ERRNO = {
    errno.ENOSPC: "free space on the file system, or write to another one",
    errno.EDQUOT: "free space within the quota, or write to another file system",
    errno.EIO: "see the kernel log: a disk or the server of a network file system failed",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOENT: "check the path",
    errno.EDEADLK: "do not close the file in a signal handler or a finalizer that can interrupt a use of the file",
}


def call_native(
    function: Callable[_Parameters, _Result], /, *arguments: _Parameters.args, **keywords: _Parameters.kwargs
) -> _Result:
    """Call a function of the engine and return its result. Raise its EngineError as an :class:`ApiError`."""
    try:
        return function(*arguments, **keywords)
    except native.EngineError as error:
        raise api_error(error.args) from error


def reason_of(error_number: int) -> Reason:
    """Return the reason for an errno of a file operation."""
    return _REASON_BY_ERRNO.get(error_number, Reason.OTHER)


def api_error(
    failure: Failure,
    *,
    arguments: Mapping[str, object] | None = None,
    error_class: type[ApiError] = ApiError,
    detail: str = "",
) -> ApiError:
    """Return the exception for a failure of the engine, or of a job by cuFile.

    Parameters
    ----------
    failure : tuple
        The failed call, as in :data:`Failure`.
    arguments : mapping or None
        Arguments of the failed operation, with units in the keys.
    error_class : type
        The class of the exception. A missing driver is always a :class:`SetupMissing`.
    detail : str
        Text that the error message adds to the failed call.
    """
    api, operation, status, status_name = failure
    if api == "kernel":
        # The engine loads libcuda with dlopen. ENOSYS: the library lacks a function that the engine needs.
        is_driver_missing = operation == "dlopen" or status == errno.ENOSYS
        return (SetupMissing if is_driver_missing else error_class)(
            api=Api.LOADER if is_driver_missing else Api.KERNEL,
            operation="dlopen libcuda.so.1" if operation == "dlopen" else operation,
            status=status,
            status_name=errno_name(status),
            errno=status,
            arguments=arguments,
            reason=Reason.LIBRARY_MISSING if is_driver_missing else reason_of(status),
            what_to_do="install the NVIDIA driver" if is_driver_missing else _ADVICE_BY_ERRNO.get(status, ""),
            detail=detail,
        )
    if api == "cufile":
        return error_class(
            api=Api.CUFILE,
            operation=operation,
            status=status,
            status_name=status_name,
            arguments=arguments,
            reason=Reason.IO_ERROR,
            what_to_do="see cufile.log, or open the file with direct='never'",
            detail=detail,
        )
    # The API is CUDA, and `status` is a CUresult.
    reason, advice = Reason.OTHER, ""
    if status == _CUDA_OUT_OF_MEMORY:
        reason, advice = Reason.OUT_OF_MEMORY, "free device memory, or allow more pinned memory (RLIMIT_MEMLOCK)"
    elif status in _CUDA_NO_DEVICE_STATUSES:
        reason, advice = Reason.NO_DEVICE, "check that nvidia-smi lists the GPU"
    return error_class(
        api=Api.CUDA,
        operation=operation,
        status=status,
        status_name=status_name,
        arguments=arguments,
        reason=reason,
        what_to_do=advice,
        detail=detail,
    )
