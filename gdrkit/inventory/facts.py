"""Facts about one machine, as frozen dataclasses that can be written as JSON and read again.

A fact is something that was observed. An API whose query failed has an :class:`ApiFailure` instead, which says what to
do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from gdrkit import serialization
from gdrkit.errors import ApiError, GdrkitError, Reason
from gdrkit.evidence import DeviceNode, KernelEvidence, LoadedLibrary  # noqa: TC001 - types of fields are read at run time.
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

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "EXPANDABLE_SEGMENTS_VARIABLES",
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
    "select_substrate_libraries",
]

SCHEMA_VERSION = 1
# The variables with which PyTorch enables expandable segments: the name since PyTorch 2.9, and the older one.
EXPANDABLE_SEGMENTS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """The reason why an API could not be queried, with the fields of :class:`~gdrkit.errors.ApiError`."""

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
        """Return the failure that describes `error`.

        `api` and `operation` name the query. They are used if the error is not an :class:`~gdrkit.errors.ApiError`.
        """
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
    """One device as the CUDA driver reports it.

    Attributes
    ----------
    attributes : mapping
        Values of device attributes, by their names without CU_DEVICE_ATTRIBUTE_.
    """

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    attributes: dict[str, int]

    def has(self, attribute: str) -> bool:
        """Return whether this attribute is known and not 0."""
        return bool(self.attributes.get(attribute, 0))


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The devices that the CUDA driver reported, and the libraries and device nodes that the query opened."""

    driver_version: str
    devices: tuple[CudaDeviceFacts, ...]
    libraries: tuple[LoadedLibrary, ...]
    nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class NicFacts:
    """One device as verbs reports it.

    Attributes
    ----------
    active_ports : tuple of int
        Numbers of the active ports.
    dmabuf : bool or None
        Whether the device can register dma-bufs, as a call showed; None if it could not be opened (see ``failure``).
    """

    name: str
    driver: str | None
    node_guid: str
    active_ports: tuple[int, ...]
    dmabuf: bool | None
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class VerbsFacts:
    """The devices that verbs reported, and the libraries and device nodes that the query opened."""

    nics: tuple[NicFacts, ...]
    libraries: tuple[LoadedLibrary, ...]
    nodes: tuple[DeviceNode, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """Whether a NIC can register the memory of a CUDA device by one route, as tried with a small allocation.

    Attributes
    ----------
    way : str
        The route: ``dmabuf`` or ``peer_memory``.
    """

    device_index: int
    nic: str
    way: str
    possible: bool
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """The library that the loader would open for `soname`; ``path`` is None if it would not find one.

    ``error`` is the reason why the file could not be examined.
    """

    soname: str
    path: str | None
    build_id: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class PackageFacts:
    """A Python package; ``version`` is None if it is not installed for this Python."""

    name: str
    version: str | None


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """Registers in the config space of a GPU, NIC or NVMe controller, or of a bridge above such a device.

    A register that could not be read is None.

    Attributes
    ----------
    is_whole : bool
        Whether more than the header could be read, which needs CAP_SYS_ADMIN.
    acs : str or None
        The control word of Access Control Services, in the notation of lspci.
    """

    address: str
    is_whole: bool
    acs: str | None
    ats_enabled: bool | None
    max_read_request_bytes: int | None
    relaxed_ordering: bool | None


@dataclass(frozen=True, slots=True)
class CufileFacts:
    """The parts of GPUDirect Storage that are visible without opening its library.

    Attributes
    ----------
    config_path : str or None
        The cufile.json that the library would read; None if the file does not exist and the library uses its defaults.
    nvidia_fs_version : str or None
        Version of the loaded kernel module nvidia-fs.
    nvidia_fs_modules : tuple of str
        The storage drivers that have registered with nvidia-fs.
    """

    config_path: str | None
    nvidia_fs_version: str | None
    nvidia_fs_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is known about a machine before a case runs.

    Attributes
    ----------
    machine, python : str
        Processor architecture of the machine, and implementation and version of Python; empty for a captured machine
        whose facts were read from its files.
    gpus : tuple of PciDevice
        NVIDIA GPUs on the PCI bus, with or without a driver.
    rdma_devices : tuple of RdmaDevice
        RDMA devices of the kernel.
    cuda, verbs : facts or None
        Result of the query of the API; None if the API was not queried or failed. ``cuda_failure`` and
        ``verbs_failure`` describe a failure.
    routes : tuple of RouteFacts
        Result of a registration for each device, NIC and route; empty if CUDA or verbs failed.
    accelerators : tuple of PciDevice
        Accelerators of Habana Labs on the PCI bus, with or without a driver.
    gaudi : facts or None
        Result of the query; None if there was no query or it failed (``gaudi_failure``). gdrkit queries the library if
        the machine has it, or an accelerator of this vendor.
    container : tuple of str
        The evidence that the process runs in a container; empty if there is none.
    unreadable : tuple of Unreadable
        Files that exist and could not be read.
    virtual_machine : str or None
        The evidence that the machine is virtual; None if there is none.
    config : tuple of ConfigFacts
        Config spaces of GPUs, NICs and NVMe controllers, and of the bridges above them.
    nvme : tuple of NvmeController
        All NVMe controllers.
    mounts : tuple of Mount
        Mounts on a block device.
    cufile : CufileFacts or None
        None if the files were not read.
    nvml : NvmlFacts or None
        None if there is no such library, or if its query failed (``nvml_failure``).
    evidence : KernelEvidence or None
        Reports of the kernel about devices by ioctl and netlink; None if the kernel was not queried, as for a capture.
    dmi : mapping
        Vendor, product and asset tag that the firmware states, by their names in sysfs, e.g. ``product_name``.
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
    dmi: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the facts as indented JSON."""
        return json.dumps(serialization.to_json_data(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "facts") -> Self:
        """Parse the output of :meth:`to_json`. `where` names the text in errors.

        Raises
        ------
        UsageError
            ``MALFORMED``: the text is not JSON, has an unsupported version, or has an invalid field.
        """
        return serialization.parse_versioned(cls, text, version=SCHEMA_VERSION, where=where)

    @property
    def digest(self) -> str:
        """SHA-256 digest of these facts, as in the field facts_digest of a record."""
        return serialization.digest(self)

    @property
    def failures(self) -> tuple[ApiFailure, ...]:
        """Failures of the APIs that were queried."""
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
        """Return the libraries that were loaded to query `api`: ``verbs``, ``cuda`` or ``hlthunk``."""
        facts_by_api: dict[str, VerbsFacts | CudaFacts | GaudiFacts | None] = {
            "verbs": self.verbs,
            "cuda": self.cuda,
            "hlthunk": self.gaudi,
        }
        api_facts = facts_by_api.get(api)
        return api_facts.libraries if api_facts is not None else ()


def select_substrate_libraries(libraries: Iterable[LoadedLibrary]) -> tuple[LoadedLibrary, ...]:
    """Return the libraries that show which implementation of an API a process uses.

    These are the libraries of the APIs, their bindings, the RDMA providers, and every library that has a GDRKIT note.
    """
    file_name_prefixes = (
        "libibverbs.",
        "librdmacm.",
        "libcuda.",
        "libcufile",
        "libhl-thunk.",
        "libhlthunk.",
        "libnvidia-ml.",
    )
    return tuple(
        library
        for library in libraries
        if (library.soname or library.path.rpartition("/")[2]).startswith(file_name_prefixes)
        or "/libibverbs/" in library.path
        or "/pyverbs/device." in library.path
        or any(note.owner == "GDRKIT" for note in library.notes)
    )
