"""The facts about one machine, frozen, with a JSON form that is read back as the same value.

Level 4. A fact is what was found; an API that did not answer has an :class:`ApiFailure` in its place, with what to do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit import plain
from gdrkit.errors import ApiError, GdrkitError, Reason, UsageError
from gdrkit.host import (  # noqa: TC001 - types of fields are read at run time.
    KernelFacts,
    Limits,
    Mount,
    NvmeController,
    NvmlFacts,
    PciDevice,
    RdmaDevice,
    Unreadable,
)
from gdrkit.inventory.gaudi import GaudiFacts  # noqa: TC001 - types of fields are read at run time.
from gdrkit.witness import DeviceNode, KernelEvidence, LoadedLibrary  # noqa: TC001 - types of fields are read at run time.

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ApiFailure",
    "ConfigFacts",
    "CudaDeviceFacts",
    "CudaFacts",
    "CufileFacts",
    "Facts",
    "LibraryFacts",
    "NicFacts",
    "PackageFacts",
    "RouteFacts",
    "VerbsFacts",
    "notable",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """Why an API gave no facts; the fields of :class:`~gdrkit.errors.ApiError`."""

    api: str
    operation: str
    status: int | None
    status_name: str
    errno: int | None
    reason: Reason
    message: str
    what_to_do: str

    @classmethod
    def of(cls, error: GdrkitError, *, api: str, operation: str) -> Self:
        """Keep `error`; `api` and `operation` name what was being asked when the error itself does not say."""
        if isinstance(error, ApiError):
            return cls(
                api=error.api.value,
                operation=error.operation,
                status=error.status,
                status_name=error.status_name,
                errno=error.errno,
                reason=error.reason,
                message=error.message,
                what_to_do=error.what_to_do,
            )
        return cls(
            api=api,
            operation=operation,
            status=None,
            status_name="",
            errno=None,
            reason=error.reason,
            message=error.message,
            what_to_do=error.what_to_do,
        )


@dataclass(frozen=True, slots=True)
class CudaDeviceFacts:
    """One device as the CUDA driver shows it."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    attributes: dict[str, int]

    def has(self, attribute: str) -> bool:
        """Whether a flag among its attributes is set."""
        return bool(self.attributes.get(attribute, 0))


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What the CUDA driver answered, the libraries that were loaded to ask it, and the devices that these had open."""

    driver_version: str
    devices: tuple[CudaDeviceFacts, ...]
    libraries: tuple[LoadedLibrary, ...]
    nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class NicFacts:
    """One device as verbs shows it.

    Attributes
    ----------
    active_ports : tuple of int
        Numbers of the ports that are up.
    dmabuf : bool or None
        Whether it takes dma-buf regions, as asked of it; None when it could not be opened (see ``failure``).
    """

    name: str
    driver: str | None
    node_guid: str
    active_ports: tuple[int, ...]
    dmabuf: bool | None
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class VerbsFacts:
    """What verbs answered, the libraries that were loaded to ask it, and the devices that these had open."""

    nics: tuple[NicFacts, ...]
    libraries: tuple[LoadedLibrary, ...]
    nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """Whether a NIC can register the memory of a device in one way, as tried with a small allocation."""

    device_index: int
    nic: str
    way: str
    possible: bool
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """A library that the loader would open for a name; ``path`` is None when there is none."""

    soname: str
    path: str | None
    build_id: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """A Python package; ``version`` is None when no package of that name is known to this Python."""

    name: str
    version: str | None


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """What the config space of a GPU, NIC, NVMe or bridge above one says; None for what could not be looked at.

    Attributes
    ----------
    is_whole : bool
        Whether more than the header could be read, which takes CAP_SYS_ADMIN.
    acs : str or None
        The control word of Access Control Services, as lspci writes it.
    """

    address: str
    is_whole: bool
    acs: str | None
    ats_enabled: bool | None
    max_read_request_bytes: int | None
    relaxed_ordering: bool | None


@dataclass(frozen=True, slots=True)
class CufileFacts:
    """What there is of GPUDirect Storage without opening its library.

    Attributes
    ----------
    config_path : str or None
        The cufile.json that the library would read; None when there is none and its defaults hold.
    nvidia_fs_version : str or None
        Of the loaded kernel module.
    nvidia_fs_modules : tuple of str
        The storage drivers that have registered with it.
    """

    config_path: str | None
    nvidia_fs_version: str | None
    nvidia_fs_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is known about a machine before a case runs.

    Attributes
    ----------
    gpus : tuple of PciDevice
        NVIDIA GPUs on the PCI bus, driver or not.
    rdma_devices : tuple of RdmaDevice
        RDMA devices of the kernel.
    cuda, verbs : facts or None
        What the API answered; None when it was not asked, or when it failed: then ``cuda_failure`` or ``verbs_failure``
        says why.
    routes : tuple of RouteFacts
        What registration answered for each device, NIC and way; empty when CUDA or verbs did not answer.
    accelerators : tuple of PciDevice
        Those of Habana Labs on the PCI bus, driver or not.
    gaudi : facts or None
        What hl-thunk answered; it is asked where there is a library or a device.
    unreadable : tuple of Unreadable
        Files that exist and refused to be read.
    virtual_machine : str or None
        Where it shows that this is one.
    config : tuple of ConfigFacts
        Config spaces of GPUs, NICs and NVMe controllers, and of the bridges above them.
    nvme : tuple of NvmeController
        All of them.
    mounts : tuple of Mount
        Those on a block device.
    cufile : CufileFacts or None
        None where files were not looked at.
    nvml : NvmlFacts or None
        None where there is no such library, or where ``nvml_failure`` says why it did not answer.
    evidence : KernelEvidence or None
        What the kernel reported about devices by ioctl and netlink; None where it was not asked, as for a capture.
    """

    schema_version: int
    machine: str
    python: str
    kernel: KernelFacts
    gpus: tuple[PciDevice, ...]
    nvidia_driver_version: str | None
    rdma_devices: tuple[RdmaDevice, ...]
    libraries: tuple[LibraryFacts, ...]
    packages: tuple[PackageFacts, ...]
    limits: Limits
    container: tuple[str, ...]
    cuda: CudaFacts | None
    cuda_failure: ApiFailure | None
    verbs: VerbsFacts | None
    verbs_failure: ApiFailure | None
    routes: tuple[RouteFacts, ...]
    routes_failure: ApiFailure | None
    unreadable: tuple[Unreadable, ...]
    virtual_machine: str | None = None
    config: tuple[ConfigFacts, ...] = ()
    nvme: tuple[NvmeController, ...] = ()
    mounts: tuple[Mount, ...] = ()
    cufile: CufileFacts | None = None
    nvml: NvmlFacts | None = None
    nvml_failure: ApiFailure | None = None
    accelerators: tuple[PciDevice, ...] = ()
    gaudi: GaudiFacts | None = None
    gaudi_failure: ApiFailure | None = None
    evidence: KernelEvidence | None = None

    def to_json(self) -> str:
        """As indented JSON."""
        return json.dumps(plain.to_plain(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "facts") -> Self:
        """Read back what :meth:`to_json` gave; `where` is what to call it in errors.

        Raises
        ------
        UsageError
            ``MALFORMED``: no JSON, another version, or a field that is not as it must be.
        """
        data = plain.parse_json(text, where=where)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            message = f"{where}: expected schema_version {SCHEMA_VERSION}, found {version!r}"
            raise UsageError(message, reason=Reason.MALFORMED)
        return plain.from_plain(cls, data, where=where)

    @property
    def digest(self) -> str:
        """Names exactly these facts."""
        return plain.digest(self)

    @property
    def failures(self) -> tuple[ApiFailure, ...]:
        """Of the APIs that were asked and did not answer."""
        return tuple(
            failure
            for failure in (
                self.verbs_failure,
                self.cuda_failure,
                self.routes_failure,
                self.nvml_failure,
                self.gaudi_failure,
            )
            if failure is not None
        )

    def api_libraries(self, api: str) -> tuple[LoadedLibrary, ...]:
        """What was loaded to ask ``verbs``, ``cuda`` or ``hlthunk``."""
        asked: dict[str, VerbsFacts | CudaFacts | GaudiFacts | None] = {
            "verbs": self.verbs,
            "cuda": self.cuda,
            "hlthunk": self.gaudi,
        }
        answered = asked.get(api)
        return answered.libraries if answered is not None else ()


def notable(libraries: Iterable[LoadedLibrary]) -> tuple[LoadedLibrary, ...]:
    """Those that say which API is which: the API libraries, their bindings, RDMA providers, and whatever carries a
    note of its own.
    """
    stems = ("libibverbs.", "librdmacm.", "libcuda.", "libcufile", "libhl-thunk.", "libhlthunk.", "libnvidia-ml.")
    return tuple(
        library
        for library in libraries
        if (library.soname or library.path.rpartition("/")[2]).startswith(stems)
        or "/libibverbs/" in library.path
        or "/pyverbs/device." in library.path
        or any(note.owner == "GDRKIT" for note in library.notes)
    )
