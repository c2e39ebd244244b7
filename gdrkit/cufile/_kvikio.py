"""Transfers between files and device memory by kvikio. Only this file imports kvikio.

kvikio splits a transfer into tasks for its own threads. If it does not use cuFile, it copies through host memory
itself. Then libcufile counts nothing, and :class:`gdrkit.cufile.RouteMonitor` has no evidence. ``pip install --no-deps
kvikio-cu13 libkvikio-cu13 rapids-logger`` with numpy and packaging is enough; cupy is not needed.
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
from gdrkit.cufile.buffer import check_memory
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError, errno_name
from gdrkit.handles import Handle
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from gdrkit.cufile.buffer import Memory

__all__ = ["KvikioFile", "KvikioSettings", "PendingPart", "kvikio_version", "prefers_host", "settings"]

_ADVICE = "pip install --no-deps kvikio-cu13 libkvikio-cu13 rapids-logger, and numpy and packaging"
_MODES = frozenset({"on", "off", "auto"})
# The texts of kvikio contain the numbers of libcufile.
_CUFILE_NUMBER = re.compile(r"\b(5\d{3})\b")
_OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class KvikioSettings:
    """Settings of kvikio. Its other settings keep their defaults.

    Attributes
    ----------
    thread_count : int
        Number of threads in the pool of kvikio.
    task_bytes : int
        Size of one task, in bytes.
    compat_mode : str
        ``on`` (never cuFile), ``off`` (always cuFile), ``auto``.
    """

    thread_count: int = 1
    task_bytes: int = 4 * MIB
    compat_mode: str = "auto"

    def __post_init__(self) -> None:
        if self.thread_count <= 0 or self.task_bytes <= 0 or self.compat_mode not in _MODES:
            message = f"kvikio cannot work by {self}"
            raise UsageError(message)


@functools.cache
def _load() -> Any:
    """Load libcuda and libcufile in the order that is known to be safe, and return the module kvikio."""
    _cufile.load()
    try:
        importlib.import_module("kvikio.defaults")
        return importlib.import_module("kvikio")
    except ImportError as error:
        raise loader.setup_missing(
            operation="import kvikio", text=str(error), what_to_do=_ADVICE, default_errno=errno.ENOENT
        ) from error


def kvikio_version() -> str:
    """Return the version of the kvikio package."""
    return str(_load().__version__)


def prefers_host() -> bool:
    """Return whether kvikio by default uses host memory here instead of cuFile."""
    _load()
    return bool(importlib.import_module("kvikio.defaults").is_compat_mode_preferred())


@contextlib.contextmanager
def settings(wanted: KvikioSettings) -> Iterator[None]:
    """Set the settings of kvikio during the block, for the whole process."""
    kvikio = _load()
    mode = getattr(kvikio.CompatMode, wanted.compat_mode.upper())
    with kvikio.defaults.set({"num_threads": wanted.thread_count, "task_size": wanted.task_bytes, "compat_mode": mode}):
        yield


class _Array:
    """An object with the interface that kvikio requires for device memory."""

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class PendingPart:
    """A transfer that the threads of kvikio execute."""

    def __init__(self, future: Any, operation: str, keep: object) -> None:
        self._future = future
        self._operation = operation
        # The memory must not be freed before the transfer is over.
        self._keep = keep

    def bytes(self) -> int:
        """Wait for the transfer and return the bytes moved.

        Raises
        ------
        ApiError
            The kernel, CUDA or libcufile reported an error.
        """
        return int(_called(self._operation, self._future.get))


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
        kvikio = _load()
        if mode not in {"r", "w", "r+"}:
            message = f"mode {mode!r} is none of r, w, r+"
            raise UsageError(message)
        self.path = str(path)
        self._file = _called("kvikio.CuFile", lambda: kvikio.CuFile(self.path, mode))
        self._handle = Handle("cufile.kvikio_file")
        self._closed = False

    def read(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> PendingPart:
        """Start a read into device memory; see :meth:`gdrkit.cufile.FileHandle.read`."""
        return self._begin(
            "kvikio.pread",
            self._open().pread,
            memory,
            (file_offset_bytes, offset_bytes, length_bytes),
        )

    def write(
        self, memory: Memory, *, file_offset_bytes: int = 0, offset_bytes: int = 0, length_bytes: int | None = None
    ) -> PendingPart:
        """Start a write from device memory; see :meth:`read`."""
        return self._begin(
            "kvikio.pwrite",
            self._open().pwrite,
            memory,
            (file_offset_bytes, offset_bytes, length_bytes),
        )

    def close(self) -> None:
        """Close the file; a second close does nothing."""
        if self._closed:
            return
        self._file.close()
        self._closed = True
        self._handle.release()

    def _begin(
        self, operation: str, call: Callable[..., Any], memory: Memory, where: tuple[int, int, int | None]
    ) -> PendingPart:
        file_offset_bytes, offset_bytes, length_bytes = where
        wanted = check_memory(memory, offset_bytes=offset_bytes, length_bytes=length_bytes)
        if not 0 <= file_offset_bytes <= _OFFSET_MAX - wanted:
            message = f"{wanted} bytes at {file_offset_bytes} are in no file"
            raise UsageError(message)
        array = _Array(memory.address + offset_bytes, wanted)
        future = _called(operation, lambda: call(array, wanted, file_offset_bytes))
        return PendingPart(future, operation, (array, memory, self))

    def _open(self) -> Any:
        if self._closed:
            what = "the kvikio file"
            raise ClosedResource(what)
        return self._file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _called(operation: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        number = error.errno or errno.EIO
        raise _results.errno_error(operation=operation, number=number, arguments={}) from error
    except RuntimeError as error:
        raise _refused(operation, str(error)) from error


def _refused(operation: str, text: str) -> ApiError:
    # kvikio has no error numbers of its own. Its text contains those of cuFile, and the names of some errnos.
    number = next((int(found) for found in _CUFILE_NUMBER.findall(text) if int(found) in _results.NAMES), None)
    if number is not None:
        return _results.error_of(operation=operation, status=number, arguments={"text": text})
    named = next((each for each in errno.errorcode if f"{errno.errorcode[each]}" in text.split()), None)
    return ApiError(
        api=Api.CUFILE,
        operation=operation,
        status=named,
        status_name="RuntimeError" if named is None else errno_name(named),
        errno=named,
        reason=Reason.OTHER,
        detail=text,
    )
