"""The functions of libnvidia-ml (NVML) that gdrkit uses, by ctypes. No other file names the library.

The source is the C header nvml.h. ``cuda.bindings.nvml`` of the pinned version imports numpy, which nothing else here
needs, and its older versions do not have the module. Only queries are called; no setting is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from gdrkit import loader
from gdrkit.errors import Api, ApiError, Reason, SetupMissing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["bar1_bytes", "device_handles", "driver_version", "number", "opened", "pci_bus_id"]

_SONAME = "libnvidia-ml.so.1"
_DLOPEN = f"dlopen {_SONAME}"
_TEXT_BYTES = 96
# Values of nvmlReturn_t (nvml.h) that describe the state of the machine.
_NAMES = {
    1: "NVML_ERROR_UNINITIALIZED",
    2: "NVML_ERROR_INVALID_ARGUMENT",
    3: "NVML_ERROR_NOT_SUPPORTED",
    4: "NVML_ERROR_NO_PERMISSION",
    6: "NVML_ERROR_NOT_FOUND",
    9: "NVML_ERROR_DRIVER_NOT_LOADED",
    12: "NVML_ERROR_LIBRARY_NOT_FOUND",
    13: "NVML_ERROR_FUNCTION_NOT_FOUND",
    15: "NVML_ERROR_GPU_IS_LOST",
    18: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    999: "NVML_ERROR_UNKNOWN",
}
_REASONS = {
    3: Reason.NOT_SUPPORTED,
    4: Reason.NO_PERMISSION,
    6: Reason.NO_DEVICE,
    9: Reason.NO_DEVICE,
    13: Reason.NOT_SUPPORTED,
    18: Reason.LIBRARY_WRONG_ABI,
}
_ADVICE = {
    4: "let this user read and write /dev/nvidiactl and /dev/nvidia*",
    9: "load the kernel module nvidia",
    18: "reboot, or reload the kernel module: its version and that of libnvidia-ml differ",
}


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Bar1(ctypes.Structure):
    """nvmlBAR1Memory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """Load and initialise NVML, and shut it down at the end.

    Raises
    ------
    SetupMissing
        The library is missing or damaged, or no driver is loaded.
    """
    loader.check_library(_SONAME, operation=_DLOPEN)
    try:
        library = ctypes.CDLL(_SONAME)
    except OSError as error:
        raise loader.setup_missing(
            operation=_DLOPEN, text=str(error), what_to_do="install the NVIDIA driver", default_errno=2
        ) from error
    status = int(_function(library, "nvmlInit_v2")())
    if status:
        raise _error(SetupMissing, "nvmlInit_v2", status, {})
    try:
        yield library
    finally:
        _function(library, "nvmlShutdown")()


def driver_version(library: Any) -> str:
    """Return the version of the NVIDIA driver, e.g. ``580.159.04``."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, "nvmlSystemGetDriverVersion", text, ctypes.c_uint(_TEXT_BYTES))
    return text.value.decode("utf-8", "backslashreplace")


def device_handles(library: Any) -> tuple[Any, ...]:
    """Return the handle of each device, in NVML's order, which is the order of the PCI bus."""
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        handles.append(handle)
    return tuple(handles)


def pci_bus_id(library: Any, handle: Any) -> str:
    """Return the PCI address as sysfs writes it, ``0000:1b:00.0``. NVML writes the domain with eight digits."""
    found = _PciInfo()
    _call(library, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(found))
    return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.0"


def bar1_bytes(library: Any, handle: Any) -> tuple[int, int] | None:
    """Return the size of BAR1 and its free part, in bytes, or None if the device has no BAR1."""
    found = _Bar1()
    if not _is_supported(library, "nvmlDeviceGetBAR1MemoryInfo", handle, ctypes.byref(found)):
        return None
    return int(found.total), int(found.free)


def number(library: Any, name: str, *handles: Any) -> int | None:
    """Call a function of the form ``nvmlDeviceGet...(device ..., unsigned *)`` and return the number that it stores, or
    None if the device does not support it.
    """
    found = ctypes.c_uint()
    return int(found.value) if _is_supported(library, name, *handles, ctypes.byref(found)) else None


def _is_supported(library: Any, name: str, *arguments: Any) -> bool:
    try:
        _call(library, name, *arguments)
    except ApiError as error:
        if error.reason is Reason.NOT_SUPPORTED:
            return False
        raise
    return True


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = int(_function(library, name)(*arguments))
    if status:
        raise _error(ApiError, name, status, {})


def _function(library: Any, name: str) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise _error(ApiError, name, 13, {"library": _SONAME}) from error
    function.restype = ctypes.c_int
    return function


def _error(kind: type[ApiError], operation: str, status: int, arguments: Mapping[str, object]) -> ApiError:
    return kind(
        api=Api.NVML,
        operation=operation,
        status=status,
        status_name=_NAMES.get(status, "nvmlReturn_t"),
        arguments=arguments,
        reason=_REASONS.get(status, Reason.OTHER),
        what_to_do=_ADVICE.get(status, "run nvidia-smi, which names what the driver lacks"),
    )
