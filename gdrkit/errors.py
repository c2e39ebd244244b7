"""The exceptions of gdrkit. All errors are subclasses of :class:`GdrkitError`; :class:`GdrkitWarning` is a warning.

The class of an exception says where the fault is:

* :class:`ApiError`: a call of CUDA, verbs, cuFile, the kernel or another foreign interface failed.
* :class:`UsageError`: the caller passed an invalid value.
* :class:`ClosedResource`: the caller used an object after closing it.
* :class:`BrokenResource`: a peer process or a device is gone.
* :class:`DataMismatch`: the received bytes differ from the sent bytes.
* :class:`SetupMissing`: a library, a device or a permission is missing on this machine.

``ApiError.status`` is the number that the API returned. ``ApiError.errno`` is set only if that number is an errno.
Programs compare :class:`Reason` members, never message texts.

The error of a failed system call is also the built-in exception of its errno: an :class:`ApiError` with ENOENT is also
a FileNotFoundError, and can be caught as either class.
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
    """The foreign interface that reported an error.

    ``USRBIO`` is the user-space I/O of 3FS, ``STORAGE`` a storage server, ``LOADER`` the dynamic loader (dlopen), and
    ``TWINS`` the software twins. ``NONE``: gdrkit itself reports the error.
    """

    VERBS = "verbs"
    CUDA = "cuda"
    CUFILE = "cufile"
    HLTHUNK = "hlthunk"
    NVML = "nvml"
    NCCL = "nccl"
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

    #: A library, a Python package or a program that the call needs is not installed.
    LIBRARY_MISSING = "library_missing"
    #: The library is installed, but cannot be loaded.
    LIBRARY_DAMAGED = "library_damaged"
    #: The installed version of the library lacks a function, or has another interface.
    LIBRARY_WRONG_ABI = "library_wrong_abi"
    #: There is no such device, or this process cannot see it.
    NO_DEVICE = "no_device"
    #: This user may not do the operation.
    NO_PERMISSION = "no_permission"
    #: The limit of locked memory of this process is too low.
    MEMLOCK_TOO_LOW = "memlock_too_low"
    #: The device, the driver or the kernel does not support the operation.
    NOT_SUPPORTED = "not_supported"
    #: The driver of the device cannot export this memory as a dma-buf.
    DMABUF_EXPORT_UNSUPPORTED = "dmabuf_export_unsupported"
    #: The kernel or the NIC cannot register a dma-buf.
    DMABUF_REGION_UNSUPPORTED = "dmabuf_region_unsupported"
    #: The NIC cannot register the device address. nvidia_peermem is probably not loaded.
    PEER_MEMORY_UNSUPPORTED = "peer_memory_unsupported"
    #: Every method of registering the memory, or every direct path to the file, is unusable.
    NO_ROUTE = "no_route"
    #: The device or the host has not enough free memory.
    OUT_OF_MEMORY = "out_of_memory"
    #: A value is invalid. The error names the allowed values.
    BAD_ARGUMENT = "bad_argument"
    #: A file descriptor is closed, or is of another kind of file.
    BAD_DESCRIPTOR = "bad_descriptor"
    #: The address is not device memory of this process.
    NOT_DEVICE_MEMORY = "not_device_memory"
    #: Bytes that another process or a file provided have the wrong format.
    MALFORMED = "malformed"
    #: The object was closed before.
    CLOSED = "closed"
    #: The object is in use: release its leases, regions or transfers first, and try again.
    BUSY = "busy"
    #: The other process has ended, or its connection is broken.
    PEER_GONE = "peer_gone"
    #: The operation did not complete before its time limit.
    TIMEOUT = "timeout"
    #: The caller cancelled the transfer.
    CANCELLED = "cancelled"
    #: The file ends before the requested range ends.
    END_OF_FILE = "end_of_file"
    #: The disk, the ring or the table is full.
    NO_SPACE = "no_space"
    #: A disk failed, or its bytes do not match their checksum.
    IO_ERROR = "io_error"
    #: The caller required a direct transfer, but the bytes took another route, or their route was not proven.
    NOT_DIRECT = "not_direct"
    #: Another process changed the same object, or the object exists already.
    CONFLICT = "conflict"
    #: None of the reasons above. The text and `status` have the details.
    OTHER = "other"


def errno_name(errno_value: int | None) -> str:
    """Return the name of an errno, such as ``EOPNOTSUPP`` for 95.

    The name of 524, an error number that only the kernel defines, is ``ENOTSUPP``. For a value without a name, such as
    12345, the function returns ``errno 12345``.
    """
    if errno_value is None:
        return "no errno"
    if errno_value == 524:  # noqa: PLR2004 - the kernel leaks its ENOTSUPP to user space, whose errno.h lacks it.
        return "ENOTSUPP"
    if errno_value == _errno.EOPNOTSUPP:
        # Linux uses one number for ENOTSUP and EOPNOTSUPP; the kernel and libibverbs mean EOPNOTSUPP.
        return "EOPNOTSUPP"
    return _errno.errorcode.get(errno_value, f"errno {errno_value}")


def _describe_status(status: int | None, status_name: str, errno_value: int | None) -> str:
    """Return ``Bad address (EFAULT)`` for an errno, and ``CUDA_ERROR_INVALID_VALUE (1)`` for another status."""
    if errno_value is not None and errno_value in _errno.errorcode:
        return f"{os.strerror(errno_value)} ({status_name})"
    return status_name if status is None else f"{status_name} ({status})"


_OS_ERROR_FIELDS = ("errno", "strerror", "filename")
# The fields of the error classes below that are read-only mappings.
_MAPPING_FIELDS = frozenset({"arguments", "handles"})
# Name of an attribute of the classes that _find_os_error_class makes. Its value is the ApiError class from which the
# class is derived.
_API_ERROR_CLASS_ATTRIBUTE = "_api_error_class"
# This type has the arguments of _restore_error: the class of an error, its `args`, its attributes, and its fields of
# OSError.
_ErrorFields = tuple[type["GdrkitError"], tuple[Any, ...], dict[str, Any], dict[str, Any]]


class GdrkitError(Exception):
    """Base of all errors that gdrkit raises on purpose.

    Parameters
    ----------
    message : str
        What happened, in one sentence.
    reason : Reason
        The reason, for programs.
    what_to_do : str
        What the user can do about the error, or an empty string.
    """

    def __init__(self, message: str, *, reason: Reason = Reason.OTHER, what_to_do: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.what_to_do = what_to_do

    def clone(self) -> Self:
        """Return a new error with the same fields and notes, but without a traceback and a cause.

        Each raise of an error object adds stack frames to its traceback, and the frames keep all local variables of
        their functions alive. So code that stores an error stores a clone, and raises another clone each time.
        """
        cloned_error = cast("Self", _restore_error(*self._pack_fields()))
        if hasattr(self, "__notes__"):
            cloned_error.__notes__ = list(self.__notes__)
        return cloned_error

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickle and copy. ``Exception.__reduce__`` would pass only `args` to the constructor."""
        return _restore_error, self._pack_fields()

    def _pack_fields(self) -> _ErrorFields:
        cls = type(self)
        # An OSError keeps its own fields outside of __dict__. A read-only mapping cannot be pickled, but a dict can.
        os_error_fields = {name: getattr(self, name) for name in _OS_ERROR_FIELDS} if isinstance(self, OSError) else {}
        fields = {name: dict(value) if name in _MAPPING_FIELDS else value for name, value in vars(self).items()}
        return getattr(cls, _API_ERROR_CLASS_ATTRIBUTE, cls), self.args, fields, os_error_fields

    def __str__(self) -> str:
        return f"{self.message}. To do: {self.what_to_do}" if self.what_to_do else self.message


