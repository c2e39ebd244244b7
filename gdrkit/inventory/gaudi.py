"""Facts about Gaudi devices, and the query for them.

Only this module of gdrkit.inventory uses :mod:`gdrkit.gaudi`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit import host
from gdrkit.evidence import LoadedLibrary  # noqa: TC001 - types of fields are read at run time.

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["GaudiDeviceFacts", "GaudiFacts", "may_have_gaudi", "query_gaudi"]

_HLTHUNK_SONAMES = ("libhl-thunk.so", "libhlthunk.so")


@dataclass(frozen=True, slots=True)
class GaudiDeviceFacts:
    """One device as hl-thunk reports it; see :class:`gdrkit.gaudi.DeviceInfo`."""

    number: int
    pci_bus_id: str
    module_id: int
    pci_device_id: int
    generation: str
    card_name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GaudiFacts:
    """The devices that hl-thunk reported, and the libraries that were loaded for the query."""

    devices: tuple[GaudiDeviceFacts, ...]
    libraries: tuple[LoadedLibrary, ...]


def may_have_gaudi(tree: host.HostTree, sonames: Collection[str]) -> bool:
    """Return whether an hl-thunk library is among the installed `sonames`, or a Habana Labs device on the PCI bus."""
    return any(soname in sonames for soname in _HLTHUNK_SONAMES) or bool(host.habana_accelerators(tree))


def query_gaudi(list_libraries: Callable[[], tuple[LoadedLibrary, ...]]) -> GaudiFacts:
    """Query the devices of hl-thunk through their control devices, which also works while programs use the devices.

    Parameters
    ----------
    list_libraries : callable
        Function that returns the libraries that this process has loaded. It is called after the query, which loads
        hl-thunk.

    Raises
    ------
    GdrkitError
        hl-thunk is missing, or its calls failed.
    """
    from gdrkit import gaudi

    devices = tuple(
        GaudiDeviceFacts(
            number=device_info.number,
            pci_bus_id=device_info.pci_bus_id,
            module_id=device_info.module_id,
            pci_device_id=device_info.pci_device_id,
            generation=device_info.generation.value,
            card_name=device_info.card_name,
            memory_bytes=device_info.memory_bytes,
        )
        for device_info in gaudi.list_devices()
    )
    return GaudiFacts(devices=devices, libraries=list_libraries())
