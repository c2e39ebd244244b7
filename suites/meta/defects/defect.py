"""What a defect is, and which row of the review it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Defect", "Finding", "NativeUnit"]


@dataclass(frozen=True, slots=True)
class NativeUnit:
    """A defect of the C library: one of its translation units is replaced by `native/NAME.cpp`, beside this file."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Defect:
    """The original mistake, put back.

    Attributes
    ----------
    finding : str
        ``1`` to ``6`` of the review notes, ``a`` to ``o`` of the later ones.
    case : str
        File and name of the case that must fail, below suites/review; every other case of the review must pass.
    symptom : str
        What the failure of that case must say; anything else that fails is no catch.
    module : str
        The module of gdrkit that has the mistake, or the translation unit.
    put_back : callable or NativeUnit
        Replaces functions of that module, or the whole unit.
    """

    finding: str
    case: str
    symptom: str
    module: str
    put_back: Callable[[Any], None] | NativeUnit

    @property
    def name(self) -> str:
        """What it is called in GDRKIT_DEFECT."""
        return self.put_back.name if isinstance(self.put_back, NativeUnit) else self.put_back.__name__

    @property
    def text(self) -> str:
        """What it does, in a line."""
        if isinstance(self.put_back, NativeUnit):
            return self.put_back.text
        return (self.put_back.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, in a line."""

    number: str
    text: str
