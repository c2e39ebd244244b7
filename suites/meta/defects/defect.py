"""Data classes for code reviews: a finding, and a defect that was fixed and can be injected into the code again.

``meta.defects.run`` injects each defect and checks that its case in suites/review fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from meta.mutants.patches import Patch

__all__ = ["Defect", "Finding", "NativeDefect"]


@dataclass(frozen=True, slots=True)
class NativeDefect:
    """A defect of the usrbio client library: the patch that injects it, and a one-line description."""

    patch: Patch
    description: str


@dataclass(frozen=True, slots=True)
class Defect:
    """A fixed defect that can be injected into the code again.

    Attributes
    ----------
    finding_identifier : str
        Identifier of the finding: ``1`` to ``6`` in the first review, ``a`` to ``t`` in the later ones.
    case : str
        The case that must fail, as ``FILE::FUNCTION`` below suites/review. Every other case there must pass, except the
        cases in `also_fails`.
    symptom : str
        Text that the failure of that case must contain. If the case fails with another text, the defect does not count
        as caught.
    module_or_file : str
        The dotted name of the gdrkit module into which the defect is injected, or the path of the source file of the C
        library.
    injection : callable or NativeDefect
        The function that injects the defect into the imported module, or the patch of the C library.
    also_fails : tuple of str
        Other cases that must fail, too, because they depend on the same code.
    """

    finding_identifier: str
    case: str
    symptom: str
    module_or_file: str
    injection: Callable[[Any], None] | NativeDefect
    also_fails: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the defect. For a defect in Python, a process with ``GDRKIT_DEFECT=<name>`` injects it."""
        return self.injection.patch.name if isinstance(self.injection, NativeDefect) else self.injection.__name__

    @property
    def description(self) -> str:
        """Description of the defect in one line."""
        if isinstance(self.injection, NativeDefect):
            return self.injection.description
        return (self.injection.__doc__ or "").strip().partition("\n")[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a review found. `Defect.finding_identifier` refers to `identifier`. `description` is one line."""

    identifier: str
    description: str
