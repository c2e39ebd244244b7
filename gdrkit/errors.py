"""The exceptions of gdrkit, in one tree.

The class of an exception says where the fault is. :class:`ApiError`: a real API failed. :class:`UsageError`: the caller
passed something wrong. :class:`ClosedResource`: the caller used an object after closing it. :class:`BrokenResource`:
the other side is gone. :class:`DataMismatch`: bytes differ. :class:`SetupMissing`: something is not installed.

Codes stay numbers: ``status`` is the value that the API returned, and ``errno`` is set only if that value is an errno.
Tests compare :class:`Reason` members, never message texts.

An error of a system call is also the built-in exception of its errno, so that ``except FileNotFoundError`` catches an
:class:`ApiError` with ENOENT, and ``except ApiError`` catches it too.
"""

from __future__ import annotations

import enum
import errno as _errno
import functools
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

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
    """The foreign interface that reported an error."""

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
    """The reason of an error. The members are stable, so that programs and tests can compare them."""

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
    """Return the name of an errno, such as ``EOPNOTSUPP`` for 95.

    It is ``ENOTSUPP`` for the kernel's own 524, and ``errno 12345`` for a number without a name.
    """
    if number is None:
        return "no errno"
    if number == 524:  # noqa: PLR2004 - the kernel leaks its internal ENOTSUPP to user space; it is in no errno.h.
        return "ENOTSUPP"
    if number == _errno.EOPNOTSUPP:
        # Linux uses one number for ENOTSUP and EOPNOTSUPP; the kernel and libibverbs mean EOPNOTSUPP.
        return "EOPNOTSUPP"
    return _errno.errorcode.get(number, f"errno {number}")


def _status_text(status: int | None, status_name: str, number: int | None) -> str:
    """Return ``Bad address (EFAULT)`` for an errno, and ``CUDA_ERROR_INVALID_VALUE (1)`` for another status."""
    if number is not None and number in _errno.errorcode:
        return f"{os.strerror(number)} ({status_name})"
    return status_name if status is None else f"{status_name} ({status})"


_SYSTEM_FIELDS = ("errno", "strerror", "filename")
_READ_ONLY = frozenset({"arguments", "handles"})
# Name of the attribute by which a class of _system_error refers to the class that it was derived from.
_DECLARED = "_declared_class"
# The class of an error, its args, its dictionary, and the fields of an OSError.
_Fields = tuple[type["GdrkitError"], tuple[Any, ...], dict[str, Any], dict[str, Any]]


