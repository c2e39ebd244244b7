"""Calls of the hl-thunk library, by ctypes. No other file uses the library.

The library is opened at the first call. :func:`call` turns a failure into an exception with the operation, the errno
and the arguments. Most functions report a failure as -errno. ``hlthunk_open`` and ``hlthunk_close`` report it as -1,
and functions that return an address or a handle as 0, each with errno set.

Source: ``hlthunk.h`` of hl-thunk-open, 2023-05. Newer versions have the same functions for memory and dma-bufs.

``hlthunk_device_memory_alloc`` has two signatures under one name: until 2021 ``(fd, size, contiguous, shared)``, since
2022-06 ``(fd, size, page_size, contiguous, shared)``. The second signature was added together
with ``hlthunk_get_dev_memalloc_page_orders``, so a library that exports this function has the second signature. With
any other library, gdrkit refuses to allocate, because a call with the wrong signature would silently allocate other
memory than requested.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from gdrkit import loader
from gdrkit.errors import Api, Reason, SetupMissing, errno_name
from gdrkit.gaudi._errors import error_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ANY_DEVICE_NAME",
    "DMA_DOWN_QUEUE",
    "DMA_UP_QUEUE",
    "HardwareInfo",
    "address_of",
    "call",
    "close",
    "device_count",
    "hardware_info",
    "pci_bus_id",
    "request_command_buffer",
    "require_page_size_parameter",
    "submit",
    "wait",
]

_SONAMES = ("libhl-thunk.so", "libhlthunk.so")
_DLOPEN_OPERATION = f"dlopen {_SONAMES[0]}"
_INSTALL_ADVICE = (
    "install habanalabs-thunk, or put the folder of a libhl-thunk.so (often /usr/lib/habanalabs) on LD_LIBRARY_PATH"
)
# If the library exports this function, hlthunk_device_memory_alloc has the parameter page_size.
_PAGE_ORDERS_FUNCTION = "hlthunk_get_dev_memalloc_page_orders"
_ALLOCATE_FUNCTION = "hlthunk_device_memory_alloc"

ANY_DEVICE_NAME = 4  # HLTHUNK_DEVICE_DONT_CARE, a value of enum hlthunk_device_name
_MINOR_COUNT_MAX = 256  # HLTHUNK_MAX_MINOR
_BUS_ID_BYTES = 13  # "0000:33:00.0" and its NUL

DMA_DOWN_QUEUE = 0  # GAUDI_QUEUE_ID_DMA_0_0, GAUDI2_QUEUE_ID_PDMA_0_0: host to device
DMA_UP_QUEUE = 4  # GAUDI_QUEUE_ID_DMA_1_0, GAUDI2_QUEUE_ID_PDMA_1_0: device to host
_USER_BUFFER_FLAG = 1  # HL_CS_CHUNK_FLAGS_USER_ALLOC_CB: the program has allocated the command buffer.
# struct hl_cs_chunk: command buffer, queue index, length of the commands, flags, collective engine id, padding.
_COMMAND_CHUNK = struct.Struct("<QIIII40x")
# struct hlthunk_cs_in: addresses of the restore and execute chunks, their two counts, flags, padding.
_SUBMISSION_IN = struct.Struct("<QQIIII")
# struct hlthunk_cs_out: sequence number, status, count of the sync object, padding.
_SUBMISSION_OUT = struct.Struct("<QIHH")

_WAIT_BUSY = 1  # HL_WAIT_CS_STATUS_BUSY
_WAIT_COMPLETED = 0  # HL_WAIT_CS_STATUS_COMPLETED
_WAIT_ABORTED = 3  # HL_WAIT_CS_STATUS_ABORTED

# Size of the buffer for struct hlthunk_hw_ip_info. It has room for the longer structure of a newer library.
_INFO_BUFFER_BYTES = 4096
# The used fields of that structure: offset in bytes, and format of the struct module.
_INFO_FIELDS = {
    "dram_base_address": (8, "<Q"),
    "dram_size": (16, "<Q"),
    "device_id": (32, "<I"),
    "dram_enabled": (58, "<B"),
    "module_id": (188, "<I"),
    "card_name": (192, "<16s"),
    "dram_page_size": (224, "<Q"),
    "default_page_size": (264, "<Q"),
}

_INT, _UINT, _U64, _CHAR_POINTER = ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
_POINTER = ctypes.c_void_p

# Argument types of the functions that return 0 or -errno.
_STATUS_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "hlthunk_open": (_INT, _CHAR_POINTER),
    "hlthunk_open_control": (_INT, _CHAR_POINTER),
    "hlthunk_close": (_INT,),
    "hlthunk_get_device_count": (_INT,),
    "hlthunk_get_pci_bus_id_from_fd": (_INT, _POINTER, _INT),
    "hlthunk_get_hw_ip_info": (_INT, _POINTER),
    "hlthunk_device_memory_free": (_INT, _U64),
    "hlthunk_memory_unmap": (_INT, _U64),
    "hlthunk_device_memory_export_dmabuf_fd": (_INT, _U64, _U64, _UINT),
    "hlthunk_device_mapped_memory_export_dmabuf_fd": (_INT, _U64, _U64, _U64, _UINT),
    "hlthunk_request_command_buffer": (_INT, _UINT, _POINTER),
    "hlthunk_destroy_command_buffer": (_INT, _U64),
    "hlthunk_command_submission": (_INT, _POINTER, _POINTER),
    "hlthunk_wait_for_cs": (_INT, _U64, _U64, _POINTER),
}
# Argument types of the functions that return a 64-bit handle or address, or 0 on failure.
_VALUE_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    _ALLOCATE_FUNCTION: (_INT, _U64, _U64, ctypes.c_bool, ctypes.c_bool),
    "hlthunk_device_memory_map": (_INT, _U64, _U64),
    "hlthunk_host_memory_map": (_INT, _POINTER, _U64, _U64),
}


class HardwareInfo(NamedTuple):
    """The used fields of ``struct hlthunk_hw_ip_info``, by which the driver describes a device. Sizes are in bytes."""

    dram_base_address: int
    dram_size: int
    device_id: int
    dram_enabled: int
    module_id: int
    card_name: str
    dram_page_size: int
    default_page_size: int


@functools.cache
def _load_library() -> ctypes.CDLL:
    reported_error: OSError | None = None
    for soname in _SONAMES:
        loader.check_library(soname, operation=f"dlopen {soname}")
        try:
            return ctypes.CDLL(soname, use_errno=True)
        except OSError as error:
            # If neither file is found, the error of the first name is raised. If a file is found but does not load, its
            # error is raised instead.
            if reported_error is None or "cannot open shared object" not in str(error):
                reported_error = error
    raise loader.setup_missing(
        operation=_DLOPEN_OPERATION, text=str(reported_error), what_to_do=_INSTALL_ADVICE, default_errno=errno.ENOEXEC
    ) from reported_error


@functools.cache
def _find_function(operation: str) -> Any:
    try:
        function = getattr(_load_library(), operation)
    except AttributeError as error:
        raise SetupMissing(
            api=Api.HLTHUNK,
            operation=operation,
            status=errno.ELIBBAD,
            status_name=errno_name(errno.ELIBBAD),
            errno=errno.ELIBBAD,
            reason=Reason.LIBRARY_WRONG_ABI,
            what_to_do="install an hl-thunk of 2022-06 (with support of Gaudi2) or newer",
            detail="the library does not have this function",
        ) from error
    function.argtypes = _STATUS_FUNCTIONS[operation] if operation in _STATUS_FUNCTIONS else _VALUE_FUNCTIONS[operation]
    function.restype = _INT if operation in _STATUS_FUNCTIONS else _U64
    return function


def _has_function(operation: str) -> bool:
    """Return whether the library exports a function."""
    return hasattr(_load_library(), operation)


def require_page_size_parameter() -> None:
    """Check that ``hlthunk_device_memory_alloc`` has the parameter page_size.

    Raises
    ------
    SetupMissing
        ELIBBAD, LIBRARY_WRONG_ABI: the signature is unknown.
    """
    if not _has_function(_PAGE_ORDERS_FUNCTION):
        raise SetupMissing(
            api=Api.HLTHUNK,
            operation=_ALLOCATE_FUNCTION,
            status=errno.ELIBBAD,
            status_name=errno_name(errno.ELIBBAD),
            errno=errno.ELIBBAD,
            reason=Reason.LIBRARY_WRONG_ABI,
            what_to_do="install an hl-thunk of 2022-06 (with support of Gaudi2) or newer",
            detail=f"the library does not export {_PAGE_ORDERS_FUNCTION}, so the arguments of this"
            " function are unknown",
        )


def call(operation: str, /, **arguments: Any) -> int:
    """Call the function `operation` and return its result. `arguments` has the names and the order of hlthunk.h.

    Raises
    ------
    ApiError
        The function failed. ``errno`` is the number that the kernel returned.
    SetupMissing
        The library is missing, or it lacks the function.
    """
    return _call(operation, arguments, error_arguments=arguments)


def _call(operation: str, arguments: Mapping[str, Any], *, error_arguments: Mapping[str, object]) -> int:
    """Call a function. If it fails, the exception contains `error_arguments`, which has no pointers to buffers."""
    function = _find_function(operation)
    ctypes.set_errno(0)
    result = int(function(*arguments.values()))
    if operation in _VALUE_FUNCTIONS:
        error_number = (ctypes.get_errno() or errno.EINVAL) if result == 0 else 0
    else:
        # hlthunk_open and hlthunk_close return -1 and set errno. All other functions return -errno,
        # so -1 without an errno is -EPERM.
        error_number = 0 if result >= 0 else (ctypes.get_errno() or errno.EPERM) if result == -1 else -result
    if error_number:
        raise error_of(operation=operation, error_number=error_number, arguments=error_arguments)
    return result


def close(fd: int) -> None:
    """Call hlthunk_close."""
    call("hlthunk_close", fd=fd)


def device_count() -> int:
    """Return the number of devices.

    An older library cannot count the devices. With it, gdrkit counts the control devices that it can open.
    """
    if _has_function("hlthunk_get_device_count"):
        return call("hlthunk_get_device_count", device_name=ANY_DEVICE_NAME)
    open_control = _find_function("hlthunk_open_control")
    opened_fds = [fd for fd in (int(open_control(minor, None)) for minor in range(_MINOR_COUNT_MAX)) if fd >= 0]
    for fd in opened_fds:
        close(fd)
    return len(opened_fds)


def pci_bus_id(fd: int) -> str:
    """Return the PCI address of a compute or control device, such as ``0000:33:00.0``."""
    bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
    arguments = {"fd": fd, "pci_bus_id": bus_id, "len": _BUS_ID_BYTES}
    _call("hlthunk_get_pci_bus_id_from_fd", arguments, error_arguments={"fd": fd})
    return bus_id.value.decode()


def hardware_info(fd: int) -> HardwareInfo:
    """Return the result of hlthunk_get_hw_ip_info for a compute or control device."""
    buffer = ctypes.create_string_buffer(_INFO_BUFFER_BYTES)
    _call("hlthunk_get_hw_ip_info", {"fd": fd, "hw_ip": buffer}, error_arguments={"fd": fd})
    fields: dict[str, Any] = {
        name: struct.unpack_from(field_format, buffer, offset_bytes)[0]
        for name, (offset_bytes, field_format) in _INFO_FIELDS.items()
    }
    fields["card_name"] = fields["card_name"].split(b"\0", 1)[0].decode("ascii", "backslashreplace")
    return HardwareInfo(**fields)


def submit(fd: int, *, command_buffer: int, length_bytes: int, queue_index: int, is_mapped: bool) -> int:
    """Submit one command buffer with hlthunk_command_submission. Return the sequence number of the submission.

    Parameters
    ----------
    command_buffer : int
        The handle of the command buffer, or its device address if `is_mapped`.
    length_bytes : int
        Size of the commands in the buffer.
    queue_index : int
        Index of the queue of the device, such as `DMA_DOWN_QUEUE`.
    is_mapped : bool
        Whether the buffer is memory of this process that is mapped to the device. Otherwise the driver allocated it.
    """
    chunk = ctypes.create_string_buffer(
        _COMMAND_CHUNK.pack(command_buffer, queue_index, length_bytes, _USER_BUFFER_FLAG if is_mapped else 0, 0)
    )
    submission = ctypes.create_string_buffer(_SUBMISSION_IN.pack(0, ctypes.addressof(chunk), 0, 1, 0, 0))
    output = ctypes.create_string_buffer(_SUBMISSION_OUT.size)
    error_arguments = {"fd": fd, "cb": command_buffer, "queue_index": queue_index, "cb_size": length_bytes}
    _call("hlthunk_command_submission", {"fd": fd, "in": submission, "out": output}, error_arguments=error_arguments)
    sequence, status, _sync_count, _pad = _SUBMISSION_OUT.unpack(output.raw[: _SUBMISSION_OUT.size])
    if status:  # HL_CS_STATUS_SUCCESS is 0.
        raise error_of(
            operation="hlthunk_command_submission",
            error_number=errno.EIO,
            arguments=error_arguments,
            detail=f"{status=}",
        )
    return int(sequence)


def wait(fd: int, sequence: int, *, timeout_us: int) -> bool:
    """Wait at most `timeout_us` with hlthunk_wait_for_cs. Return whether the submission is complete.

    Raises
    ------
    ApiError
        EIO: the submission was aborted, and the device is being reset. ETIMEDOUT: the driver gave up the submission
        (HL_WAIT_CS_STATUS_TIMEDOUT).
    """
    status = ctypes.c_uint32()
    arguments = {"fd": fd, "seq": sequence, "timeout_us": timeout_us, "status": ctypes.byref(status)}
    error_arguments = {"fd": fd, "seq": sequence, "timeout_us": timeout_us}
    _call("hlthunk_wait_for_cs", arguments, error_arguments=error_arguments)
    if status.value in {_WAIT_COMPLETED, _WAIT_BUSY}:
        return status.value == _WAIT_COMPLETED
    error_number = errno.EIO if status.value == _WAIT_ABORTED else errno.ETIMEDOUT
    raise error_of(operation="hlthunk_wait_for_cs", error_number=error_number, arguments=error_arguments)


def request_command_buffer(fd: int, size_bytes: int) -> int:
    """Allocate a command buffer with hlthunk_request_command_buffer. Return its handle.

    The handle is also the offset at which mmap of the device file maps the buffer.
    """
    handle = ctypes.c_uint64()
    arguments = {"fd": fd, "cb_size": size_bytes, "cb_handle": ctypes.byref(handle)}
    _call("hlthunk_request_command_buffer", arguments, error_arguments={"fd": fd, "cb_size": size_bytes})
    return handle.value


def address_of(buffer: Any) -> int:
    """Return the address of the first byte of a writable buffer. It is valid until the buffer is closed or resized."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
