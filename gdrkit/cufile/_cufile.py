"""Functions that call libcufile through ``cuda.bindings.cufile``. Only this file imports these bindings.

The first call loads libcuda and then libcufile, because libcufile (1.20) loads without libcuda but then does not work.
The bindings 13.5.0 lose errors of reads and writes: they return a negative CUfileOpError as a count, and raise a
ValueError for an errno. This module converts both to exceptions with the error number. If libcufile fills memory after
a call has returned, this module allocates the memory by ctypes, so that its address does not change. Source:
``cufile.h``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import itertools
import re
from typing import TYPE_CHECKING, Any

from gdrkit import loader
from gdrkit.cufile import _layout, _results
from gdrkit.errors import Api, SetupMissing
from gdrkit.remedies import pip_install

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AsyncArguments",
    "call",
    "call_transfer",
    "fetch_batch_events",
    "format_version",
    "get_driver_properties",
    "get_slab_arrays",
    "get_statistics",
    "get_string_parameter",
    "library_version",
    "load",
    "make_io_parameters",
    "make_io_vectors",
    "register_file",
    "set_slab_arrays",
    "set_string_parameter",
    "submit_batch",
    "use_count",
]

_CUDA_SONAME = "libcuda.so.1"
_CUFILE_SONAME = "libcufile.so.0"
_BINDINGS_MODULE = "cuda.bindings.cufile"
_OPAQUE_FD = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_BATCH_MODE = 1  # CUFILE_BATCH
_TEXT_BYTES_MAX = 4096  # Size of the buffer for a text parameter.
_STATISTICS_FUNCTION_BY_LEVEL = {1: "get_stats_l1", 2: "get_stats_l2", 3: "get_stats_l3"}
_INSTALL_ADVICE = (
    "install libcufile (of the CUDA toolkit, or pip install nvidia-cufile), or put its folder on LD_LIBRARY_PATH"
)
# The bindings raise "9 is not a valid OpError" for errno 9.
_ERRNO_PATTERN = re.compile(r"^(\d+) is not a valid OpError")


@functools.cache
def load() -> Any:
    """Load libcuda and libcufile and return the module cuda.bindings.cufile.

    Raises
    ------
    SetupMissing
        A library or the bindings are missing, damaged or of the wrong version.
    """
    _load_library(_CUDA_SONAME, "install the NVIDIA driver, or put the folder of a libcuda.so.1 on LD_LIBRARY_PATH")
    not_found_error: SetupMissing | None = None
    try:
        # The bindings use a libcufile that is already loaded, so the search path of the dynamic loader decides which
        # one they use. If the dynamic loader finds none (ENOENT), the bindings search other folders. Only if they find
        # none either, `not_found_error` is raised below.
        _load_library(_CUFILE_SONAME, _INSTALL_ADVICE)
    except SetupMissing as error:
        if error.errno != errno.ENOENT:
            raise
        not_found_error = error
    try:
        bindings = importlib.import_module(_BINDINGS_MODULE)
    except ImportError as error:
        raise loader.setup_missing(
            operation=f"import {_BINDINGS_MODULE}",
            text=str(error),
            what_to_do=pip_install("cufile"),
            default_errno=errno.ENOENT,
        ) from error
    # The import of the bindings succeeds even without libcufile. This call shows whether they can use it.
    try:
        bindings.get_version()
    except RuntimeError as error:
        if not_found_error is not None:
            raise not_found_error from error
        raise _make_wrong_abi_error("cuFileGetVersion", error) from error
    return bindings


def call(operation: str, function_name: str, /, **arguments: Any) -> Any:
    """Call a function of the bindings and return its result.

    `operation` is the name of the function in ``cufile.h``, for error texts. `function_name` is its name in the
    bindings. `arguments` have the names and the order of the header.

    Raises
    ------
    ApiError
        The library reported an error. Its CUfileOpError is the status.
    SetupMissing
        The library cannot be used, or does not have the function.
    """
    return _call_binding(operation, function_name, arguments, error_arguments=arguments)


def _call_binding(
    operation: str,
    function_name: str,
    arguments: dict[str, Any],
    *,
    error_arguments: dict[str, Any],
    result_list: list[Any] | None = None,
) -> Any:
    """Call a function of the bindings and return its result. An error shows `error_arguments` instead of `arguments`.

    If `result_list` is given, the function appends the result to this list and returns None. No signal handler runs
    between the call and the append, so that an interrupt cannot lose the result.
    """
    bindings = load()
    try:
        if result_list is not None:
            # extend() makes the call and appends the result within one step of the interpreter.
            result_list.extend(itertools.starmap(getattr(bindings, function_name), [tuple(arguments.values())]))
            return None
        return getattr(bindings, function_name)(*arguments.values())
    except bindings.cuFileError as error:
        raise _results.error_of(
            operation=operation,
            status=int(error.status),
            cuda_status=None if error.cuda_error is None else int(error.cuda_error),
            arguments=_make_printable(error_arguments),
        ) from error
    except (AttributeError, RuntimeError) as error:
        raise _make_wrong_abi_error(operation, error) from error


def call_transfer(operation: str, function_name: str, /, **arguments: Any) -> int:
    """Call a read or write function of the bindings and return the number of bytes moved.

    Raises
    ------
    ApiError
        The file system failed (``errno`` is set), or libcufile failed (``status`` is a CUfileOpError).
    """
    bindings = load()
    try:
        moved_bytes = int(getattr(bindings, function_name)(*arguments.values()))
    except bindings.cuFileError as error:
        raise _results.make_errno_error(
            operation=operation, error_number=int(error.status), arguments=_make_printable(arguments)
        ) from error
    except ValueError as error:
        errno_match = _ERRNO_PATTERN.match(str(error))
        if errno_match is None:
            raise
        raise _results.make_errno_error(
            operation=operation, error_number=int(errno_match[1]), arguments=_make_printable(arguments)
        ) from error
    except (AttributeError, RuntimeError) as error:
        raise _make_wrong_abi_error(operation, error) from error
    if moved_bytes < 0:
        raise _results.error_of(operation=operation, status=-moved_bytes, arguments=_make_printable(arguments))
    return moved_bytes


@functools.cache
def library_version() -> int:
    """Return the version of libcufile in the form of cuFileGetVersion: 1150 for 1.15."""
    return int(call("cuFileGetVersion", "get_version"))


def format_version() -> str:
    """Return the version of libcufile as text: ``1.15``."""
    version = library_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def use_count() -> int:
    """Return the use count of the driver in this process (cuFileUseCount).

    ctypes calls cuFileUseCount directly, because the bindings misread its result as an error status.
    """
    load()
    use_count_function = ctypes.CDLL(_CUFILE_SONAME).cuFileUseCount
    use_count_function.restype = ctypes.c_long
    return int(use_count_function())


def register_file(fd: int, native_handles: list[int]) -> None:
    """Register a descriptor by cuFileHandleRegister and append its CUfileHandle_t to `native_handles`."""
    descriptor_struct = load().Descr()
    # The constructor does not clear the 24 bytes of CUfileDescr_t, and libcufile would use the random contents.
    ctypes.memset(descriptor_struct.ptr, 0, ctypes.sizeof(ctypes.c_uint64) * 3)
    descriptor_struct.type = _OPAQUE_FD
    descriptor_struct.handle.fd = fd
    _call_binding(
        "cuFileHandleRegister",
        "handle_register",
        {"descr": descriptor_struct.ptr},
        error_arguments={"fd": fd},
        result_list=native_handles,
    )


def make_io_vectors(memory_ranges: Sequence[tuple[int, int]]) -> Any:
    """Return an array of CUfileIOVec_t, one for each pair (address, length in bytes) of `memory_ranges`."""
    vectors = load().IOVec(len(memory_ranges))
    for index, (address, length_bytes) in enumerate(memory_ranges):
        vectors[index].base_ = address
        vectors[index].len = length_bytes
    return vectors


class _IoParameters(ctypes.Structure):
    """The structure CUfileIOParams_t: one transfer of a batch."""

    _fields_ = (
        ("mode", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("file_offset", ctypes.c_int64),
        ("buffer_offset", ctypes.c_int64),
        ("length_bytes", ctypes.c_size_t),
        ("file", ctypes.c_void_p),
        ("opcode", ctypes.c_int),
        ("cookie", ctypes.c_void_p),
    )


class _IoEvent(ctypes.Structure):
    """The structure CUfileIOEvents_t: the result of one transfer of a batch."""

    _fields_ = (("cookie", ctypes.c_void_p), ("status", ctypes.c_int), ("result", ctypes.c_ssize_t))


def make_io_parameters(requests: Sequence[tuple[int, int, int, int, int, int, int]]) -> Any:
    """Return an array of CUfileIOParams_t.

    A request is (CUfileHandle_t, opcode, address, file offset, buffer offset, length, cookie). Offsets and the length
    are in bytes.
    """
    io_parameters = (_IoParameters * len(requests))()
    for entry, (file_handle, opcode, address, file_offset, buffer_offset, length_bytes, cookie) in zip(
        io_parameters, requests, strict=True
    ):
        entry.mode, entry.file, entry.opcode, entry.cookie = _BATCH_MODE, file_handle, opcode, cookie
        entry.address, entry.length_bytes = address, length_bytes
        entry.file_offset, entry.buffer_offset = file_offset, buffer_offset
    return io_parameters


class _Timespec(ctypes.Structure):
    """The structure timespec of the kernel."""

    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_long))


def fetch_batch_events(
    batch_id: int, *, count_min: int, count_max: int, timeout_s: float | None
) -> list[tuple[int, int, int]]:
    """Call cuFileBatchIOGetStatus and return (cookie, status, result) of each event.

    The call waits for `count_min` events, at most `timeout_s` seconds, or without limit if `timeout_s` is None.
    """
    events = (_IoEvent * count_max)()
    event_count = ctypes.c_uint(count_max)
    timespec = _Timespec()
    if timeout_s is not None:
        timespec.seconds, timespec.nanoseconds = int(timeout_s), int(timeout_s % 1 * 1e9)
    call(
        "cuFileBatchIOGetStatus",
        "batch_io_get_status",
        batch_idp=batch_id,
        min_nr=count_min,
        nr=ctypes.addressof(event_count),
        iocbp=ctypes.addressof(events),
        timeout=0 if timeout_s is None else ctypes.addressof(timespec),
    )
    return [(int(event.cookie or 0), int(event.status), int(event.result)) for event in events[: event_count.value]]


def submit_batch(batch_id: int, io_parameters: Any) -> None:
    """Submit an array that :func:`make_io_parameters` made, by cuFileBatchIOSubmit."""
    call(
        "cuFileBatchIOSubmit",
        "batch_io_submit",
        batch_idp=batch_id,
        nr=len(io_parameters),
        iocbp=ctypes.addressof(io_parameters),
        flags=0,
    )


class AsyncArguments:
    """Arguments and result of a transfer on a stream, at fixed addresses. They must live until the transfer ends."""

    def __init__(self, *, length_bytes: int, file_offset: int, buffer_offset: int) -> None:
        self._length = ctypes.c_size_t(length_bytes)
        self._file_offset = ctypes.c_int64(file_offset)
        self._buffer_offset = ctypes.c_int64(buffer_offset)
        self._result = ctypes.c_ssize_t(0)

    def addresses(self) -> tuple[int, int, int, int]:
        """Return the addresses of length, file offset, buffer offset and result."""
        return (
            ctypes.addressof(self._length),
            ctypes.addressof(self._file_offset),
            ctypes.addressof(self._buffer_offset),
            ctypes.addressof(self._result),
        )

    @property
    def result(self) -> int:
        """Number of bytes moved, or a negative error number; 0 before the stream has executed the transfer."""
        return self._result.value


def get_statistics(level: int) -> bytes:
    """Return the raw statistics of one level, which :mod:`gdrkit.cufile._layout` decodes."""
    operation = f"cuFileGetStatsL{level}"
    if library_version() < _layout.STATISTICS_VERSION_MIN:
        raise _results.make_missing_function_error(operation, version=format_version(), since="1.15")
    buffer = ctypes.create_string_buffer(_layout.BUFFER_BYTES)
    call(operation, _STATISTICS_FUNCTION_BY_LEVEL[level], stats=ctypes.addressof(buffer))
    return buffer.raw


def get_driver_properties() -> tuple[int, ...]:
    """Return the fields of CUfileDrvProps_t in order."""

    class Properties(ctypes.Structure):
        _fields_ = (
            ("major_version", ctypes.c_uint),
            ("minor_version", ctypes.c_uint),
            ("poll_threshold_kb", ctypes.c_size_t),
            ("max_direct_io_kb", ctypes.c_size_t),
            ("status_flags", ctypes.c_uint),
            ("control_flags", ctypes.c_uint),
            ("feature_flags", ctypes.c_uint),
            ("max_device_cache_kb", ctypes.c_uint),
            ("per_buffer_cache_kb", ctypes.c_uint),
            ("max_pinned_kb", ctypes.c_uint),
            ("max_batch_io", ctypes.c_uint),
            ("max_batch_timeout_ms", ctypes.c_uint),
        )

    properties_struct = Properties()
    call("cuFileDriverGetProperties", "driver_get_properties", props=ctypes.addressof(properties_struct))
    return tuple(int(getattr(properties_struct, name)) for name, _ in Properties._fields_)


def get_string_parameter(parameter_number: int) -> str:
    """Call cuFileGetParameterString and return the text."""
    return str(call("cuFileGetParameterString", "get_parameter_string", param=parameter_number, len=_TEXT_BYTES_MAX))


def set_string_parameter(parameter_number: int, text: str) -> None:
    """Set a text parameter by cuFileSetParameterString."""
    text_buffer = ctypes.create_string_buffer(text.encode())
    call(
        "cuFileSetParameterString",
        "set_parameter_string",
        param=parameter_number,
        desc_str=ctypes.addressof(text_buffer),
    )


def get_slab_arrays(slab_count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the buffer sizes in KiB and the numbers of buffers of the slabs of the POSIX pool, as two tuples.

    The POSIX pool is the pinned host memory of compat mode. A slab has buffers of one size. The function calls
    cuFileGetParameterPosixPoolSlabArray.
    """
    sizes_kib, counts = (ctypes.c_size_t * slab_count)(), (ctypes.c_size_t * slab_count)()
    call(
        "cuFileGetParameterPosixPoolSlabArray",
        "get_parameter_posix_pool_slab_array",
        size_values=ctypes.addressof(sizes_kib),
        count_values=ctypes.addressof(counts),
        len=slab_count,
    )
    return tuple(sizes_kib), tuple(counts)


