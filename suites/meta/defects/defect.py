"""Data model of the review: a defect, and the finding that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Defect", "Finding", "NativeUnit"]


@dataclass(frozen=True, slots=True)
class NativeUnit:
    """A defect of the C library: `native/NAME.cpp` in this folder replaces one of its translation units."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Defect:
    """An original defect that can be put back into the code.

    Attributes
    ----------
    finding : str
        Number of the finding: ``1`` to ``6`` of the review notes, ``a`` to ``o`` of the later ones.
    case : str
        File and name of the case that must fail, below suites/review; every other case of the review must pass.
    symptom : str
        Text that the failure of that case must contain. Any other failure does not count as caught.
    module : str
        The module of gdrkit that has the defect, or the translation unit.
    put_back : callable or NativeUnit
        The function that puts the defect into the module, or the translation unit that has it.
    """

    finding: str
    case: str
    symptom: str
    module: str
    put_back: Callable[[Any], None] | NativeUnit

    @property
    def name(self) -> str:
        """Name of the defect in GDRKIT_DEFECT."""
        return self.put_back.name if isinstance(self.put_back, NativeUnit) else self.put_back.__name__

    @property
    def text(self) -> str:
        """Description of the defect in one line."""
        if isinstance(self.put_back, NativeUnit):
            return self.put_back.text
        return (self.put_back.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the review in one line."""

    number: str
    text: str