class ApiError(GdrkitError):
    """A call of a foreign interface (:class:`Api`) failed.

    An error of the kernel (``Api.KERNEL``) with an errno is also an OSError, with ``strerror`` and ``filename``. It is
    an instance of the subclass that Python uses for this errno, such as FileNotFoundError for ENOENT.

    Attributes
    ----------
    api : Api
        The API.
    operation : str
        The API's name of the called function, such as ``ibv_reg_dmabuf_mr``.
    status : int or None
        The returned value, such as an errno, a CUresult or a work completion status. None if the API returned no value.
    status_name : str
        The name of the status in the header file of the API, such as ``EOPNOTSUPP`` or ``CUDA_ERROR_INVALID_VALUE``.
    errno : int or None
        The status if it is an errno, else None. gdrkit never derives an errno from another status.
    arguments : mapping
        The arguments of the call. A key contains the unit of its value, such as ``length_bytes``.
    detail : str
        Further text about the failure, which ends the message; empty if there is none.
    """

    def __new__(cls, **fields: Any) -> Self:  # noqa: ANN401 - see __init__.
        """Construct an object of `cls`, or of its subclass that is also the built-in exception of the errno."""
        errno_value = fields.get("errno")
        if errno_value is not None and (fields.get("api") is Api.KERNEL or issubclass(cls, OSError)):
            cls = cast("type[Self]", _find_os_error_class(cast("Any", cls), errno_value))  # noqa: PLW0642
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
        call_text = f"{operation}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"
        # A detail that only repeats the text of the errno is not printed.
        has_detail = detail and (errno is None or detail != os.strerror(errno))
        detail_suffix = f": {detail}" if has_detail else ""
        super().__init__(
            f"{api.value}: {call_text} failed: {_describe_status(status, status_name, errno)}{detail_suffix}",
            reason=reason,
            what_to_do=what_to_do,
        )
        # OSError.__init__ sets no fields if a subclass has its own __new__, so they are set here.
        self.args = (self.message,)
        self.errno = errno
        if isinstance(self, OSError):
            _set_os_fields(self, strerror=detail if errno is None else os.strerror(errno), arguments=self.arguments)

    @classmethod
    def _find_builtin_class(cls, errno_value: int) -> type[OSError]:
        """Return the built-in exception class for this errno. An error of the kernel is also an instance of it."""
        return type(OSError(errno_value, ""))


