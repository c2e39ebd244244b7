"""Calls of NVML through ``pynvml`` (nvidia-ml-py), with its errors converted to errors of gdrkit.

Only this file uses pynvml. gdrkit calls only the functions of NVML that query and change no setting.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
from functools import cache
from typing import TYPE_CHECKING, Any

from gdrkit import loader
from gdrkit.errors import Api, ApiError, Reason, SetupMissing

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NVLINKS_MAX", "call", "call_if_supported", "initialized", "pci_bus_id"]

NVLINKS_MAX = 36  # NVML_NVLINK_MAX_LINKS of nvml.h 13.
_NVML_SONAME = "libnvidia-ml.so.1"
_LOAD_OPERATION = f"dlopen {_NVML_SONAME}"
_REASON_BY_STATUS_NAME = {
    "NVML_ERROR_NOT_SUPPORTED": Reason.NOT_SUPPORTED,
    "NVML_ERROR_NO_PERMISSION": Reason.NO_PERMISSION,
    "NVML_ERROR_NOT_FOUND": Reason.NO_DEVICE,
    "NVML_ERROR_DRIVER_NOT_LOADED": Reason.NO_DEVICE,
    "NVML_ERROR_FUNCTION_NOT_FOUND": Reason.NOT_SUPPORTED,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": Reason.LIBRARY_WRONG_ABI,
}
_ADVICE_BY_STATUS_NAME = {
    "NVML_ERROR_NO_PERMISSION": "give this user read and write permission for /dev/nvidiactl and /dev/nvidia*",
    "NVML_ERROR_DRIVER_NOT_LOADED": "load the kernel module nvidia",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": (
        "reboot, or reload the kernel module: its version and the version of libnvidia-ml differ"
    ),
}


@cache
def _load_pynvml() -> Any:
    """Import pynvml. This happens at the first query, because the import takes 20 ms."""
    return importlib.import_module("pynvml")


@contextlib.contextmanager
def initialized() -> Iterator[None]:
    """Load and initialise NVML, and shut it down at the end of the context.

    Raises
    ------
    SetupMissing
        The library is missing or damaged, or no driver is loaded.
    """
    loader.check_library(_NVML_SONAME, operation=_LOAD_OPERATION)
    pynvml = _load_pynvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        # pynvml reports every failure of dlopen(3) as a missing library. The error of the loader is the
        # ``__context__`` of the error of pynvml.
        if isinstance(error.__context__, OSError):
            raise loader.setup_missing(
                operation=_LOAD_OPERATION,
                text=str(error.__context__),
                what_to_do="install the NVIDIA driver",
                default_errno=errno.ELIBBAD,
            ) from error
        raise _make_error(SetupMissing, "nvmlInit", int(error.value)) from error
    try:
        yield
    finally:
        call("nvmlShutdown")


def call(function_name: str, *arguments: Any) -> Any:
    """Call a function of NVML by its name and return its result; a failure is an :class:`ApiError`."""
    pynvml = _load_pynvml()
    try:
        return getattr(pynvml, function_name)(*arguments)
    except pynvml.NVMLError as error:
        raise _make_error(ApiError, function_name, int(error.value)) from error


def call_if_supported(function_name: str, *arguments: Any) -> Any | None:
    """Call a function of NVML by its name, and return None if the device or the library does not support it."""
    try:
        return call(function_name, *arguments)
    except ApiError as error:
        if error.reason is Reason.NOT_SUPPORTED:
            return None
        raise


def pci_bus_id(handle: Any) -> str:
    """Return the PCI address of a GPU as in sysfs, ``0000:1b:00.0``. NVML writes the domain with eight digits."""
    pci_info = call("nvmlDeviceGetPciInfo_v3", handle)
    return f"{pci_info.domain:04x}:{pci_info.bus:02x}:{pci_info.device:02x}.0"


def _make_error(error_type: type[ApiError], operation: str, status: int) -> ApiError:
    matching_names = (
        name for name, value in vars(_load_pynvml()).items() if name.startswith("NVML_ERROR_") and value == status
    )
    # An unknown status gets the name of the type of all statuses.
    status_name = next(matching_names, "nvmlReturn_t")
    return error_type(
        api=Api.NVML,
        operation=operation,
        status=status,
        status_name=status_name,
        reason=_REASON_BY_STATUS_NAME.get(status_name, Reason.OTHER),
        what_to_do=_ADVICE_BY_STATUS_NAME.get(status_name, "run nvidia-smi, which reports the state of the driver"),
    )
