"""Whether a path between a disk and a device without host memory is proven for a file, and what is done where not.

Level 4. A path is only offered with evidence; whoever offers one is entered in :data:`PROVERS`. Where nobody can, the
copy engine moves the bytes, and one warning names the cause.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdrkit.errors import Api, Reason, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.gds.transfer import Work

__all__ = ["PROVERS", "DirectPath", "FellBack", "Verdict", "fell_back", "prove", "say_again"]


class FellBack(UserWarning):
    """Bytes that could have gone directly go through host memory; said once for each cause."""


class DirectPath(Protocol):
    """A path that was proven for one open file and one device."""

    def submit(self, *, write: bool, extents: Sequence[int], durable: bool) -> Work:
        """Begin a transfer; four numbers for each range: 0, offset in the file, device address, length.

        A `durable` write is over when the disk has it.
        """

    def why_not(self, extents: Sequence[int]) -> str:
        """Why a transfer of such ranges would not go directly: an odd edge, a fallback that was seen; else empty."""

    def close(self) -> None:
        """Give back what it holds of the file."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of direct paths for one file and one device.

    Attributes
    ----------
    path : DirectPath or None
        The proven one.
    why : str
        Why there is none.
    """

    path: DirectPath | None
    why: str = ""

    def close(self) -> None:
        """Give the path back."""
        if self.path is not None:
            self.path.close()


# Asked in order, with descriptor of the file and index of the device, until one has a path.
PROVERS: list[Callable[[int, int], Verdict]] = []

_said: set[str] = set()


def prove(fd: int, device_index: int) -> Verdict:
    """The first proven path, else every cause why there is none."""
    causes = []
    for prover in PROVERS:
        verdict = prover(fd, device_index)
        if verdict.path is not None:
            return verdict
        causes.append(verdict.why)
    return Verdict(None, "; ".join(causes) or "no direct path is known to this installation")


def fell_back(verdict: Verdict, path: str, *, required: bool) -> str:
    """Say once that the copy engine moves the bytes, and why; or refuse, where a direct path was required.

    Raises
    ------
    Unsupported
        NOT_DIRECT, with the cause.
    """
    if required:
        raise Unsupported(
            api=Api.CUFILE,
            operation="prove direct path",
            status=None,
            status_name="NOT_DIRECT",
            arguments={"path": path},
            reason=Reason.NOT_DIRECT,
            what_to_do="mend the cause, or allow the copy engine",
            detail=verdict.why,
        )
    if verdict.why not in _said:
        _said.add(verdict.why)
        warnings.warn(f"not direct, the copy engine reads through host memory: {verdict.why}", FellBack, stacklevel=6)
    return verdict.why


def say_again() -> None:
    """Forget which causes were said: each is said once more."""
    _said.clear()
