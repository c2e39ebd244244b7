"""What an API ran on, judged by the libraries that were found.

Level 5. The only place that interprets. A library with a note of owner ``GDRKIT`` is a software twin. Without one it is
hardware only when the kernel shows the device and the driver that belong to it; what cannot be told is ``unknown``, and
proves nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gdrkit.host import RdmaDevice
    from gdrkit.inventory import Facts
    from gdrkit.witness import ElfNote

__all__ = ["Substrate", "combined", "describe", "is_twin", "of_facts", "substrate_of", "weakest"]

_SONAMES = {
    "libibverbs.so.1": "verbs",
    "libcuda.so.1": "cuda",
    "libcufile.so.0": "cufile",
    "libhl-thunk.so": "hlthunk",
    "libhlthunk.so": "hlthunk",
}
_STEMS = {
    "libibverbs.so": "verbs",
    "libcuda.so": "cuda",
    "libcufile.so": "cufile",
    "libhl-thunk.so": "hlthunk",
    "libhlthunk.so": "hlthunk",
}
_SOFTWARE_DRIVERS = ("rxe", "siw")


class Substrate(enum.Enum):
    """What stands behind an API."""

    HARDWARE = "hardware"
    KERNEL_SOFTWARE = "kernel_software"
    TWIN = "twin"
    UNKNOWN = "unknown"


# The weakest first: a claim is worth what its weakest part is worth.
_ORDER = (Substrate.UNKNOWN, Substrate.TWIN, Substrate.KERNEL_SOFTWARE, Substrate.HARDWARE)

_WORDS = {
    Substrate.HARDWARE: "hardware",
    Substrate.KERNEL_SOFTWARE: "software in the kernel",
    Substrate.TWIN: "software twin",
    Substrate.UNKNOWN: "not known",
}


class _Library(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def soname(self) -> str | None: ...
    @property
    def notes(self) -> tuple[ElfNote, ...]: ...
    @property
    def error(self) -> str | None: ...


def describe(substrate: Substrate) -> str:
    """For people."""
    return _WORDS[substrate]


def weakest(substrates: Iterable[Substrate]) -> Substrate:
    """The least of several; ``UNKNOWN`` of none."""
    return min(substrates, key=_ORDER.index, default=Substrate.UNKNOWN)


def is_twin(library: _Library) -> bool:
    """Whether a library says that it is a software twin."""
    return any(note.owner == "GDRKIT" for note in library.notes)


def substrate_of(libraries: Iterable[_Library], facts: Facts, *, nics: Collection[str] = ()) -> dict[str, Substrate]:
    """What each API among `libraries` ran on; an API of which no library was loaded is left out.

    Parameters
    ----------
    libraries : iterable of library
        What one process had loaded.
    facts : Facts
        What the kernel shows.
    nics : collection of str
        The NICs that were used; all when empty.
    """
    found: dict[str, list[_Library]] = {}
    for library in libraries:
        api = _api_of(library)
        if api is not None:
            found.setdefault(api, []).append(library)
    judged = {}
    for api, members in found.items():
        behind = _behind_verbs(facts, nics) if api == "verbs" else _BEHIND[api](facts)
        judged[api] = weakest(_judge(library, behind) for library in members)
        # The real library and a twin of it in one process: nobody can say which of them did the work.
        if len({is_twin(library) for library in members}) > 1:
            judged[api] = Substrate.UNKNOWN
    return judged


def of_facts(facts: Facts) -> dict[str, Substrate]:
    """On what each API ran when it was asked for its facts; one that did not answer is left out."""
    judged = {}
    for api in dict.fromkeys(_SONAMES.values()):
        found = substrate_of(facts.api_libraries(api), facts).get(api)
        if found is not None:
            judged[api] = found
    return judged


def combined(parts: Iterable[Mapping[str, Substrate]]) -> dict[str, Substrate]:
    """Of several processes: for each API the weakest."""
    found: dict[str, Substrate] = {}
    for part in parts:
        for api, substrate in part.items():
            found[api] = weakest((substrate, found.get(api, substrate)))
    return found


def _api_of(library: _Library) -> str | None:
    if library.soname is not None:
        return _SONAMES.get(library.soname)
    # A damaged file has no SONAME, and still was loaded under its name.
    name = library.path.rpartition("/")[2]
    return next((api for stem, api in _STEMS.items() if name.startswith(stem)), None) if library.error else None


def _judge(library: _Library, behind: Substrate) -> Substrate:
    if library.error is not None:
        return Substrate.UNKNOWN
    return Substrate.TWIN if is_twin(library) else behind


def _behind_verbs(facts: Facts, nics: Collection[str]) -> Substrate:
    devices = [device for device in facts.rdma_devices if not nics or device.name in nics]
    if len(devices) < len(nics):
        return Substrate.UNKNOWN
    return weakest(_behind_device(device) for device in devices)


def _behind_device(device: RdmaDevice) -> Substrate:
    if device.driver in _SOFTWARE_DRIVERS or not device.has_device:
        return Substrate.KERNEL_SOFTWARE
    return Substrate.HARDWARE if device.driver else Substrate.UNKNOWN


def _behind_cuda(facts: Facts) -> Substrate:
    return Substrate.HARDWARE if facts.nvidia_driver_version else Substrate.UNKNOWN


def _behind_hlthunk(facts: Facts) -> Substrate:
    drivers = {device.driver for device in facts.accelerators}
    return Substrate.HARDWARE if "habanalabs" in drivers else Substrate.UNKNOWN


_BEHIND = {"cuda": _behind_cuda, "cufile": _behind_cuda, "hlthunk": _behind_hlthunk}
