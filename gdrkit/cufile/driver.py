"""The class :class:`Driver`, the open cuFile driver of this process, and its properties.

The files, buffers, streams and batches of this package belong to a :class:`Driver`. When the driver is closed, it first
closes these objects if they are still open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.cufile import _cufile, probe
from gdrkit.cufile.statistics import Statistics
from gdrkit.errors import ClosedResource
from gdrkit.handles import Handle, ReleaseStack

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Driver", "Properties", "library_version"]

_ALLOW_COMPAT_BIT = 1 << 1  # CU_FILE_ALLOW_COMPAT_MODE


@dataclass(frozen=True, slots=True)
class Properties:
    """The result of cuFileDriverGetProperties. Sizes are in KiB, as in the library.

    Attributes
    ----------
    nvfs_version : tuple of int
        Version of nvidia-fs; (0, 0) if it is not loaded.
    """

    nvfs_version: tuple[int, int]
    poll_threshold_kib: int
    max_direct_io_kib: int
    status_flags: int
    control_flags: int
    feature_flags: int
    max_device_cache_kib: int
    per_buffer_cache_kib: int
    max_pinned_kib: int
    max_batch_io: int
    max_batch_timeout_ms: int

    @property
    def allows_compat(self) -> bool:
        """Whether the library may copy through host memory if there is no direct path."""
        return bool(self.control_flags & _ALLOW_COMPAT_BIT)


def library_version() -> tuple[int, int]:
    """Return the version of libcufile: ``(1, 15)``.

    Raises
    ------
    SetupMissing
        libcufile or libcuda is missing or cannot be used.
    """
    version = _cufile.library_version()
    return version // 1000, version % 1000 // 10


class Driver:
    """The open cuFile driver; a context manager.

    Parameters
    ----------
    timeout_s : float or None
        Before this process opens the driver, a child process opens it on trial, because the open may hang (see
        :mod:`gdrkit.cufile.probe`). `timeout_s` is the longest time for the child, in seconds. None: start no child.
        Use None only if another process kills this process when it hangs.

    Raises
    ------
    SetupMissing
        libcufile, libcuda or the bindings are missing, or the driver did not open in the child process.
    ApiError
        The driver did not open in this process, even though the child process, if any, has opened it.
    """

    def __init__(self, *, timeout_s: float | None = probe.TIMEOUT_S) -> None:
        if timeout_s is not None:
            probe.require(timeout_s=timeout_s)
        _cufile.load()
        _cufile.call("cuFileDriverOpen", "driver_open")
        self._close_actions = ReleaseStack()
        self._live_handle = Handle("cufile.driver")
        self._is_closed = False
        self.statistics = Statistics()

    @property
    def closed(self) -> bool:
        """Whether the driver was closed."""
        return self._is_closed

    def properties(self) -> Properties:
        """Return the properties of the library and of nvidia-fs.

        Call this only while no transfer is in progress on a stream: with libcufile 1.15 on an H200 in compat mode, such
        transfers end with EIO during the call. The call also sets ``parameters.Flag.FORCE_COMPAT_MODE`` to false.
        """
        self.check_open()
        nvfs_major, nvfs_minor, *other_fields = _cufile.get_driver_properties()
        return Properties((nvfs_major, nvfs_minor), *other_fields)

    def use_count(self) -> int:
        """Return the use count of the driver in this process: how often it was opened and not closed."""
        self.check_open()
        return _cufile.use_count()

    def bar_size_kib(self, device_index: int) -> int:
        """Return the BAR size of a GPU in KiB (cuFile 1.15 and newer)."""
        self.check_open()
        return int(_cufile.call("cuFileGetBARSizeInKB", "get_bar_size_in_kb", gpuIndex=device_index))

    def on_close(self, action: Callable[[], None]) -> Callable[[], None]:
        """Register `action` to run before the driver is closed, and return a function that removes it."""
        return self._close_actions.push(action)

    def check_open(self) -> None:
        """Raise :class:`~gdrkit.errors.ClosedResource` if the driver is closed."""
        if self._is_closed:
            resource = "the cuFile driver"
            raise ClosedResource(resource)

    def close(self) -> None:
        """Close all objects of the driver, newest first, then the driver; a second close does nothing.

        Raises
        ------
        ApiError
            An object or the driver could not be closed. The driver stays open and may be closed again.
        """
        if self._is_closed:
            return
        self._close_actions.run()
        _cufile.call("cuFileDriverClose", "driver_close")
        self._is_closed = True
        self._live_handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
