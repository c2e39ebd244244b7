"""Calls of the CUDA driver API, by ``cuda.bindings`` and, where the bindings lack something, by ctypes.

No other file of gdrkit imports ``cuda.bindings.driver``. libcuda is opened by the first call. Almost every call uses
:func:`call`, which turns a CUresult other than success into an exception with the operation, the number, its name and
the arguments. Untyped values of the bindings do not leave this package. Source: the CUDA driver API reference.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdrkit import loader
from gdrkit.cuda import _results
from gdrkit.errors import Api, Reason, SetupMissing, errno_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "array_at",
    "buffer_id",
    "call",
    "call_float",
    "call_int",
    "call_int_pair",
    "call_string",
    "call_uuid",
    "enum_member",
    "initialize",
    "ipc_handle_bytes",
    "ipc_handle_from_bytes",
    "make_existence_check",
    "new_structure",
    "push_context",
    "uninitialized_bytes",
]

_SONAME = "libcuda.so.1"
_DLOPEN_OPERATION = f"dlopen {_SONAME}"
_IMPORT_OPERATION = "import cuda.bindings.driver"
_DRIVER_ADVICE = "install the NVIDIA driver, or put the folder of a libcuda.so.1 on LD_LIBRARY_PATH"
_DEVICE_FOLDER = Path("/dev")
# This list has the function cuPointerGetAttribute of the bindings and the attribute BUFFER_ID. It is empty before the
# first use.
_buffer_id_query: list[Any] = []
_BUFFER_ID_ATTRIBUTE = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


@functools.cache
def _load_bindings() -> Any:
    """Return cuda.bindings.driver after checking that it can use libcuda."""
    # The bindings report every fault of libcuda as "not found". So this function opens the library first, to get the
    # real error. Afterwards the bindings get the same library by its SONAME.
    loader.check_library(_SONAME, operation=_DLOPEN_OPERATION)
    try:
        library = ctypes.CDLL(_SONAME)
    except OSError as error:
        raise loader.setup_missing(
            operation=_DLOPEN_OPERATION, text=str(error), what_to_do=_DRIVER_ADVICE, default_errno=errno.ENOEXEC
        ) from error
    # cuda-bindings 13 looks up all other functions with cuGetProcAddress_v2, which libcuda has since CUDA 12.0.
    if not hasattr(library, "cuGetProcAddress_v2"):
        raise loader.setup_missing(
            operation=_DLOPEN_OPERATION,
            text=f"{loader.find_library(_SONAME) or _SONAME}: undefined symbol: cuGetProcAddress_v2",
            what_to_do="",
            default_errno=errno.ELIBBAD,
        )
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise loader.setup_missing(
            operation=_IMPORT_OPERATION,
            text=str(error),
            what_to_do="pip install 'cuda-bindings>=13,<14'",
            default_errno=errno.ENOENT,
        ) from error


@functools.cache
def initialize() -> None:
    """Call cuInit once.

    Raises
    ------
    SetupMissing
        The library, a device or a permission is missing.
    """
    cu_init = _load_bindings().cuInit
    try:
        (result,) = cu_init(0)
    except RuntimeError as error:
        raise _make_missing_function_error("cuInit", error) from error
    status = int(result)
    if status == 0:
        return
    permission_error = _find_permission_error()
    reason, advice, error_number = Reason.OTHER, "run nvidia-smi; its output says what the driver lacks", None
    if permission_error is not None and status in {_results.NO_DEVICE, _results.OPERATING_SYSTEM, _results.UNKNOWN}:
        reason, error_number = Reason.NO_PERMISSION, permission_error.errno
        advice = f"give this user read and write permission for {permission_error.filename}"
    elif status == _results.NO_DEVICE:
        reason, advice = Reason.NO_DEVICE, "check that nvidia-smi lists a GPU"
    elif status == _results.INVALID_VALUE:
        # cuInit(0) has no argument that could be wrong. So the library refused its configuration, such as a variable of
        # the software twin, and wrote the reason to stderr.
        reason, advice = Reason.MALFORMED, "read the error that the library wrote to stderr, and correct what it names"
    elif status in {_results.OPERATING_SYSTEM, _results.UNKNOWN}:
        advice = "check that the kernel module nvidia is loaded and that /dev/nvidiactl exists"
    raise SetupMissing(
        api=Api.CUDA,
        operation="cuInit",
        status=status,
        status_name=_find_result_name(result),
        errno=error_number,
        arguments={"Flags": 0},
        reason=reason,
        what_to_do=advice,
        detail="" if permission_error is None else f"{permission_error.filename}: {errno_name(permission_error.errno)}",
    ) from permission_error


def call(operation: str, /, **arguments: Any) -> Any:
    """Call a driver function. `arguments` have the names and the order of its prototype in cuda.h, without the outputs.

    Returns
    -------
    The values that the function returns besides its CUresult: None, one value, or a tuple.

    Raises
    ------
    ApiError
        The CUresult is not success. The class is :class:`~gdrkit.errors.Unsupported` for CUDA_ERROR_NOT_SUPPORTED.
    SetupMissing
        The library cannot be used at all, or it is too old to have this function.
    """
    initialize()
    function = getattr(_load_bindings(), operation)
    try:
        result, *values = function(*arguments.values())
    except RuntimeError as error:
        raise _make_missing_function_error(operation, error) from error
    if int(result):
        raise _results.error_of(
            operation=operation,
            status=int(result),
            status_name=_find_result_name(result),
            arguments={name: _describe_argument(value) for name, value in arguments.items()},
        )
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _load_buffer_id_query() -> None:
    initialize()
    bindings = _load_bindings()
    _buffer_id_query.extend((bindings.cuPointerGetAttribute, bindings.CUpointer_attribute(_BUFFER_ID_ATTRIBUTE)))


def buffer_id(address: int) -> int:
    """Return the driver's id of the allocation at `address`. No current context is needed (tested on an H200)."""
    if not _buffer_id_query:
        _load_buffer_id_query()
    get_attribute, attribute = _buffer_id_query
    result, current_id = get_attribute(attribute, address)
    if int(result):
        raise _results.error_of(
            operation="cuPointerGetAttribute",
            status=int(result),
            status_name=_find_result_name(result),
            arguments={"attribute": attribute.name, "ptr": address},
        )
    return int(current_id)


