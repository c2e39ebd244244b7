"""CUDA devices: the count of them, and the class Device, which allocates memory and creates streams and events."""

from __future__ import annotations

from gdrkit.cuda import _driver
from gdrkit.cuda.context import PrimaryContext
from gdrkit.cuda.memory import DeviceMemory
from gdrkit.cuda.stream import Event, Stream

__all__ = ["Device", "device_count", "driver_version"]


def device_count() -> int:
    """Return the number of devices that the driver shows to this process.

    Raises
    ------
    SetupMissing
        There is no driver, the driver cannot be used, or there is no device at all.
    """
    return _driver.call_int("cuDeviceGetCount")


def driver_version() -> tuple[int, int]:
    """Return the CUDA version that the driver supports, such as ``(13, 0)``. It is not the driver's own version."""
    version = _driver.call_int("cuDriverGetVersion")  # 1000 * major + 10 * minor
    return version // 1000, version % 1000 // 10


class Device(PrimaryContext):
    """One CUDA device, which allocates memory and creates streams and events.

    Parameters
    ----------
    index : int
        The driver's number of the device, 0 to ``device_count() - 1``.

    Raises
    ------
    ApiError
        CUDA_ERROR_INVALID_DEVICE: there is no such device.
    SetupMissing
        See :func:`device_count`.
    """

    def allocate(self, length_bytes: int) -> DeviceMemory:
        """Allocate memory with cuMemAlloc; see :class:`gdrkit.cuda.DeviceMemory`."""
        return DeviceMemory(self, length_bytes)

    def stream(self) -> Stream:
        """Create a non-blocking stream."""
        return Stream(self)

    def event(self) -> Event:
        """Create an event."""
        return Event(self)
