"""What an API ran on, judged by the libraries that were found and by what the kernel reports about devices.

The only place that interprets. A library with a note of owner ``GDRKIT`` is a software twin. A library without one is
hardware only when everything agrees that neither a library nor a mounted file can replace: the PCI device and its
driver in sysfs, the character device, the kernel's answers over netlink and by ioctl, and that the process which had
the library loaded had that character device open (:mod:`gdrkit.witness.kernel_devices`). Everything else is
``unknown``, and proves nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from gdrkit.witness import SOFTWARE_DRIVERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gdrkit.inventory import Facts
    from gdrkit.witness import DeviceNode, ElfNote, KernelEvidence, RdmaEvidence

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


def substrate_of(
    libraries: Iterable[_Library],
    facts: Facts,
    *,
    nics: Collection[str] = (),
    nodes: Collection[DeviceNode] | None = None,
) -> dict[str, Substrate]:
    """What each API among `libraries` ran on; an API of which no library was loaded is left out.

    Parameters
    ----------
    libraries : iterable of library
        What one process had loaded.
    facts : Facts
        What the kernel shows.
    nics : collection of str
        The NICs that were used; all when empty.
    nodes : collection of DeviceNode or None
        The character devices that the process had open; when None, those that were open when the API was asked for
        `facts`.
    """
    found: dict[str, list[_Library]] = {}
    for library in libraries:
        api = _api_of(library)
        if api is not None:
            found.setdefault(api, []).append(library)
    judged = {}
    for api, members in found.items():
        behind = _behind(api, facts, nics, nodes)
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


def _behind(api: str, facts: Facts, nics: Collection[str], nodes: Collection[DeviceNode] | None) -> Substrate:
    """Judge what the kernel reports behind a library of `api` that is not a twin."""
    if facts.evidence is None:
        return Substrate.UNKNOWN
    if api == "verbs":
        opened = nodes if nodes is not None else facts.verbs.nodes if facts.verbs else ()
        return _behind_verbs(facts.evidence, facts, nics, _numbers(opened))
    if api in {"cuda", "cufile"}:
        opened = nodes if nodes is not None else facts.cuda.nodes if facts.cuda else ()
        return _behind_cuda(facts.evidence, facts, _numbers(opened))
    # No kernel driver of Gaudi has answered yet that its answer could be compared with.
    return Substrate.UNKNOWN


def _behind_verbs(
    evidence: KernelEvidence, facts: Facts, nics: Collection[str], opened: Collection[tuple[int, int]]
) -> Substrate:
    shown = {device.name: device for device in evidence.rdma}
    names = nics or [nic.name for nic in facts.verbs.nics] if facts.verbs else nics or list(shown)
    return weakest(_behind_nic(shown[name], opened) if name in shown else Substrate.UNKNOWN for name in names)


def _behind_nic(device: RdmaEvidence, opened: Collection[tuple[int, int]]) -> Substrate:
    if device.driver in SOFTWARE_DRIVERS:
        return Substrate.KERNEL_SOFTWARE
    is_shown = device.driver is not None and device.pci_driver is not None and not device.missing
    is_open = device.node is not None and (device.node.major, device.node.minor) in opened
    return Substrate.HARDWARE if is_shown and is_open else Substrate.UNKNOWN


def _behind_cuda(evidence: KernelEvidence, facts: Facts, opened: Collection[tuple[int, int]]) -> Substrate:
    shown = {gpu.pci_address for gpu in evidence.gpus if not gpu.missing}
    # Of a container the driver lists also GPUs that it does not have; those that CUDA has must be among the shown ones.
    used = {device.pci_bus_id.lower() for device in facts.cuda.devices} if facts.cuda else shown
    nodes = [evidence.nvidia_control, *(gpu.node for gpu in evidence.gpus)]
    is_open = any((node.major, node.minor) in opened for node in nodes if node is not None)
    is_shown = bool(shown) and used <= shown and not evidence.nvidia_missing
    return Substrate.HARDWARE if is_shown and is_open else Substrate.UNKNOWN


def _numbers(nodes: Iterable[DeviceNode]) -> set[tuple[int, int]]:
    return {(node.major, node.minor) for node in nodes}
