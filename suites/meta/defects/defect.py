"""What a defect is, and which row of the review it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Defect", "Elsewhere", "Finding"]


@dataclass(frozen=True, slots=True)
class Defect:
    """The original mistake, put back.

    Attributes
    ----------
    finding : str
        ``1`` to ``6`` of the review notes, ``a`` to ``n`` of the later ones.
    case : str
        File and name of the case that must fail, below suites/review; every other case of the review must pass.
    symptom : str
        What the failure of that case must say; anything else that fails is no catch.
    module : str
        The module of gdrkit that has the mistake.
    put_back : callable
        Replaces functions of that module.
    """

    finding: str
    case: str
    symptom: str
    module: str
    put_back: Callable[[Any], None]

    @property
    def text(self) -> str:
        """What it does, in a line."""
        return (self.put_back.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, in a line."""

    number: str
    text: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A finding that has no case here, and why."""

    number: str
    text: str
    reason: str
