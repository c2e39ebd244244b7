"""The calls of libnccl through ctypes. Only this file opens the library.

If the process has already loaded a libnccl (torch loads one), the calls go to that library. Otherwise, the dynamic
loader searches for libnccl.so.2; if there is none, this module opens the one of the Python package nvidia-nccl. NCCL
reads its environment variables at its first call.

Source: ``nccl.h`` of NCCL 2.28 and 2.32.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
from ctypes import POINTER, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import loader
from gdrkit.errors import Api, ApiError, Reason, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ARGUMENT_TYPES",
    "STATUS_NAMES",
    "UNIQUE_ID_BYTES",
    "UniqueId",
    "allocate",
    "call",
    "create_communicator",
    "find_package_folder",
    "get_async_status",
    "get_unique_id",
    "get_version_code",
    "load",
    "make_error",
    "register",
]

_NCCL_SONAME = "libnccl.so.2"
_LOAD_OPERATION = f"dlopen {_NCCL_SONAME}"
_INSTALL_ADVICE = (
    "install NCCL (pip install nvidia-nccl-cu13, or the package libnccl2), or put its folder on LD_LIBRARY_PATH"
)
# Size of an ncclUniqueId (NCCL_UNIQUE_ID_BYTES).
UNIQUE_ID_BYTES = 128
# Names of the values of ncclResult_t, from 0.
STATUS_NAMES = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
_REASON_BY_STATUS_NAME = {
    "ncclInvalidArgument": Reason.BAD_ARGUMENT,
    "ncclInvalidUsage": Reason.BAD_ARGUMENT,
    "ncclRemoteError": Reason.PEER_GONE,
    "ncclInProgress": Reason.BUSY,
    "ncclTimeout": Reason.TIMEOUT,
}
_LOG_ADVICE = "set NCCL_DEBUG=INFO and read the log of NCCL"


class UniqueId(ctypes.Structure):
    """ncclUniqueId: the identity of a communicator, by which its ranks find each other. NCCL takes it by value."""

    _fields_ = (("internal", ctypes.c_uint8 * UNIQUE_ID_BYTES),)


# Argument types of the functions of NCCL. Without them, ctypes would truncate addresses to 32 bits.
ARGUMENT_TYPES: Mapping[str, tuple[type, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommRegister": (c_void_p, c_void_p, c_size_t, POINTER(c_void_p)),
    "ncclCommDeregister": (c_void_p, c_void_p),
    "ncclMemAlloc": (POINTER(c_void_p), c_size_t),
    "ncclMemFree": (c_void_p,),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}
# The first version of NCCL that has the function. Functions that are not listed exist since 2.0.
_VERSION_MIN_BY_FUNCTION = {
    "ncclCommRegister": "2.19",
    "ncclCommDeregister": "2.19",
    "ncclMemAlloc": "2.19",
    "ncclMemFree": "2.19",
}


@functools.cache
def load() -> ctypes.CDLL:
    """Open libnccl and return it. Later calls return the same library.

    Raises
    ------
    SetupMissing
        The library is missing, damaged or built for another processor.
    """
    loader.check_library(_NCCL_SONAME, operation=_LOAD_OPERATION)
    try:
        return ctypes.CDLL(_NCCL_SONAME)
    except OSError as error:
        loader_error = loader.setup_missing(
            operation=_LOAD_OPERATION, text=str(error), what_to_do=_INSTALL_ADVICE, default_errno=errno.ENOENT
        )
        folder = find_package_folder()
        if loader_error.errno != errno.ENOENT or folder is None:
            raise loader_error from error
    path = folder / "lib" / _NCCL_SONAME
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise loader.setup_missing(
            operation=f"dlopen {path}", text=str(error), what_to_do=_INSTALL_ADVICE, default_errno=errno.ENOEXEC
        ) from error


def find_package_folder() -> Path | None:
    """Return the folder of the Python package nvidia-nccl, or None if it is not installed or has no libnccl."""
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = [] if package is None else [Path(location) for location in package.submodule_search_locations or []]
    return next((folder for folder in folders if (folder / "lib" / _NCCL_SONAME).exists()), None)


def get_version_code() -> int:
    """Call ncclGetVersion and return the version in the form of NCCL_VERSION_CODE: 22809 for 2.28.9."""
    version = c_int()
    call("ncclGetVersion", ctypes.byref(version))
    return version.value


def get_unique_id() -> bytes:
    """Call ncclGetUniqueId and return the bytes of the new ncclUniqueId."""
    identity = UniqueId()
    call("ncclGetUniqueId", ctypes.byref(identity))
    return bytes(identity)


def create_communicator(*, rank: int, ranks_count: int, identity: bytes) -> int:
    """Call ncclCommInitRank and return the ncclComm_t."""
    communicator_handle = c_void_p()
    call(
        "ncclCommInitRank",
        ctypes.byref(communicator_handle),
        ranks_count,
        UniqueId.from_buffer_copy(identity),
        rank,
        rank=rank,
        nranks=ranks_count,
    )
    return communicator_handle.value or 0


def get_async_status(communicator: int) -> int:
    """Call ncclCommGetAsyncError and return the status of earlier operations, an ncclResult_t; 0 if none failed."""
    status = c_int()
    call("ncclCommGetAsyncError", communicator, ctypes.byref(status))
    return status.value


def register(communicator: int, address: int, length_bytes: int) -> int:
    """Call ncclCommRegister and return the handle; 0 if NCCL registered nothing."""
    handle = c_void_p()
    arguments = (communicator, address, length_bytes, ctypes.byref(handle))
    call("ncclCommRegister", *arguments, buff=address, size=length_bytes)
    return handle.value or 0


def allocate(length_bytes: int) -> int:
    """Call ncclMemAlloc for the current CUDA device and return the address of the memory."""
    address = c_void_p()
    call("ncclMemAlloc", ctypes.byref(address), length_bytes, size=length_bytes)
    return address.value or 0


def call(name: str, /, *arguments: object, **error_arguments: object) -> None:
    """Call a function of NCCL, and raise an error unless it returns ncclSuccess.

    Parameters
    ----------
    name : str
        Name of the function.
    *arguments : object
        Its arguments.
    **error_arguments : object
        Names and values of the arguments that the error names, if the call fails.

    Raises
    ------
    ApiError
        The call failed. Its ``detail`` is the last message of NCCL.
    Unsupported
        This version of NCCL does not have the function.
    SetupMissing
        The library cannot be used.
    """
    library = load()
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise Unsupported(
            api=Api.NCCL,
            operation=name,
            status=None,
            status_name="no such function",
            arguments=error_arguments,
            reason=Reason.NOT_SUPPORTED,
            what_to_do=f"install NCCL {_VERSION_MIN_BY_FUNCTION.get(name, '2.0')} or newer",
        ) from error
    function.argtypes, function.restype = ARGUMENT_TYPES[name], c_int
    if status := function(*arguments):
        raise make_error(name, status, error_arguments)


def make_error(name: str, status: int, error_arguments: Mapping[str, object]) -> ApiError:
    """Return the exception for the call `name` that failed with `status`, an ncclResult_t.

    The ``detail`` of the exception is the last error message of NCCL.
    """
    get_last_error = load().ncclGetLastError
    get_last_error.argtypes, get_last_error.restype = (c_void_p,), ctypes.c_char_p
    status_name = STATUS_NAMES[status] if 0 <= status < len(STATUS_NAMES) else f"ncclResult_t {status}"
    return ApiError(
        api=Api.NCCL,
        operation=name,
        status=status,
        status_name=status_name,
        arguments=error_arguments,
        reason=_REASON_BY_STATUS_NAME.get(status_name, Reason.OTHER),
        what_to_do=_LOG_ADVICE,
        detail=(get_last_error(None) or b"").decode(errors="replace").strip(),
    )