def make_existence_check(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    """Return a function that checks whether all allocations of `key` still exist.

    `key` has (address, length_bytes, buffer id) of each allocation. The returned function returns True if each address
    still has its buffer id. It runs at every hit of the region cache, so it must be fast: each address is converted to
    the type of the bindings only once, here. If cuPointerGetAttribute fails, the bindings return None in place of the
    id, and None is not equal to any id.
    """
    if not _buffer_id_query:
        _load_buffer_id_query()
    get_attribute, attribute = _buffer_id_query
    allocations = [
        (_load_bindings().CUdeviceptr(base_address), expected_id) for base_address, _length_bytes, expected_id in key
    ]
    if len(allocations) == 1:
        ((allocation_address, only_expected_id),) = allocations
        return lambda: get_attribute(attribute, allocation_address)[1] == only_expected_id

    def are_all_present() -> bool:
        for address, expected_id in allocations:  # noqa: SIM110 - all() with a generator would double the time.
            if get_attribute(attribute, address)[1] != expected_id:
                return False
        return True

    return are_all_present


def call_int(operation: str, /, **arguments: Any) -> int:
    """Call a function that returns one number, address or handle."""
    return int(call(operation, **arguments))


def call_float(operation: str, /, **arguments: Any) -> float:
    """Call a function that returns one float."""
    return float(call(operation, **arguments))


def call_int_pair(operation: str, /, **arguments: Any) -> tuple[int, int]:
    """Call a function that returns two numbers."""
    first, second = call(operation, **arguments)
    return int(first), int(second)


def call_string(operation: str, /, **arguments: Any) -> str:
    """Call a function that returns a C string."""
    return bytes(call(operation, **arguments)).split(b"\0", 1)[0].decode()


def call_uuid(operation: str, /, **arguments: Any) -> bytes:
    """Call a function that returns a CUuuid, and return its bytes."""
    return bytes(call(operation, **arguments).bytes)


def enum_member(enumeration_name: str, number: int) -> object:
    """Return the member of an enumeration with this number. The bindings do not accept numbers instead of members."""
    return getattr(_load_bindings(), enumeration_name)(number)


def new_structure(type_name: str, /, **fields: Any) -> object:
    """Return a new structure of the bindings with these fields set; ``location__id`` sets ``location.id``."""
    instance = getattr(_load_bindings(), type_name)()
    for field_path, value in fields.items():
        *outer_names, inner_name = field_path.split("__")
        inner_structure = instance
        for outer_name in outer_names:
            inner_structure = getattr(inner_structure, outer_name)
        setattr(inner_structure, inner_name, value)
    return instance


@contextlib.contextmanager
def push_context(context_handle: int) -> Iterator[None]:
    """Make the context of `context_handle` current, and restore the previous one afterwards."""
    call("cuCtxPushCurrent", ctx=context_handle)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def uninitialized_bytes(length_bytes: int) -> bytes:
    """Return a new bytes object with undefined content, which the caller must overwrite immediately.

    The C API allows the creator of a bytes object to write to it until other code sees it. This saves time for large
    sizes such as 64 MiB: ``bytes(n)`` would clear the memory first, and ``bytes(bytearray)`` would copy it afterwards.
    """
    new_uninitialized = ctypes.pythonapi.PyBytes_FromStringAndSize
    new_uninitialized.restype = ctypes.py_object
    new_uninitialized.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    new_bytes: bytes = new_uninitialized(None, length_bytes)
    return new_bytes


def array_at(address: int, length_bytes: int) -> Any:
    """Return a ctypes array over the host bytes at an address, which it does not own.

    The caller makes memory views of the array. Each view keeps the array alive. So a weak reference to the array shows
    whether a view still exists.
    """
    return (ctypes.c_ubyte * length_bytes).from_address(address)


def ipc_handle_bytes(address: int) -> bytes:
    """Call cuIpcGetMemHandle and return the handle as 64 bytes.

    The bindings do not expose these bytes, so this function reads them by ctypes.
    """
    handle = call("cuIpcGetMemHandle", dptr=address)
    return ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES)


