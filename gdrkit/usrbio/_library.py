"""The client library of hf3fs: gdrkit's own, or the library that GDRKIT_USRBIO_LIBRARY names.

Only this file imports the native module ``gdrkit.usrbio._hf3fs``. The first call of :func:`native` opens the
library, which then stays open. The native module looks up each function of the library by name, because the libraries
of released versions of 3FS have no functions for device memory.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit.errors import Api, ApiError, ClosedResource, GdrkitError, Reason, Unsupported, UsageError, errno_name
from gdrkit.loader import check_library, import_native, setup_missing

if TYPE_CHECKING:
    from gdrkit.usrbio.native_types import NativeModule

__all__ = ["LIBRARY_VARIABLE", "UsrbioError", "UsrbioUnsupported", "capabilities", "library_path", "native"]

LIBRARY_VARIABLE = "GDRKIT_USRBIO_LIBRARY"

_GDRKIT_LIBRARY = Path(__file__).resolve().parent / "lib" / "libhf3fs_api_shared.so"
_lock = threading.Lock()
# The native module, once it has opened the library. The list is empty before.
_opened_modules: list[NativeModule] = []

_REASON_BY_ERRNO = {
    errno.EINVAL: Reason.BAD_ARGUMENT,
    errno.EBADF: Reason.BAD_DESCRIPTOR,
    errno.EACCES: Reason.NO_PERMISSION,
    errno.EPERM: Reason.NO_PERMISSION,
    errno.ENOMEM: Reason.OUT_OF_MEMORY,
    errno.ENODEV: Reason.NO_DEVICE,
    errno.EOPNOTSUPP: Reason.NOT_SUPPORTED,
    errno.EAGAIN: Reason.BUSY,
    errno.ETIMEDOUT: Reason.TIMEOUT,
    errno.EREMOTEIO: Reason.PEER_GONE,
    errno.EPROTO: Reason.MALFORMED,
}

# Advice for an errno of one function. All other pairs of function and errno use _ADVICE_BY_ERRNO.
_ADVICE_BY_FUNCTION_AND_ERRNO: dict[tuple[str, int], str] = {
    ("hf3fs_prep_io", errno.EAGAIN): "the ring is full: submit, and wait for results",
    ("hf3fs_prep_io", errno.EBADF): "register the descriptor first: register_fd(fd)",
    ("hf3fs_prep_io", errno.EACCES): "open the file for reading if the ring reads, for writing if it writes",
    ("hf3fs_prep_io", errno.EINVAL): "transfer at least 1 byte inside one block of an iovec, in the ring's direction",
    ("hf3fs_reg_fd", errno.EBADF): "open the file below the mount point of 3FS or of a running agent",
    ("hf3fs_reg_fd", errno.EINVAL): "deregister the descriptor before you register it again",
    ("hf3fs_iordestroy", errno.ETIMEDOUT): "find out why the agent hangs; the memory of the I/Os is never released",
    ("hf3fs_wait_for_ios", errno.EPROTO): "destroy the ring: the agent completed an operation that was not prepared",
}
_ADVICE_BY_ERRNO = {
    errno.ENOENT: "pass the mount point of a mounted 3FS or of a running agent",
    errno.ECONNREFUSED: "start the agent of this mount again",
    errno.EREMOTEIO: "the agent or its server has ended: start it, and open everything again",
    errno.EACCES: "run as the user who started the agent",
    errno.EOPNOTSUPP: "run `gdrkit doctor`, which reports what device memory needs on this machine",
}


class UsrbioError(ApiError, OSError):
    """A call of the client library failed. It is also an OSError, which programs for 3FS catch."""


class UsrbioUnsupported(UsrbioError, Unsupported):
    """The client library does not support an operation, or does not have the function for it."""


def native() -> NativeModule:
    """Return the native module. Its first call opens the client library.

    Raises
    ------
    SetupMissing
        The module was not built, or the library cannot be opened.
    """
    with _lock:
        if not _opened_modules:
            module: Any = import_native("gdrkit.usrbio._hf3fs")
            module.make_call_error = _make_call_error
            module.make_missing_function_error = _make_missing_function_error
            module.make_misuse_error = _make_misuse_error
            _open_library(module, library_path())
            _opened_modules.append(module)
        return _opened_modules[0]


def library_path() -> Path:
    """Return the path of the client library."""
    library_name = os.environ.get(LIBRARY_VARIABLE)
    return Path(library_name) if library_name else _GDRKIT_LIBRARY


def capabilities() -> frozenset[str]:
    """Return the names of the functions of the C interface that the library has."""
    return frozenset(native().function_names())


def _open_library(module: Any, path: Path) -> None:
    """Open the client library in the native module."""
    operation = f"dlopen {path}"
    if path == _GDRKIT_LIBRARY:
        what_to_do = "in a checkout, run `nox -s suites` once; elsewhere install gdrkit again"
    else:
        what_to_do = f"set {LIBRARY_VARIABLE} to the path of the client library of 3FS, or unset it"
    # A name without a folder is not a path: the loader searches for it.
    if len(path.parts) > 1 and not path.exists():
        raise setup_missing(
            operation=operation, text=f"{path} does not exist", what_to_do=what_to_do, default_errno=errno.ENOENT
        )
    check_library(str(path), operation=operation)
    if error_text := module.open_library(str(path)):
        raise setup_missing(operation=operation, text=error_text, what_to_do=what_to_do, default_errno=errno.ELIBBAD)


# The native module calls the following three functions to create its exceptions.


def _make_call_error(operation: str, error_number: int, arguments: dict[str, object]) -> ApiError:
    """Return the error of a function of the client library that failed with this errno."""
    what_to_do = _ADVICE_BY_FUNCTION_AND_ERRNO.get((operation, error_number)) or _ADVICE_BY_ERRNO.get(error_number, "")
    error_type = UsrbioUnsupported if error_number == errno.EOPNOTSUPP else UsrbioError
    return error_type(
        api=Api.USRBIO,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments=arguments,
        reason=_REASON_BY_ERRNO.get(error_number, Reason.OTHER),
        what_to_do=what_to_do,
        detail=os.strerror(error_number),
    )


def _make_missing_function_error(operation: str) -> ApiError:
    """Return the error of a call of a function that the client library does not have."""
    return UsrbioUnsupported(
        api=Api.USRBIO,
        operation=operation,
        status=None,
        status_name="no such function",
        errno=None,
        reason=Reason.NOT_SUPPORTED,
        what_to_do=f"use a client library with this function; unset {LIBRARY_VARIABLE} to use gdrkit's own",
        detail=f"{library_path()} does not have the function",
    )


def _make_misuse_error(message: str, reason: str) -> GdrkitError:
    """Return the error of a wrong use of a native object, such as a call after its close."""
    # For a closed object, the message is "the NAME is closed" or "the NAME is destroyed".
    name, separator, _ = message.removeprefix("the ").partition(" is ")
    if reason == Reason.CLOSED.value and separator:
        return ClosedResource(name)
    return UsageError(message, reason=Reason(reason))
