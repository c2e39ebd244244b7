"""Transfers between files and device memory by kvikio. Only this file imports kvikio.

kvikio is NVIDIA's library on top of cuFile. It splits a transfer into tasks for its own threads. In its compat mode,
kvikio copies through host memory without cuFile. In this mode libcufile counts nothing, so
:class:`gdrkit.cufile.RouteMonitor` has no evidence of the route.

``pip install --no-deps kvikio-cu13 libkvikio-cu13 rapids-logger`` with numpy and packaging is enough; cupy is not
needed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from gdrkit import loader
from gdrkit.cufile import _cufile, _results
from gdrkit.cufile.buffer import BufferRange
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError, errno_name
from gdrkit.handles import Handle
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from gdrkit.cufile.buffer import TransferRange
    from gdrkit.cufile.interfaces import Memory

__all__ = ["KvikioFile", "KvikioSettings", "KvikioTransfer", "apply_settings", "kvikio_version", "prefers_compat_mode"]

_INSTALL_ADVICE = "pip install --no-deps kvikio-cu13 libkvikio-cu13 rapids-logger, and numpy and packaging"
_COMPAT_MODES = frozenset({"on", "off", "auto"})
# A CUfileOpError number in the text of a kvikio exception.
_CUFILE_STATUS_PATTERN = re.compile(r"\b(5\d{3})\b")


@dataclass(frozen=True, slots=True)
class KvikioSettings:
    """Settings of kvikio that gdrkit changes. All other settings of kvikio keep their defaults.

    Attributes
    ----------
    thread_count : int
        Number of threads in the pool of kvikio.
    task_bytes : int
        Size of one task, in bytes.
    compat_mode : str
        ``on`` never uses cuFile, ``off`` always uses cuFile, ``auto`` lets kvikio decide.
    """

    thread_count: int = 1
    task_bytes: int = 4 * MIB
    compat_mode: str = "auto"

    def __post_init__(self) -> None:
        if self.thread_count <= 0 or self.task_bytes <= 0 or self.compat_mode not in _COMPAT_MODES:
            message = (
                f"thread_count and task_bytes must be above 0, and compat_mode one of 'on', 'off', 'auto', not {self}"
            )
            raise UsageError(message)


@functools.cache
def _load_kvikio() -> Any:
    """Load libcuda, then libcufile (see ``_cufile.py``), and return the module kvikio."""
    _cufile.load()
    try:
        importlib.import_module("kvikio.defaults")
        return importlib.import_module("kvikio")
    except ImportError as error:
        raise loader.setup_missing(
            operation="import kvikio", text=str(error), what_to_do=_INSTALL_ADVICE, default_errno=errno.ENOENT
        ) from error


def kvikio_version() -> str:
    """Return the version of the kvikio package."""
    return str(_load_kvikio().__version__)


def prefers_compat_mode() -> bool:
    """Return whether kvikio, by default on this machine, copies through host memory instead of using cuFile."""
    _load_kvikio()
    return bool(importlib.import_module("kvikio.defaults").is_compat_mode_preferred())


@contextlib.contextmanager
def apply_settings(settings: KvikioSettings) -> Iterator[None]:
    """Apply the settings during the block. They apply to all threads of the process."""
    kvikio = _load_kvikio()
    compat_mode = getattr(kvikio.CompatMode, settings.compat_mode.upper())
    kvikio_settings = {
        "num_threads": settings.thread_count,
        "task_size": settings.task_bytes,
        "compat_mode": compat_mode,
    }
    with kvikio.defaults.set(kvikio_settings):
        yield


class _DeviceArray:
    """A byte array at an address, with the interface that kvikio requires for device memory."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class KvikioTransfer:
    """A transfer that the threads of kvikio execute."""

    def __init__(self, future: Any, operation: str, kept_objects: object) -> None:
        self._future = future
        self._operation = operation
        # These references keep the memory and the file alive until the transfer is over.
        self._kept_objects = kept_objects

    def bytes(self) -> int:
        """Wait for the transfer and return the number of bytes moved.

        Raises
        ------
        ApiError
            The kernel, CUDA or libcufile reported an error.
        """
        return int(_call(self._operation, self._future.get))


class KvikioFile:
    """A file opened by kvikio; a context manager.

    Parameters
    ----------
    path : path
        The file.
    mode : str
        ``r``, ``w`` (truncates the file) or ``r+``.

    Raises
    ------
    ApiError
        The file cannot be opened.
    """

    def __init__(self, path: str | Path, mode: str = "r") -> None:
        kvikio = _load_kvikio()
        if mode not in {"r", "w", "r+"}:
            message = f"mode must be one of 'r', 'w', 'r+', not {mode!r}"
            raise UsageError(message)
        self.path = str(path)
        self._file = _call("kvikio.CuFile", lambda: kvikio.CuFile(self.path, mode))
        self._live_handle = Handle("cufile.kvikio_file")
        self._is_closed = False

    def read(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> KvikioTransfer:
        """Start a read into device memory; see :meth:`gdrkit.cufile.FileHandle.read`."""
        transfer_range = BufferRange(memory, offset_bytes, length_bytes).at(file_offset_bytes)
        return self._start_transfer("kvikio.pread", self._require_open_file().pread, transfer_range)

    def write(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> KvikioTransfer:
        """Start a write from device memory; see :meth:`read`."""
        transfer_range = BufferRange(memory, offset_bytes, length_bytes).at(file_offset_bytes)
        return self._start_transfer("kvikio.pwrite", self._require_open_file().pwrite, transfer_range)

    def close(self) -> None:
        """Close the file; a second close does nothing."""
        if self._is_closed:
            return
        self._file.close()
        self._is_closed = True
        self._live_handle.release()

    def _start_transfer(
        self, operation: str, start_function: Callable[..., Any], transfer_range: TransferRange
    ) -> KvikioTransfer:
        device_array = _DeviceArray(transfer_range.address + transfer_range.offset_bytes, transfer_range.length_bytes)
        future = _call(
            operation,
            lambda: start_function(device_array, transfer_range.length_bytes, transfer_range.file_offset_bytes),
        )
        return KvikioTransfer(future, operation, (device_array, transfer_range.memory, self))

    def _require_open_file(self) -> Any:
        if self._is_closed:
            resource = "the kvikio file"
            raise ClosedResource(resource)
        return self._file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _call(operation: str, function: Callable[[], Any]) -> Any:
    """Call a function of kvikio and convert its exceptions to :class:`~gdrkit.errors.ApiError`."""
    try:
        return function()
    except OSError as error:
        error_number = error.errno or errno.EIO
        raise _results.make_errno_error(operation=operation, error_number=error_number, arguments={}) from error
    except RuntimeError as error:
        raise _make_error_from_text(operation, str(error)) from error


def _make_error_from_text(operation: str, text: str) -> ApiError:
    """Return the exception for a RuntimeError of kvikio.

    Such an exception has no error number, but its text contains the number of a CUfileOpError, or for some errnos their
    name, such as EBADF.
    """
    numbers = map(int, _CUFILE_STATUS_PATTERN.findall(text))
    status = next((number for number in numbers if number in _results.STATUS_NAMES), None)
    if status is not None:
        return _results.error_of(operation=operation, status=status, arguments={"text": text})
    words = text.split()
    error_number = next((number for number, name in errno.errorcode.items() if name in words), None)
    return ApiError(
        api=Api.CUFILE,
        operation=operation,
        status=error_number,
        status_name="RuntimeError" if error_number is None else errno_name(error_number),
        errno=error_number,
        reason=Reason.OTHER,
        detail=text,
    )