def ipc_handle_from_bytes(handle_bytes: bytes) -> object:
    """Return a CUipcMemHandle made of the 64 bytes in `handle_bytes`."""
    handle = _load_bindings().CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), handle_bytes, _IPC_HANDLE_BYTES)
    return handle


def _make_missing_function_error(operation: str, error: RuntimeError) -> SetupMissing:
    # The bindings raise RuntimeError (FunctionNotFoundError, DynamicLibNotFoundError) if libcuda lacks a function.
    return loader.setup_missing(
        api=Api.CUDA,
        operation=operation,
        text=f"{loader.find_library(_SONAME) or _SONAME}: {error}",
        what_to_do="",
        default_errno=errno.ELIBBAD,
    )


def _find_permission_error() -> OSError | None:
    """Return the error of opening an NVIDIA device node that this user may not open, or None if there is none."""
    for path in sorted(_DEVICE_FOLDER.glob("nvidia*")):
        if not path.is_char_device():
            continue
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EPERM}:
                return error
    return None


def _find_result_name(result: Any) -> str:
    return str(getattr(result, "name", f"CUresult {int(result)}"))


def _describe_argument(value: Any) -> object:
    if hasattr(value, "name"):
        return value.name  # A member of an enumeration of the bindings.
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{memoryview(value).nbytes} bytes>"
    return value if isinstance(value, int | str) else type(value).__name__
