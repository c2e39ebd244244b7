"""The search for a direct path between a file and a device, and the warning if there is none.

A direct path is used only if a probe has proven it for the file. The probes are listed in :data:`DIRECT_PATH_PROBES`.
If no probe proves a path, the copy engine moves the bytes through host memory, and one warning names the cause.
"""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdrkit import forks
from gdrkit.errors import Api, Reason, Unsupported
from gdrkit.gds._native import native
from gdrkit.gds.buffer import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from gdrkit.gds.buffer import TransferBuffer
    from gdrkit.gds.transfer import Transfer, TransferJob

__all__ = [
    "DIRECT_PATH_PROBES",
    "DirectPath",
    "DirectPathResult",
    "FallbackWarning",
    "FileDirectPaths",
    "find_direct_path",
    "forget_warnings",
    "report_fallback",
]


class FallbackWarning(UserWarning):
    """A warning that bytes go through host memory instead of a direct path. A process reports each cause once."""


class DirectPath(Protocol):
    """A path that was proven for one open file and one device."""

    def submit(
        self, *, write: bool, extents: Sequence[int], durable: bool, memory: TransferBuffer, transfer: Transfer
    ) -> TransferJob:
        """Start a transfer by :meth:`gdrkit.gds.Transfer.start`, and return its job.

        Parameters
        ----------
        write : bool
            True: write from memory into the file. False: read from the file into memory.
        extents : sequence of int
            Four numbers for each range: 0, offset in the file, device address, length in bytes.
        durable : bool
            Whether a write is complete only when the disk has the data.
        memory : TransferBuffer
            The memory that contains the device addresses of the ranges.
        transfer : Transfer
            The transfer that gets the job.
        """

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot be transferred directly; empty if they can.

        Reasons are a bad alignment, or an earlier transfer of the file that was not direct.
        """

    def close(self) -> None:
        """Release the resources that the path holds for the file."""


@dataclass(frozen=True, slots=True)
class DirectPathResult:
    """The result of a search for a direct path for one file and one device.

    Attributes
    ----------
    path : DirectPath or None
        The proven path, if there is one.
    why : str
        The reason why there is no proven path; empty if there is one.
    """

    path: DirectPath | None
    why: str = ""

    def close(self) -> None:
        """Close the path, if there is one."""
        if self.path is not None:
            self.path.close()


# The direct-path probes. They are called in order with the file descriptor and the device index, until one returns a
# path.
DIRECT_PATH_PROBES: list[Callable[[int, int], DirectPathResult]] = []

# The causes of fallbacks about which this process has warned.
_reported_causes: set[str] = set()


def find_direct_path(fd: int, device_index: int) -> DirectPathResult:
    """Return the first path that a probe proves, or the reasons of all probes if none does."""
    reasons = []
    for probe in DIRECT_PATH_PROBES:
        result = probe(fd, device_index)
        if result.path is not None:
            return result
        reasons.append(result.why)
    return DirectPathResult(None, "; ".join(reasons) or "this installation has no direct-path probe")


class FileDirectPaths:
    """The direct paths of one open file, which is probed once for each device. The methods are thread-safe.

    Parameters
    ----------
    direct : str
        Use of direct paths: ``preferred``, ``required`` or ``never``; see :class:`~gdrkit.gds.File`.
    """

    def __init__(self, direct: str) -> None:
        self._direct = direct
        self._results_by_device: dict[int, DirectPathResult] = {}  # The key is the index of the device.
        # The lock is reentrant, because a signal handler may start a transfer of the file while its thread holds the
        # lock.
        self._probe_lock = threading.RLock()

    def reason_for_engine(self, memory: TransferBuffer) -> str | None:
        """Return why the copy engine has to transfer this memory, or None if the caller must first call :meth:`find`.

        The reason is empty if the caller wants no direct path, or if the memory is host memory, which has none.
        """
        if self._direct == "never" or (memory.device_index == HOST and self._direct == "preferred"):
            return ""
        result = self._results_by_device.get(memory.device_index)
        return result.why if result is not None and result.path is None and self._direct == "preferred" else None

    def find(self, fd: int, memory: TransferBuffer, extents: Sequence[int]) -> tuple[DirectPath | None, str]:
        """Return the direct path for one transfer, or None and the reason.

        A path that is proven for the file may still be unusable for these ranges.
        """
        if memory.is_host:
            return None, "the memory is host memory"
        if memory.device_index not in self._results_by_device:
            # This object is registered only now: a child that is forked before a probe has nothing to abandon.
            forks.register(self)
        with self._probe_lock:
            result = self._results_by_device.get(memory.device_index)
            if result is None:
                probe_result = find_direct_path(fd, memory.device_index)
                result = self._results_by_device.setdefault(memory.device_index, probe_result)
                if result is not probe_result:
                    probe_result.close()
        why_not_direct = result.why if result.path is None else result.path.why_not(extents)
        return (None, why_not_direct) if why_not_direct else (result.path, "")

    def close(self) -> None:
        """Close the paths. A second close does nothing."""
        for device_index, result in tuple(self._results_by_device.items()):
            result.close()
            self._results_by_device.pop(device_index, None)

    def after_fork_in_child(self) -> None:
        """Abandon the paths in a forked child. Their threads and their driver are in the parent."""
        native.keep_forever(self._results_by_device)
        self._results_by_device = {}
        self._probe_lock = threading.RLock()


def report_fallback(cause: str, file_path: str, *, required: bool) -> None:
    """Warn that the copy engine moves the bytes, once for each cause. If a direct path is required, raise an error.

    Raises
    ------
    Unsupported
        NOT_DIRECT: a direct path is required. The error contains the cause.
    """
    if required:
        raise Unsupported(
            api=Api.CUFILE,
            operation="prove direct path",
            status=None,
            status_name="NOT_DIRECT",
            arguments={"path": file_path},
            reason=Reason.NOT_DIRECT,
            what_to_do="remove the cause, or allow the copy engine (direct='preferred')",
            detail=cause,
        )
    if cause not in _reported_causes:
        _reported_causes.add(cause)
        message = f"there is no direct path, so the copy engine moves the bytes through host memory: {cause}"
        warnings.warn(message, FallbackWarning, stacklevel=_find_caller_level())


def _find_caller_level() -> int:
    """Return the `stacklevel` with which a warning names the line outside of gdrkit that called gdrkit."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect.stack() would read the source of each frame.
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("gdrkit."):
        frame, level = frame.f_back, level + 1
    return level


def forget_warnings() -> None:
    """Forget which causes were reported, so that the next fallback warns again."""
    _reported_causes.clear()
