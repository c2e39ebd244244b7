"""The one exception tree.

Level 0. A class says whose fault it was: :class:`ApiError` a real API said no, :class:`UsageError` the caller did,
:class:`ClosedResource` the caller used something after closing it, :class:`BrokenResource` the other side is gone,
:class:`DataMismatch` bytes differ, :class:`SetupMissing` something is not installed. Codes stay numbers: ``status`` is
what the API returned, ``errno`` is set only when that is one. Tests compare :class:`Reason` members, never message
text.
"""

from __future__ import annotations

import enum
import errno as _errno
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Api",
    "ApiError",
    "BrokenResource",
    "ClosedResource",
    "DataMismatch",
    "GdrkitError",
    "GdrkitWarning",
    "LeakDetected",
    "Reason",
    "RegistrationFailed",
    "SetupMissing",
    "Unsupported",
    "UsageError",
    "errno_name",
]


class Api(enum.Enum):
    """The foreign interface that answered."""

    VERBS = "verbs"
    CUDA = "cuda"
    CUFILE = "cufile"
    HLTHUNK = "hlthunk"
    NVML = "nvml"
    KERNEL = "kernel"
    USRBIO = "usrbio"
    STORAGE = "storage"
    FUSE = "fuse"
    SQLITE = "sqlite"
    LOADER = "loader"
    TWINS = "twins"
    NONE = "none"


class Reason(enum.Enum):
    """Why something was refused; stable, so that programs and tests may compare it."""

    LIBRARY_MISSING = "library_missing"
    LIBRARY_DAMAGED = "library_damaged"
    LIBRARY_WRONG_ABI = "library_wrong_abi"
    NO_DEVICE = "no_device"
    NO_PERMISSION = "no_permission"
    MEMLOCK_TOO_LOW = "memlock_too_low"
    NOT_SUPPORTED = "not_supported"
    DMABUF_EXPORT_UNSUPPORTED = "dmabuf_export_unsupported"
    DMABUF_REGION_UNSUPPORTED = "dmabuf_region_unsupported"
    PEER_MEMORY_UNSUPPORTED = "peer_memory_unsupported"
    NO_ROUTE = "no_route"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_ARGUMENT = "bad_argument"
    BAD_DESCRIPTOR = "bad_descriptor"
    NOT_DEVICE_MEMORY = "not_device_memory"
    MALFORMED = "malformed"
    CLOSED = "closed"
    BUSY = "busy"
    PEER_GONE = "peer_gone"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    END_OF_FILE = "end_of_file"
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"
    NOT_DIRECT = "not_direct"
    CONFLICT = "conflict"
    OTHER = "other"


def errno_name(number: int | None) -> str:
    """``EOPNOTSUPP`` for 95; ``ENOTSUPP`` for the kernel's own 524; ``errno 12345`` for a number that nobody named."""
    if number is None:
        return "no errno"
    if number == 524:  # noqa: PLR2004 - the kernel leaks its internal ENOTSUPP to user space; it is in no errno.h.
        return "ENOTSUPP"
    if number == _errno.EOPNOTSUPP:
        return "EOPNOTSUPP"  # Linux has one number for ENOTSUP and this; the kernel and libibverbs mean this one.
    return _errno.errorcode.get(number, f"errno {number}")


