"""The client library of hf3fs: gdrkit's own, or the one that GDRKIT_USRBIO_LIBRARY names.

Only this file imports the native module ``gdrkit.usrbio._hf3fs``. The first call opens the library, which then stays
open. Its functions are looked up, because releases of 3FS have no functions for device memory.
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

_OWN_LIBRARY = Path(__file__).resolve().parent / "lib" / "libhf3fs_api_shared.so"
_lock = threading.Lock()
_opened: list[NativeModule] = []

_REASONS = {
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

# Advice for an errno of one function. For other functions, the advice of the errno applies.
_ADVICE: dict[tuple[str, int], str] = {
    ("hf3fs_prep_io", errno.EAGAIN): "the ring is full: submit, and wait for results",
    ("hf3fs_prep_io", errno.EBADF): "register the descriptor first: register_fd(fd)",
    ("hf3fs_prep_io", errno.EACCES): "open the file for reading if the ring reads, for writing if it writes",
    ("hf3fs_prep_io", errno.EINVAL): "use at least 1 byte inside one block of an iovec, and a ring of this direction",
    ("hf3fs_reg_fd", errno.EBADF): "open the file below the mount point of 3FS or of a running agent",
    ("hf3fs_reg_fd", errno.EINVAL): "deregister it before it is registered again",
    ("hf3fs_iordestroy", errno.ETIMEDOUT): "find out why the agent does not answer; the iovecs of the operations stay",
    ("hf3fs_wait_for_ios", errno.EPROTO): "destroy the ring: the agent posted a completion of no prepared operation",
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
    """The client library does not support an operation, or lacks its function."""


def native() -> NativeModule:
    """Return the native module. Its first call opens the client library.

    Raises
    ------
    SetupMissing
        The module was not built, or the library cannot be opened.
    """
    with _lock:
        if not _opened:
            module: Any = import_native("gdrkit.usrbio._hf3fs")
            module.failed, module.missing, module.refused = _failed, _missing, _refused
            _open(module, library_path())
            _opened.append(module)
        return _opened[0]


def library_path() -> Path:
    """Return the path of the client library."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else _OWN_LIBRARY


def capabilities() -> frozenset[str]:
    """Return the names of the functions of the C interface that the library has."""
    return frozenset(native().function_names())


def _open(module: Any, path: Path) -> None:
    operation = f"dlopen {path}"
    if path == _OWN_LIBRARY:
        what_to_do = "in a checkout, run `nox -s suites` once; elsewhere install gdrkit again"
    else:
        what_to_do = f"set {LIBRARY_VARIABLE} to the path of the client library of 3FS, or unset it"
    # The loader searches for a name without a folder.
    if len(path.parts) > 1 and not path.exists():
        raise setup_missing(
            operation=operation, text=f"{path} does not exist", what_to_do=what_to_do, default_errno=errno.ENOENT
        )
    check_library(str(path), operation=operation)
    if text := module.open_library(str(path)):
        raise setup_missing(operation=operation, text=text, what_to_do=what_to_do, default_errno=errno.ELIBBAD)


def _failed(operation: str, number: int, arguments: dict[str, object]) -> ApiError:
    what_to_do = _ADVICE.get((operation, number)) or _ADVICE_BY_ERRNO.get(number, "")
    error_type = UsrbioUnsupported if number == errno.EOPNOTSUPP else UsrbioError
    return error_type(
        api=Api.USRBIO,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments=arguments,
        reason=_REASONS.get(number, Reason.OTHER),
        what_to_do=what_to_do,
        detail=os.strerror(number),
    )


def _missing(operation: str) -> ApiError:
    return UsrbioUnsupported(
        api=Api.USRBIO,
        operation=operation,
        status=None,
        status_name="no such function",
        errno=None,
        reason=Reason.NOT_SUPPORTED,
        what_to_do=f"use a client library with this function; unset {LIBRARY_VARIABLE} to use gdrkit's own",
        detail=f"{library_path()} does not have it",
    )


def _refused(message: str, reason: str) -> GdrkitError:
    if reason == Reason.CLOSED.value:
        return ClosedResource(message.removeprefix("the ").partition(" is ")[0])
    return UsageError(message, reason=Reason(reason))
