"""Data model of the defect injection: a defect that is injected again, and the review finding that describes it.

``meta.defects.run`` injects each defect and checks that the case in suites/review which covers it fails.
"""

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
    """A fixed defect that can be injected into the code again.

    Attributes
    ----------
    finding : str
        Identifier of the finding: ``1`` to ``6`` in the first review, ``a`` to ``o`` in the later reviews.
    case : str
        File and name of the case that must fail, below suites/review. Every other case there must pass.
    symptom : str
        Text that the failure of that case must contain. Any other failure does not count as caught.
    module : str
        The module of gdrkit that has the defect, or the translation unit.
    injection : callable or NativeUnit
        The function that injects the defect into the imported module, or the translation unit that contains it.
    """

    finding: str
    case: str
    symptom: str
    module: str
    injection: Callable[[Any], None] | NativeUnit

    @property
    def name(self) -> str:
        """Name of the defect in GDRKIT_DEFECT."""
        return self.injection.name if isinstance(self.injection, NativeUnit) else self.injection.__name__

    @property
    def text(self) -> str:
        """Description of the defect in one line."""
        if isinstance(self.injection, NativeUnit):
            return self.injection.text
        return (self.injection.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Finding:
    """A review finding, described in one line."""

    number: str
    text: str