def set_slab_arrays(sizes_kib: Sequence[int], counts: Sequence[int]) -> None:
    """Set the slabs of :func:`get_slab_arrays` by cuFileSetParameterPosixPoolSlabArray."""
    size_array = (ctypes.c_size_t * len(sizes_kib))(*sizes_kib)
    count_array = (ctypes.c_size_t * len(counts))(*counts)
    call(
        "cuFileSetParameterPosixPoolSlabArray",
        "set_parameter_posix_pool_slab_array",
        size_values=ctypes.addressof(size_array),
        count_values=ctypes.addressof(count_array),
        len=len(sizes_kib),
    )


def _load_library(soname: str, advice: str) -> None:
    """Load a library, or raise SetupMissing with this advice."""
    operation = f"dlopen {soname}"
    loader.check_library(soname, operation=operation)
    try:
        ctypes.CDLL(soname)
    except OSError as error:
        raise loader.setup_missing(
            operation=operation, text=str(error), what_to_do=advice, default_errno=errno.ENOEXEC
        ) from error


def _make_wrong_abi_error(operation: str, error: Exception) -> SetupMissing:
    """Return the exception for a function that libcufile (RuntimeError) or the bindings (AttributeError) lack."""
    return loader.setup_missing(
        api=Api.CUFILE,
        operation=operation,
        text=f"{loader.find_library(_CUFILE_SONAME) or _CUFILE_SONAME}: {error}",
        what_to_do="",
        default_errno=errno.ELIBBAD,
    )


def _make_printable(arguments: dict[str, Any]) -> dict[str, object]:
    """Return the arguments for an error message: numbers and texts, and the names of other types."""
    return {name: value if isinstance(value, int | str) else type(value).__name__ for name, value in arguments.items()}
