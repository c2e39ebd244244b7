"""The client library of hf3fs in this process: the one that is ours, or the one that GDRKIT_USRBIO_LIBRARY names.

Level 5. The only file that names the native module ``gdrkit.usrbio._hf3fs``. The library is opened at the first call,
and stays. What it lacks is found out, not assumed: releases of 3FS have no call for device memory.
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

_OURS = Path(__file__).resolve().parent / "lib" / "libhf3fs_api_shared.so"
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

# By function and errno; then by errno alone.
_ADVICE: dict[tuple[str, int], str] = {
    ("hf3fs_prep_io", errno.EAGAIN): "the ring is full: submit, and wait for results",
    ("hf3fs_prep_io", errno.EBADF): "register the descriptor first: register_fd(fd)",
    ("hf3fs_prep_io", errno.EACCES): "open the file for what the ring does: reading or writing",
    ("hf3fs_prep_io", errno.EINVAL): "a ring reads or writes, never both, and only inside of an iovec; no length is 0",
    ("hf3fs_reg_fd", errno.EBADF): "open the file below the mount point of 3FS or of an agent that runs",
    ("hf3fs_reg_fd", errno.EINVAL): "deregister it before it is registered again",
    ("hf3fs_iordestroy", errno.ETIMEDOUT): "the iovecs of these operations stay; see why the agent does not answer",
    ("hf3fs_wait_for_ios", errno.EPROTO): "destroy the ring: what the agent posts is not what was asked for",
}
_ADVICE_BY_ERRNO = {
    errno.ENOENT: "name the mount point of 3FS or of an agent that runs; mount or start it",
    errno.ECONNREFUSED: "start the agent of this mount again",
    errno.EREMOTEIO: "the agent or its server is gone: start it, and open everything again",
    errno.EACCES: "run as the user that the agent runs for",
    errno.EOPNOTSUPP: "`gdrkit doctor` says what device memory needs on this machine",
}


class UsrbioError(ApiError, OSError):
    """The client library said no; an OSError too, since that is what programs for 3FS catch."""

    def __init__(self, *, errno: int | None, detail: str, **rest: Any) -> None:
        super().__init__(errno=errno, detail=detail, **rest)
        # OSError clears them on its way.
        self.errno: int | None = errno
        self.strerror = detail


class UsrbioUnsupported(UsrbioError, Unsupported):
    """The client library answered that it cannot do this, or has no such function."""


def native() -> NativeModule:
    """The native module, with its library open.

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
    """The file of the client library."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return Path(named) if named else _OURS


def capabilities() -> frozenset[str]:
    """The names of the functions of the C interface that the library has."""
    return frozenset(native().function_names())


def _open(module: Any, path: Path) -> None:
    operation = f"dlopen {path}"
    named = f"name the client library of 3FS by {LIBRARY_VARIABLE}, or unset it"
    what_to_do = named if path != _OURS else "in a checkout, run `nox -s suites` once; elsewhere install gdrkit again"
    # A name without a folder is searched for by the loader.
    if len(path.parts) > 1 and not path.exists():
        raise setup_missing(
            operation=operation, text=f"{path} is not there", what_to_do=what_to_do, default_errno=errno.ENOENT
        )
    check_library(str(path), operation=operation)
    if text := module.open_library(str(path)):
        raise setup_missing(operation=operation, text=text, what_to_do=what_to_do, default_errno=errno.ELIBBAD)


def _failed(operation: str, number: int, arguments: dict[str, object]) -> ApiError:
    what_to_do = _ADVICE.get((operation, number)) or _ADVICE_BY_ERRNO.get(number, "")
    kind = UsrbioUnsupported if number == errno.EOPNOTSUPP else UsrbioError
    return kind(
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
        what_to_do=f"use a client library that has it; without {LIBRARY_VARIABLE} gdrkit's own is taken",
        detail=f"{library_path()} has none",
    )


def _refused(message: str, reason: str) -> GdrkitError:
    if reason == Reason.CLOSED.value:
        return ClosedResource(message.removeprefix("the ").partition(" is ")[0])
    return UsageError(message, reason=Reason(reason))