class GdrkitError(Exception):
    """Anything that gdrkit raises on purpose.

    Parameters
    ----------
    message : str
        What happened, one sentence.
    reason : Reason
        The same for programs.
    what_to_do : str
        What the reader can do about it; empty when there is nothing.
    """

    def __init__(self, message: str, *, reason: Reason = Reason.OTHER, what_to_do: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.what_to_do = what_to_do

    def fresh(self) -> Self:
        """Return a new error with the same fields and notes, and without a traceback and a cause.

        An error object collects the frames of every place that raises it, and its frames keep their callers and all
        their variables alive. What stores an error therefore stores a fresh one, and raises a fresh one each time.
        """
        made = type(self).__new__(type(self))
        made.args = self.args
        vars(made).update(vars(self))
        if isinstance(self, OSError) and isinstance(made, OSError):
            made.errno, made.strerror, made.filename = self.errno, self.strerror, self.filename
        if hasattr(self, "__notes__"):
            made.__notes__ = list(self.__notes__)
        return made

    def __str__(self) -> str:
        return f"{self.message}. To do: {self.what_to_do}" if self.what_to_do else self.message


class ApiError(GdrkitError):
    """A real API said no.

    Attributes
    ----------
    api : Api
        Which one.
    operation : str
        Its own name for what was called, e.g. ``ibv_reg_dmabuf_mr``.
    status : int or None
        The value as returned (an errno, a CUresult, a work-completion status); None when the API gave none.
    status_name : str
        Its name in the header, e.g. ``EOPNOTSUPP`` or ``CUDA_ERROR_INVALID_VALUE``.
    errno : int or None
        The same number when it is an errno, else None. Never invented.
    arguments : mapping
        What it was called with, units in the keys.
    """

    def __init__(
        self,
        *,
        api: Api,
        operation: str,
        status: int | None,
        status_name: str,
        errno: int | None = None,
        arguments: Mapping[str, object] | None = None,
        reason: Reason = Reason.OTHER,
        what_to_do: str = "",
        detail: str = "",
    ) -> None:
        self.api = api
        self.operation = operation
        self.status = status
        self.status_name = status_name
        self.errno = errno
        self.arguments: Mapping[str, object] = MappingProxyType(dict(arguments or {}))
        self.detail = detail
        shown = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        number = "" if status is None else f" ({status})"
        tail = f": {detail}" if detail else ""
        super().__init__(
            f"{api.value}: {operation}({shown}) gave {status_name}{number}{tail}", reason=reason, what_to_do=what_to_do
        )


class Unsupported(ApiError):
    """The API answered that it cannot do this at all (EOPNOTSUPP, CUDA_ERROR_NOT_SUPPORTED ...)."""


class SetupMissing(ApiError):
    """Something must be installed, mended or permitted on this machine first. The command line ends with 3."""


class RegistrationFailed(GdrkitError):
    """No route from this memory to this NIC works; ``causes`` has the error of every route that was tried, in order."""

    def __init__(self, message: str, *, causes: tuple[GdrkitError, ...], reason: Reason, what_to_do: str = "") -> None:
        listed = "; ".join(f"[{index}] {cause}" for index, cause in enumerate(causes, start=1))
        super().__init__(f"{message}: {listed}" if listed else message, reason=reason, what_to_do=what_to_do)
        self.causes = causes

    def fresh(self) -> Self:
        """Return a new error whose causes are new ones, too."""
        made = super().fresh()
        made.causes = tuple(cause.fresh() for cause in self.causes)
        return made


class UsageError(GdrkitError):
    """The caller passed something that cannot be right; nothing was done. The command line ends with 2."""

    def __init__(self, message: str, *, reason: Reason = Reason.BAD_ARGUMENT, what_to_do: str = "") -> None:
        super().__init__(message, reason=reason, what_to_do=what_to_do)


class ClosedResource(GdrkitError):
    """The caller used something that the caller had closed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is closed", reason=Reason.CLOSED)


class BrokenResource(GdrkitError):
    """The other side is gone: a peer process, a device; see ``__cause__``."""


class DataMismatch(GdrkitError):
    """Bytes arrived that are not those that were sent.

    Attributes
    ----------
    first_offset_bytes : int
        Offset of the first wrong byte from the beginning of what was checked.
    expected, actual : bytes
        Up to 16 bytes from there.
    length_bytes : int
        How much was checked.
    """

    def __init__(self, *, first_offset_bytes: int, expected: bytes, actual: bytes, length_bytes: int) -> None:
        self.first_offset_bytes = first_offset_bytes
        self.expected = expected
        self.actual = actual
        self.length_bytes = length_bytes
        super().__init__(
            f"byte {first_offset_bytes} of {length_bytes} differs: expected {expected.hex()}, found {actual.hex()}"
        )


class LeakDetected(GdrkitError):
    """Handles are still open where none may be; ``handles`` counts them by kind."""

    def __init__(self, handles: Mapping[str, int]) -> None:
        self.handles = MappingProxyType(dict(handles))
        super().__init__("still open: " + ", ".join(f"{count} {kind}" for kind, count in sorted(handles.items())))


class GdrkitWarning(ResourceWarning):
    """A failure where nothing can be raised: a second error during clean-up, an object that was never closed."""
