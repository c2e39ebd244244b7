"""Direct paths: transfers between a disk and a device without host memory, and the fallback to the copy engine.

A file takes a direct path only if the path was proven for it. The functions that prove paths are listed in
:data:`DIRECT_PATH_PROBES`. If none proves one, the copy engine moves the bytes, and one warning names the cause.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdrkit.errors import Api, Reason, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.gds.transfer import Work

__all__ = ["DIRECT_PATH_PROBES", "DirectPath", "FallbackWarning", "Verdict", "fell_back", "forget_warnings", "prove"]


class FallbackWarning(UserWarning):
    """A warning that bytes go through host memory instead of a direct path. Each cause is reported once."""


class DirectPath(Protocol):
    """A path that was proven for one open file and one device."""

    def submit(self, *, write: bool, extents: Sequence[int], durable: bool) -> Work:
        """Start a transfer. `extents` has four numbers per range: 0, offset in the file, device address, length.

        A `durable` write is complete when the disk has the data.
        """

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot go directly (bad alignment, an earlier fallback), or an empty text."""

    def close(self) -> None:
        """Release the resources that the path holds for the file."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a search for a direct path for one file and one device.

    Attributes
    ----------
    path : DirectPath or None
        The proven path, if there is one.
    why : str
        The reason why there is no path; empty if there is one.
    """

    path: DirectPath | None
    why: str = ""

    def close(self) -> None:
        """Close the path, if there is one."""
        if self.path is not None:
            self.path.close()


# The direct-path probes. They are called in order with the file descriptor and the device index, until one returns a
# path.
DIRECT_PATH_PROBES: list[Callable[[int, int], Verdict]] = []

_said: set[str] = set()


def prove(fd: int, device_index: int) -> Verdict:
    """Return the first proven path, or the reasons of all probes if no path is proven."""
    causes = []
    for prover in DIRECT_PATH_PROBES:
        verdict = prover(fd, device_index)
        if verdict.path is not None:
            return verdict
        causes.append(verdict.why)
    return Verdict(None, "; ".join(causes) or "no direct path is known to this installation")


def fell_back(verdict: Verdict, path: str, *, required: bool) -> str:
    """Warn once that the copy engine moves the bytes, and return the reason. Fail if a direct path is required.

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
            arguments={"path": path},
            reason=Reason.NOT_DIRECT,
            what_to_do="remove the cause, or allow the copy engine",
            detail=verdict.why,
        )
    if verdict.why not in _said:
        _said.add(verdict.why)
        warnings.warn(
            f"not direct, the copy engine reads through host memory: {verdict.why}", FallbackWarning, stacklevel=6
        )
    return verdict.why


def forget_warnings() -> None:
    """Forget which causes were reported, so that each one is reported again."""
    _said.clear()