class GdrkitError(Exception):
    """Base of all errors that gdrkit raises on purpose.

    Parameters
    ----------
    message : str
        What happened, in one sentence.
    reason : Reason
        The reason, for programs.
    what_to_do : str
        What the reader can do about it. It is empty if there is nothing to do.
    """

    def __init__(self, message: str, *, reason: Reason = Reason.OTHER, what_to_do: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.what_to_do = what_to_do

    def clone(self) -> Self:
        """Return a new error with the same fields and notes, but without a traceback and a cause.

        An error object collects the frames of every place that raises it. These frames keep all variables of their
        functions alive. So code that stores an error stores a clone, and raises another clone each time.
        """
        copy = cast("Self", _restore(*self._fields()))
        if hasattr(self, "__notes__"):
            copy.__notes__ = list(self.__notes__)
        return copy

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickle and copy. The method of Exception would call the constructor with `args` alone."""
        return _restore, self._fields()

    def _fields(self) -> _Fields:
        cls = type(self)
        # An OSError keeps these fields outside of its dictionary, and a read-only mapping cannot be pickled.
        system_fields = {name: getattr(self, name) for name in _SYSTEM_FIELDS} if isinstance(self, OSError) else {}
        fields = {name: dict(value) if name in _READ_ONLY else value for name, value in vars(self).items()}
        return getattr(cls, _DECLARED, cls), self.args, fields, system_fields

    def __str__(self) -> str:
        return f"{self.message}. To do: {self.what_to_do}" if self.what_to_do else self.message


class ApiError(GdrkitError):
    """A real API failed.

    An error of the kernel (``Api.KERNEL``) with an errno is also an OSError of the subclass that Python uses for this
    errno, as ``OSError(errno.ENOENT, ...)`` constructs a FileNotFoundError. It has ``strerror`` and ``filename``.

    Attributes
    ----------
    api : Api
        The API.
    operation : str
        The API's name of the called function, such as ``ibv_reg_dmabuf_mr``.
    status : int or None
        The returned value (an errno, a CUresult, a work completion status). None if the API returned none.
    status_name : str
        The name of the status in the header, such as ``EOPNOTSUPP`` or ``CUDA_ERROR_INVALID_VALUE``.
    errno : int or None
        The status if it is an errno, else None. It is never invented.
    arguments : mapping
        The arguments of the call. The keys name the units.
    """

    def __new__(cls, **fields: Any) -> Self:  # noqa: ANN401 - see __init__.
        """Construct an object of `cls`, or of its subclass that is also the built-in exception of the errno."""
        number = fields.get("errno")
        if number is not None and (fields.get("api") is Api.KERNEL or issubclass(cls, OSError)):
            cls = cast("type[Self]", _system_error(cast("Any", cls), number))  # noqa: PLW0642
        return super().__new__(cls)

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
        self.arguments: Mapping[str, object] = MappingProxyType(dict(arguments or {}))
        self.detail = detail
        call = f"{operation}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"
        # A detail that only repeats the text of the errno is left out.
        has_detail = detail and (errno is None or detail != os.strerror(errno))
        suffix = f": {detail}" if has_detail else ""
        super().__init__(
            f"{api.value}: {call} failed: {_status_text(status, status_name, errno)}{suffix}",
            reason=reason,
            what_to_do=what_to_do,
        )
        # OSError sets no field of a subclass that has its own __new__.
        self.args = (self.message,)
        self.errno = errno
        if isinstance(self, OSError):
            _set_os_fields(self, strerror=detail if errno is None else os.strerror(errno), arguments=self.arguments)

    @classmethod
    def _builtin_class(cls, number: int) -> type[OSError]:
        """Return the built-in exception that an error of the kernel with this errno also is."""
        return type(OSError(number, ""))


# The arguments that name the file of a failed system call, the most specific first.
_FILE_ARGUMENTS = ("path", "name", "directory", "folder", "store", "command")


def _set_os_fields(error: OSError, *, strerror: str, arguments: Mapping[str, object]) -> None:
    error.strerror = strerror
    error.filename = next((arguments[key] for key in _FILE_ARGUMENTS if key in arguments), None)


@functools.cache
def _system_error(cls: type[ApiError], number: int) -> type[ApiError]:
    """Return the subclass of `cls` and of the built-in exception for an errno, such as FileNotFoundError for ENOENT.

    It has the name of `cls`, by which reports and the messages between test processes identify a class.
    """
    builtin = cls._builtin_class(number)
    if issubclass(cls, builtin):
        return cls
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _DECLARED: cls,
    }
    return cast("type[ApiError]", type(cls.__name__, (cls, builtin), namespace))


def _restore(
    cls: type[GdrkitError], args: tuple[Any, ...], fields: dict[str, Any], system_fields: dict[str, Any]
) -> GdrkitError:
    """Return an error with these fields, without calling its constructor."""
    number = system_fields.get("errno")
    if number is not None:
        cls = _system_error(cast("Any", cls), number)
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(
        {name: MappingProxyType(value) if name in _READ_ONLY else value for name, value in fields.items()}
    )
    for name, value in system_fields.items():
        setattr(error, name, value)
    return error


class Unsupported(ApiError):
    """The API does not support the operation at all (EOPNOTSUPP, CUDA_ERROR_NOT_SUPPORTED, ...)."""


class SetupMissing(ApiError):
    """Something must first be installed, fixed or permitted on this machine. The command line exits with code 3."""


class RegistrationFailed(GdrkitError):
    """No method registers this memory with this NIC. ``causes`` has the error of each method, in order."""

    def __init__(self, message: str, *, causes: tuple[GdrkitError, ...], reason: Reason, what_to_do: str = "") -> None:
        cause_list = "; ".join(f"[{index}] {cause}" for index, cause in enumerate(causes, start=1))
        super().__init__(f"{message}: {cause_list}" if causes else message, reason=reason, what_to_do=what_to_do)
        self.causes = causes

    def clone(self) -> Self:
        """Return a new error whose causes are also new errors."""
        copy = super().clone()
        copy.causes = tuple(cause.clone() for cause in self.causes)
        return copy


class UsageError(GdrkitError):
    """The caller passed an invalid value. Nothing was done. The command line exits with code 2."""

    def __init__(self, message: str, *, reason: Reason = Reason.BAD_ARGUMENT, what_to_do: str = "") -> None:
        super().__init__(message, reason=reason, what_to_do=what_to_do)


class ClosedResource(GdrkitError):
    """The caller used an object that the caller had closed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is closed", reason=Reason.CLOSED)


class BrokenResource(GdrkitError):
    """The other side is gone, such as a peer process or a device; see ``__cause__``."""


class DataMismatch(GdrkitError):
    """The bytes that arrived are not the bytes that were sent.

    Attributes
    ----------
    first_offset_bytes : int
        Offset of the first wrong byte from the beginning of the checked range.
    expected, actual : bytes
        Up to 16 bytes from that offset on.
    length_bytes : int
        Size of the checked range in bytes.
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
    """Handles are still open at a point where all must be closed. ``handles`` counts them by type."""

    def __init__(self, handles: Mapping[str, int]) -> None:
        self.handles = MappingProxyType(dict(handles))
        super().__init__("still open: " + ", ".join(f"{count} {kind}" for kind, count in sorted(handles.items())))


class GdrkitWarning(ResourceWarning):
    """A failure that cannot be raised: a second error during clean-up, or an object that was never closed."""
