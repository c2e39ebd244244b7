"""Collection of the facts about a machine, from its files and from queries of its APIs in child processes."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

from gdrkit import evidence, host, serialization
from gdrkit.errors import GdrkitError
from gdrkit.inventory import cufile_json
from gdrkit.inventory.capture import CapturedFiles, Recorder
from gdrkit.inventory.child_query import ChildQuery
from gdrkit.inventory.facts import (
    SCHEMA_VERSION,
    ApiFailure,
    ConfigFacts,
    CudaFacts,
    CufileFacts,
    Facts,
    LibraryFacts,
    PackageFacts,
    RouteFacts,
    VerbsFacts,
)
from gdrkit.inventory.gaudi import GaudiFacts, may_have_gaudi

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["probe"]

_SONAMES = (
    "libibverbs.so.1",
    "librdmacm.so.1",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcufile.so.0",
    "libhl-thunk.so",
    "libhlthunk.so",
)
_PACKAGES = ("gdrkit", "gdrkit-twins", "pyverbs", "cuda-bindings", "kvikio")
_QUERY_TIMEOUT_S = 60

_T = TypeVar("_T")


def probe(
    tree: host.HostTree | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    query_apis: bool = True,
    timeout_s: float = _QUERY_TIMEOUT_S,
) -> Facts:
    """Read the files of the host, query its APIs and return the facts.

    Parameters
    ----------
    tree : HostTree or None
        The files of the host; None means this host.
    environment : mapping or None
        Environment of the child processes that query the APIs. It also selects the libraries (LD_LIBRARY_PATH) and the
        cufile.json. The facts are valid only for processes with this environment. None means the environment of this
        process.
    query_apis : bool
        Whether to start the child processes that query the APIs.
    timeout_s : float
        Time limit of each query, in seconds. If a driver hangs, the facts have a failure with reason ``timeout``.
    """
    tree = host.HostTree() if tree is None else tree
    child_environment = dict(os.environ if environment is None else environment)
    with _ApiQueries(child_environment) as queries:
        # The files are read while the children wait for the APIs.
        queries.start(*(("verbs", "cuda") if query_apis else ()))
        facts = _read_files(tree, child_environment)
        installed_sonames = {library.soname for library in facts.libraries if library.path}
        if query_apis and "libnvidia-ml.so.1" in installed_sonames:
            queries.start("nvml")
        if query_apis and may_have_gaudi(tree, installed_sonames):
            queries.start("hlthunk")
        return replace(facts, **vars(queries.results(timeout_s)))


def _read_files(tree: host.HostTree, environment: Mapping[str, str]) -> Facts:
    """Return the facts that the files of `tree` contain. The facts of the APIs stay empty."""
    is_on_disk = not isinstance(tree.files, CapturedFiles)
    return Facts(
        schema_version=SCHEMA_VERSION,
        # The files of a captured machine do not contain the architecture and the version of Python.
        machine=os.uname().machine if is_on_disk else "",
        python=f"{platform.python_implementation()} {platform.python_version()}" if is_on_disk else "",
        kernel=host.kernel_facts(tree),
        gpus=host.nvidia_gpus(tree),
        nvidia_driver_version=host.nvidia_driver_version(tree),
        rdma_devices=host.rdma_devices(tree),
        libraries=tuple(_collect_library_facts(tree, environment.get("LD_LIBRARY_PATH", ""))),
        packages=tuple(PackageFacts(name=name, version=_find_package_version(name)) for name in _PACKAGES)
        if is_on_disk
        else (),
        limits=host.process_limits(tree),
        container=host.container_hints(tree),
        cuda=None,
        cuda_failure=None,
        verbs=None,
        verbs_failure=None,
        routes=(),
        routes_failure=None,
        virtual_machine=host.virtual_machine_hint(tree),
        dmi=host.dmi_strings(tree),
        config=_collect_config_facts(tree),
        nvme=host.nvme_controllers(tree),
        # Mounts with the major number 0 have no block device.
        mounts=tuple(mount for mount in host.mounts(tree) if not mount.device.startswith("0:")),
        cufile=_collect_cufile_facts(tree, environment),
        nvml=None,
        nvml_failure=None,
        accelerators=host.habana_accelerators(tree),
        gaudi=None,
        gaudi_failure=None,
        unreadable=tree.unreadable,
        evidence=evidence.kernel_evidence() if _is_this_host(tree) else None,
    )


def _is_this_host(tree: host.HostTree) -> bool:
    """Return whether the files are the files of this host. A recorder always reads this host."""
    return tree.is_this_host or isinstance(tree.files, Recorder)


@dataclass
class _ApiResults:
    """The results of all queries. The fields are fields of :class:`Facts` with the same names."""

    cuda: CudaFacts | None = None
    cuda_failure: ApiFailure | None = None
    verbs: VerbsFacts | None = None
    verbs_failure: ApiFailure | None = None
    routes: tuple[RouteFacts, ...] = ()
    routes_failure: ApiFailure | None = None
    nvml: host.NvmlFacts | None = None
    nvml_failure: ApiFailure | None = None
    gaudi: GaudiFacts | None = None
    gaudi_failure: ApiFailure | None = None


class _ApiQueries:
    """The child processes that query the APIs; a context manager, which kills children that still run at its end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._queries: dict[str, ChildQuery] = {}

    def start(self, *apis: str) -> None:
        """Start a child for each API. The children run at the same time, because each mostly waits for a driver."""
        self._queries |= {api: ChildQuery(["gdrkit.inventory.api_query", api], self._environment) for api in apis}

    def results(self, timeout_s: float) -> _ApiResults:
        """Wait for the results. If there are CUDA devices and NICs, also query which registration routes work."""
        results = _ApiResults()
        results.verbs, results.verbs_failure = self._take_result("verbs", VerbsFacts, timeout_s)
        results.cuda, results.cuda_failure = self._take_result("cuda", CudaFacts, timeout_s)
        results.nvml, results.nvml_failure = self._take_result("nvml", host.NvmlFacts, timeout_s)
        results.gaudi, results.gaudi_failure = self._take_result("hlthunk", GaudiFacts, timeout_s)
        if results.verbs and results.cuda and results.verbs.nics and results.cuda.devices:
            self.start("registration")
            routes, results.routes_failure = self._take_result("registration", tuple[RouteFacts, ...], timeout_s)
            results.routes = routes or ()
        return results

    def _take_result(self, api: str, facts_type: type[_T], timeout_s: float) -> tuple[_T | None, ApiFailure | None]:
        if api not in self._queries:
            return None, None
        data, failure = self._queries[api].result(timeout_s)
        return None if data is None else serialization.from_json_data(facts_type, data), failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for query in self._queries.values():
            query.close()


