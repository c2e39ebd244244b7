"""The form of a need, and the one about the substrate.

Level 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdrkit import loader, witness
from gdrkit.errors import Api
from gdrkit.report.substrate import is_twin

if TYPE_CHECKING:
    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.witness import LoadedLibrary

__all__ = ["Need", "silent", "software"]

_SONAMES = {"cufile": "libcufile.so.0"}


@runtime_checkable
class Need(Protocol):
    """Something that must be so for a case to run."""

    @property
    def name(self) -> str:
        """E.g. ``verbs.nic(count_min=2)``; profiles name it so."""

    def check(self, facts: Facts) -> str | None:
        """Why it is not met, one sentence; None when it is."""


def silent(api: str, failure: ApiFailure | None) -> str:
    """The sentence for an API that gave no facts."""
    if failure is None:
        return f"{api} was not asked"
    said = f"{failure.operation} gave {failure.status_name}" if failure.status_name else failure.reason.value
    return f"{api} does not answer: {said}"


def _found(api: str) -> tuple[LoadedLibrary, ...]:
    """What the loader would take for an API that is not asked for facts."""
    path = loader.find_library(_SONAMES[api]) if api in _SONAMES else None
    return () if path is None else (witness.describe_library(str(path)),)


@dataclass(frozen=True, slots=True)
class _Software:
    api: str

    @property
    def name(self) -> str:
        return f"software({self.api})"

    def check(self, facts: Facts) -> str | None:
        if any(is_twin(library) for library in facts.api_libraries(self.api) or _found(self.api)):
            return None
        return f"{self.api} does not run on its software twin"


def software(api: Api | str) -> Need:
    """The case is about the software twin of `api` itself, and means nothing on hardware."""
    return _Software(api.value if isinstance(api, Api) else Api(api).value)