# The arguments that name the file of a failed system call, the most specific first.
_FILE_ARGUMENTS = ("path", "name", "directory", "folder", "store", "command")


def _set_os_fields(error: OSError, *, strerror: str, arguments: Mapping[str, object]) -> None:
    error.strerror = strerror
    error.filename = next((arguments[key] for key in _FILE_ARGUMENTS if key in arguments), None)


@functools.cache
def _find_os_error_class(cls: type[ApiError], errno_value: int) -> type[ApiError]:
    """Return a class derived from `cls` and from the built-in exception for an errno (FileNotFoundError for ENOENT).

    The new class has the name of `cls`, because reports and the messages between test processes contain the name.
    """
    builtin_class = cls._find_builtin_class(errno_value)
    if issubclass(cls, builtin_class):
        return cls
    class_attributes = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _API_ERROR_CLASS_ATTRIBUTE: cls,
    }
    return cast("type[ApiError]", type(cls.__name__, (cls, builtin_class), class_attributes))


def _restore_error(
    cls: type[GdrkitError], args: tuple[Any, ...], fields: dict[str, Any], os_error_fields: dict[str, Any]
) -> GdrkitError:
    """Return an error with these fields, without calling its constructor."""
    errno_value = os_error_fields.get("errno")
    if errno_value is not None:
        cls = _find_os_error_class(cast("Any", cls), errno_value)
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(
        {name: MappingProxyType(value) if name in _MAPPING_FIELDS else value for name, value in fields.items()}
    )
    for name, value in os_error_fields.items():
        setattr(error, name, value)
    return error


class Unsupported(ApiError):
    """The API does not support the operation (EOPNOTSUPP, CUDA_ERROR_NOT_SUPPORTED, ...)."""


class SetupMissing(ApiError):
    """Something must first be installed, fixed or permitted on this machine. The command line exits with code 3."""


class RegistrationFailed(GdrkitError):
    """Every method of registering this memory with this NIC failed.

    ``causes`` has the error of each method, in the order in which the methods were tried.
    """

    def __init__(self, message: str, *, causes: tuple[GdrkitError, ...], reason: Reason, what_to_do: str = "") -> None:
        cause_list = "; ".join(f"[{index}] {cause}" for index, cause in enumerate(causes, start=1))
        super().__init__(f"{message}: {cause_list}" if causes else message, reason=reason, what_to_do=what_to_do)
        self.causes = causes

    def clone(self) -> Self:
        """Return a new error whose causes are also new errors."""
        cloned_error = super().clone()
        cloned_error.causes = tuple(cause.clone() for cause in self.causes)
        return cloned_error


class UsageError(GdrkitError):
    """The caller passed an invalid value. The operation was not started. The command line exits with code 2."""

    def __init__(self, message: str, *, reason: Reason = Reason.BAD_ARGUMENT, what_to_do: str = "") -> None:
        super().__init__(message, reason=reason, what_to_do=what_to_do)


class ClosedResource(GdrkitError):
    """The caller used an object after closing it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is closed", reason=Reason.CLOSED)


class BrokenResource(GdrkitError):
    """A peer process, a connection or a device no longer works. ``__cause__`` is the error that showed this, if any."""


class DataMismatch(GdrkitError):
    """The bytes that arrived are not the bytes that were sent.

    Attributes
    ----------
    first_offset_bytes : int or None
        Offset of the first wrong byte from the beginning of the checked range. None: only checksums were compared.
    expected, actual : bytes
        Up to 16 bytes from that offset on, or the CRC-32C checksums, four bytes in big-endian order.
    length_bytes : int
        Size of the checked range in bytes.
    """

    def __init__(self, *, first_offset_bytes: int | None, expected: bytes, actual: bytes, length_bytes: int) -> None:
        self.first_offset_bytes = first_offset_bytes
        self.expected = expected
        self.actual = actual
        self.length_bytes = length_bytes
        position_text = (
            f"the checksum of {length_bytes} bytes"
            if first_offset_bytes is None
            else f"byte {first_offset_bytes} of {length_bytes}"
        )
        super().__init__(f"{position_text} differs: expected {expected.hex()}, found {actual.hex()}")


class LeakDetected(GdrkitError):
    """Objects are still open at a point where all must be closed. ``handles`` has their number for each kind."""

    def __init__(self, handles: Mapping[str, int]) -> None:
        self.handles = MappingProxyType(dict(handles))
        super().__init__("still open: " + ", ".join(f"{count} {kind}" for kind, count in sorted(handles.items())))


class GdrkitWarning(ResourceWarning):
    """A failure that cannot be raised: a second error during clean-up, or an object that was never closed."""
