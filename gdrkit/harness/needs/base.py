"""The interface of a need, and the need of a software twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdrkit import evidence, loader
from gdrkit.errors import Api
from gdrkit.report.substrate import is_twin

if TYPE_CHECKING:
    from gdrkit.evidence import LoadedLibrary
    from gdrkit.inventory import ApiFailure, Facts

__all__ = ["Need", "silent", "software"]

_SONAMES = {"cufile": "libcufile.so.0"}


@runtime_checkable
class Need(Protocol):
    """A requirement that must be met for a case to run."""

    @property
    def name(self) -> str:
        """Name of the need as in profiles, e.g. ``verbs.nic(count_min=2)``."""

    def check(self, facts: Facts) -> str | None:
        """Return the reason why the need is not met, one sentence; None if it is met."""


def silent(api: str, failure: ApiFailure | None) -> str:
    """Return the reason for an API that gave no facts."""
    if failure is None:
        return f"{api} was not asked"
    said = f"{failure.operation} failed: {failure.status_name}" if failure.status_name else failure.reason.value
    return f"{api} does not answer: {said}"


def _found(api: str) -> tuple[LoadedLibrary, ...]:
    """Return the library that the loader would open for an API that the facts do not cover."""
    path = loader.find_library(_SONAMES[api]) if api in _SONAMES else None
    return () if path is None else (evidence.describe_library(str(path)),)


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
    """Return the need of the software twin of `api`, for cases that have no meaning on hardware."""
    return _Software(api.value if isinstance(api, Api) else Api(api).value)
