"""The interface of a need, and the need that an API runs on its software twin (a library that emulates hardware)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gdrkit import evidence, loader
from gdrkit.errors import Api
from gdrkit.report.substrate import is_twin

if TYPE_CHECKING:
    from gdrkit.evidence import LoadedLibrary
    from gdrkit.inventory import ApiFailure, Facts

__all__ = ["Need", "reason_without_facts", "software", "without_twin"]

# The facts do not name the libraries of these APIs. Each API has the SONAME of its library here.
_SONAME_OF_API_WITHOUT_FACTS = {"cufile": "libcufile.so.0"}


@runtime_checkable
class Need(Protocol):
    """A requirement that must be met so that a case runs."""

    @property
    def name(self) -> str:
        """Name of the need in profiles and records, e.g. ``verbs.nic(count_min=2)``."""

    def check(self, facts: Facts) -> str | None:
        """Return a sentence with the reason why the need is not met, or None if it is met."""


def reason_without_facts(api: str, failure: ApiFailure | None) -> str:
    """Return the reason why a need is not met if there are no facts about its API.

    `failure` is the error with which the API failed, or None if it was not queried.
    """
    if failure is None:
        return f"{api} was not queried"
    error_text = f"{failure.operation} failed: {failure.status_name}" if failure.status_name else failure.reason.value
    return f"{api} does not answer: {error_text}"


def _find_library_without_facts(api: str) -> tuple[LoadedLibrary, ...]:
    """Return the library that the dynamic loader would open for `api`, if the facts do not name libraries of this API.

    The result is empty if there is no such library, or if the libraries of `api` are in the facts.
    """
    path = loader.find_library(_SONAME_OF_API_WITHOUT_FACTS[api]) if api in _SONAME_OF_API_WITHOUT_FACTS else None
    return () if path is None else (evidence.describe_library(str(path)),)


@dataclass(frozen=True, slots=True)
class _Software:
    """The need that the API runs on its software twin; see :func:`software`."""

    api: str

    @property
    def name(self) -> str:
        return f"software({self.api})"

    def check(self, facts: Facts) -> str | None:
        if any(is_twin(library) for library in facts.api_libraries(self.api) or _find_library_without_facts(self.api)):
            return None
        return f"{self.api} does not run on its software twin"


@dataclass(frozen=True, slots=True)
class _WithoutTwin:
    """The need that the API does not run on its software twin; see :func:`without_twin`."""

    api: str

    @property
    def name(self) -> str:
        return f"without_twin({self.api})"

    def check(self, facts: Facts) -> str | None:
        runs_on_twin = software(self.api).check(facts) is None
        return f"{self.api} runs on its software twin" if runs_on_twin else None


def without_twin(api: Api) -> Need:
    """Return the need that `api` does not run on its software twin, for cases whose programs cannot use the twin."""
    return _WithoutTwin(api.value)


def software(api: Api | str) -> Need:
    """Return the need that `api` runs on its software twin, for cases that are impossible on hardware."""
    return _Software(api.value if isinstance(api, Api) else Api(api).value)