def _collect_config_facts(tree: host.HostTree) -> tuple[ConfigFacts, ...]:
    """Return the facts about the config space of each GPU, NIC and NVMe controller, and of the bridges above them."""
    devices = [
        device
        for device in host.pci_devices(tree)
        if host.is_gpu(device) or host.is_nic(device) or host.is_nvme(device)
    ]
    # The first part of a path is the host bridge, which has no config space below /sys/bus/pci/devices.
    addresses = dict.fromkeys(address for device in devices for address in host.pci_path(tree, device.address)[1:])
    config_facts = []
    for address in addresses:
        try:
            config_space = host.config_space(tree, address)
        except GdrkitError:
            # The doctor reads the config space again, and reports the error.
            config_space = None
        config_facts.append(
            ConfigFacts(
                address=address,
                is_whole=config_space is not None and config_space.is_whole,
                acs=None if config_space is None or config_space.acs is None else str(config_space.acs),
                ats_enabled=None if config_space is None else config_space.ats_enabled,
                max_read_request_bytes=None if config_space is None else config_space.max_read_request_bytes,
                relaxed_ordering=None if config_space is None else config_space.relaxed_ordering,
            )
        )
    return tuple(config_facts)


def _collect_cufile_facts(tree: host.HostTree, environment: Mapping[str, str]) -> CufileFacts:
    version = tree.text("/proc/driver/nvidia-fs/version") if tree.exists("/proc/driver/nvidia-fs") else None
    modules_text = tree.text("/proc/driver/nvidia-fs/modules") if version else None
    return CufileFacts(
        config_path=cufile_json.config_path(tree, environment),
        nvidia_fs_version=version,
        nvidia_fs_modules=tuple(
            line.split(":")[0].strip() for line in (modules_text or "").splitlines() if line.strip()
        ),
    )


def _collect_library_facts(tree: host.HostTree, search_path: str) -> Iterator[LibraryFacts]:
    for soname, path in host.find_libraries(tree, _SONAMES, search_path=search_path.split(os.pathsep)).items():
        if path is None:
            yield LibraryFacts(soname=soname, path=None, build_id=None, error=None)
        elif not isinstance(tree.files, host.DiskFiles | Recorder):
            yield LibraryFacts(soname=soname, path=path, build_id=None, error="it is not in the capture")
        else:
            # A recorder reads the files of this host.
            disk_path = host.HostTree().path(path) if isinstance(tree.files, Recorder) else tree.path(path)
            library = evidence.describe_library(str(disk_path))
            yield LibraryFacts(soname=soname, path=path, build_id=library.build_id, error=library.error)


def _find_package_version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
