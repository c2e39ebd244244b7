"""The substrate of an API, which says whether its operations ran on hardware, in kernel software or on a software twin.

Only this module derives substrates, from the loaded libraries and from what the kernel reports about devices. A library
with an ELF note of owner ``GDRKIT`` is a software twin (a drop-in library that emulates hardware). For another library
the substrate is ``hardware`` only with this evidence, which :mod:`gdrkit.evidence.kernel_devices` collects:

- sysfs has the PCI device and its driver;
- the character device exists;
- the replies of the kernel over netlink and by ioctl agree with sysfs and with the character device;
- the process that had loaded the library had the character device open.

This evidence comes from the kernel, so neither a library nor a mounted file can imitate it. A NIC whose driver is
software in the kernel, such as rxe, has the substrate ``kernel_software``. Otherwise the substrate is ``unknown``, and
the test case proves nothing.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from gdrkit.evidence import SOFTWARE_DRIVERS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from gdrkit.evidence import DeviceNode, ElfNote, KernelEvidence, RdmaEvidence
    from gdrkit.inventory import Facts

__all__ = ["Substrate", "combine", "describe", "is_twin", "substrate_of", "substrates_of_facts", "weakest_substrate"]

_API_BY_SONAME = {
    "libibverbs.so.1": "verbs",
    "libcuda.so.1": "cuda",
    "libcufile.so.0": "cufile",
    "libhl-thunk.so": "hlthunk",
    "libhlthunk.so": "hlthunk",
}
_API_BY_FILE_PREFIX = {
    "libibverbs.so": "verbs",
    "libcuda.so": "cuda",
    "libcufile.so": "cufile",
    "libhl-thunk.so": "hlthunk",
    "libhlthunk.so": "hlthunk",
}


class Substrate(enum.Enum):
    """The substrate of an API: what executes its operations."""

    HARDWARE = "hardware"
    KERNEL_SOFTWARE = "kernel_software"
    TWIN = "twin"
    UNKNOWN = "unknown"


# A test case with several APIs or processes proves no more than its weakest substrate.
_WEAKEST_FIRST = (Substrate.UNKNOWN, Substrate.TWIN, Substrate.KERNEL_SOFTWARE, Substrate.HARDWARE)

_SUBSTRATE_TEXTS = {
    Substrate.HARDWARE: "hardware",
    Substrate.KERNEL_SOFTWARE: "software in the kernel",
    Substrate.TWIN: "software twin",
    Substrate.UNKNOWN: "not known",
}


class _Library(Protocol):
    """A loaded library, with the fields from which its substrate is derived."""

    @property
    def path(self) -> str: ...
    @property
    def soname(self) -> str | None: ...
    @property
    def notes(self) -> tuple[ElfNote, ...]: ...
    @property
    def error(self) -> str | None: ...


def describe(substrate: Substrate) -> str:
    """Return a substrate as text for the user."""
    return _SUBSTRATE_TEXTS[substrate]


def weakest_substrate(substrates: Iterable[Substrate]) -> Substrate:
    """Return the weakest of several substrates, or ``UNKNOWN`` if there is none."""
    return min(substrates, key=_WEAKEST_FIRST.index, default=Substrate.UNKNOWN)


def is_twin(library: _Library) -> bool:
    """Return whether a library has the note of a software twin."""
    return any(note.owner == "GDRKIT" for note in library.notes)


def substrate_of(
    libraries: Iterable[_Library],
    facts: Facts,
    *,
    used_nics: Collection[str] = (),
    open_nodes: Collection[DeviceNode] | None = None,
) -> dict[str, Substrate]:
    """Return the substrate of each API among `libraries`. An API without a loaded library is left out.

    Parameters
    ----------
    libraries : iterable of library
        The libraries that one process had loaded.
    facts : Facts
        The facts, with the evidence of the kernel.
    used_nics : collection of str
        The names of the NICs that the process used. If empty, all NICs of the facts count as used.
    open_nodes : collection of DeviceNode or None
        The character devices that the process had open. If None, the devices that were open while the facts about the
        API were collected.
    """
    libraries_by_api: dict[str, list[_Library]] = {}
    for library in libraries:
        api = _find_api(library)
        if api is not None:
            libraries_by_api.setdefault(api, []).append(library)
    substrates = {}
    for api, api_libraries in libraries_by_api.items():
        substrate_if_real = _find_real_library_substrate(api, facts, used_nics, open_nodes)
        substrates[api] = weakest_substrate(
            _find_library_substrate(library, substrate_if_real) for library in api_libraries
        )
        # If a process has loaded the real library and its twin, it is unknown which of them executed the operations.
        if len({is_twin(library) for library in api_libraries}) > 1:
            substrates[api] = Substrate.UNKNOWN
    return substrates


def substrates_of_facts(facts: Facts) -> dict[str, Substrate]:
    """Return the substrate of each API in the facts. An API without facts is left out."""
    substrates = {}
    for api in dict.fromkeys(_API_BY_SONAME.values()):
        substrate = substrate_of(facts.api_libraries(api), facts).get(api)
        if substrate is not None:
            substrates[api] = substrate
    return substrates


def combine(substrates_of_processes: Iterable[Mapping[str, Substrate]]) -> dict[str, Substrate]:
    """Return the weakest substrate of each API over several processes."""
    substrates: dict[str, Substrate] = {}
    for process_substrates in substrates_of_processes:
        for api, substrate in process_substrates.items():
            substrates[api] = weakest_substrate((substrate, substrates.get(api, substrate)))
    return substrates


def _find_api(library: _Library) -> str | None:
    if library.soname is not None:
        return _API_BY_SONAME.get(library.soname)
    # A damaged file has no SONAME, but it was loaded under its file name.
    file_name = library.path.rpartition("/")[2]
    return (
        next((api for prefix, api in _API_BY_FILE_PREFIX.items() if file_name.startswith(prefix)), None)
        if library.error
        else None
    )


def _find_library_substrate(library: _Library, substrate_if_real: Substrate) -> Substrate:
    if library.error is not None:
        return Substrate.UNKNOWN
    return Substrate.TWIN if is_twin(library) else substrate_if_real


def _find_real_library_substrate(
    api: str, facts: Facts, used_nics: Collection[str], open_nodes: Collection[DeviceNode] | None
) -> Substrate:
    """Return the substrate of a library of `api` that is not a twin, according to the evidence of the kernel."""
    if facts.evidence is None:
        return Substrate.UNKNOWN
    if api == "verbs":
        verbs_nodes = open_nodes if open_nodes is not None else facts.verbs.nodes if facts.verbs else ()
        return _find_verbs_substrate(facts.evidence, facts, used_nics, _list_device_numbers(verbs_nodes))
    if api in {"cuda", "cufile"}:
        cuda_nodes = open_nodes if open_nodes is not None else facts.cuda.nodes if facts.cuda else ()
        return _find_cuda_substrate(facts.evidence, facts, _list_device_numbers(cuda_nodes))
    # It is not known yet what a real Gaudi driver replies, so no evidence of Gaudi hardware can be checked.
    return Substrate.UNKNOWN


def _find_verbs_substrate(
    evidence: KernelEvidence, facts: Facts, used_nics: Collection[str], open_device_numbers: Collection[tuple[int, int]]
) -> Substrate:
    evidence_by_name = {device.name: device for device in evidence.rdma}
    nic_names = (
        used_nics or [nic.name for nic in facts.verbs.nics] if facts.verbs else used_nics or list(evidence_by_name)
    )
    return weakest_substrate(
        _find_nic_substrate(evidence_by_name[name], open_device_numbers)
        if name in evidence_by_name
        else Substrate.UNKNOWN
        for name in nic_names
    )


def _find_nic_substrate(device: RdmaEvidence, open_device_numbers: Collection[tuple[int, int]]) -> Substrate:
    if device.driver in SOFTWARE_DRIVERS:
        return Substrate.KERNEL_SOFTWARE
    is_proven = device.driver is not None and device.pci_driver is not None and not device.missing
    is_open = device.node is not None and (device.node.major, device.node.minor) in open_device_numbers
    return Substrate.HARDWARE if is_proven and is_open else Substrate.UNKNOWN


def _find_cuda_substrate(
    evidence: KernelEvidence, facts: Facts, open_device_numbers: Collection[tuple[int, int]]
) -> Substrate:
    proven_addresses = {gpu.pci_address for gpu in evidence.gpus if not gpu.missing}
    # In a container, the driver also lists GPUs that the container cannot use. Evidence is required only for the GPUs
    # that CUDA lists.
    used_addresses = {device.pci_bus_id.lower() for device in facts.cuda.devices} if facts.cuda else proven_addresses
    gpu_nodes = [evidence.nvidia_control, *(gpu.node for gpu in evidence.gpus)]
    is_open = any((node.major, node.minor) in open_device_numbers for node in gpu_nodes if node is not None)
    is_proven = bool(proven_addresses) and used_addresses <= proven_addresses and not evidence.nvidia_missing
    return Substrate.HARDWARE if is_proven and is_open else Substrate.UNKNOWN


def _list_device_numbers(nodes: Iterable[DeviceNode]) -> set[tuple[int, int]]:
    return {(node.major, node.minor) for node in nodes}
