"""Environments for child processes that run on software twins or on the libraries of the system.

A software twin is a drop-in library that emulates the hardware. Only this module knows where the twins are. It finds
them in the installed package ``gdrkit_twins`` and sets these variables in the environment of the child:

- LD_LIBRARY_PATH begins with the folders of the twins.
- LD_AUDIT names a library that makes the loader open a twin if a program opens the real library by its path or RPATH.
- LD_PRELOAD names a library by which the program finds the devices of the verbs twin in /sys and /dev.

The program in the child is not changed. The dynamic loader reads these variables only at the start of a process, so a
process cannot switch to other libraries later.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from gdrkit import __version__
from gdrkit.errors import Api, Reason, SetupMissing, UsageError
from gdrkit.faultplan import read_plan
from gdrkit.host import STATE_VARIABLE, HostTree, habana_accelerators, nvidia_gpus, rdma_devices

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "APIS_WITH_TWINS",
    "USAGE_VARIABLE",
    "Launch",
    "TwinControl",
    "api_of_library",
    "describe_hardware_replaced_by_twins",
    "device_writer",
    "environment",
    "is_twin",
    "parse_apis",
    "present_hardware",
    "twin_control",
    "twins_available",
    "with_state",
]

# For each API that has a twin: the folder below lib/, and the file that this folder must contain.
_TWIN_FILE_BY_API = {
    Api.VERBS: ("ibverbs", "libibverbs.so.1"),
    Api.CUDA: ("cuda", "libcuda.so.1"),
    Api.CUFILE: ("cufile", "libcufile.so.0"),
    Api.HLTHUNK: ("hlthunk", "libhl-thunk.so"),
}
APIS_WITH_TWINS: frozenset[Api] = frozenset(_TWIN_FILE_BY_API)

_TWINS_PACKAGE = "gdrkit_twins"
# This variable names a folder of twins that replaces the installed ones, such as a build with sanitizers. It has the
# same layout as the lib folder of the installed package.
_TWINS_FOLDER_VARIABLE = "GDRKIT_TWINS_LIB"
# This variable names the runtime library of a sanitizer, which is then added to LD_PRELOAD.
_TWINS_PRELOAD_VARIABLE = "GDRKIT_TWINS_PRELOAD"
_SEED_MAX = (1 << 64) - 1
# The folder below lib/ that has the three files below, which native/twins/loader builds.
_LOADER_FOLDER = "loader"
_AUDIT_LIBRARY, _DEVICES_LIBRARY = "libgdrkit-twins-audit.so", "libgdrkit-twins-devices.so"
_DEVICE_WRITER = "gdrkit-twins-devices"
# This variable has the paths of the twins, for the audit library.
_LIBRARIES_VARIABLE = "GDRKIT_TWINS_LIBRARIES"
# This variable names the folder with the state of the domain (see Launch).
_DOMAIN_STATE_VARIABLE = "GDRKIT_TWINS_STATE"
# This variable names the file in which the twins record what the processes of a run do.
USAGE_VARIABLE = "GDRKIT_TWINS_RUN"
# The stem of a library is its name without its version and without the hash that auditwheel adds. get_stem in
# native/twins/loader/audit.cpp has the same rule.
_LIBRARY_NAME_PATTERN = re.compile(r"^(?P<stem>lib.+?)(-[0-9a-f]{8})?\.so(\..*)?$")


class TwinControl(Protocol):
    """Functions with which a test examines and controls the twins that its process has loaded."""

    def ledger(self, api: str) -> dict[str, object] | None:
        """Return the state of the twin of `api`: live handles, calls by function, seed. None if it is not loaded."""

    def set_faults(self, api: str, plan: str) -> None:
        """Replace the fault plan of the twin of `api` in this process."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The options of a child process.

    Attributes
    ----------
    twin_apis : frozenset of Api
        The APIs that run on twins. All others run on the libraries of the system.
    seed : int or None
        The seed of the twins' keys, queue pair numbers and delays. None means the seed in the environment
        (GDRKIT_TWINS_SEED), or else a random seed.
    faults : Path or None
        A fault plan for the twins: a file that says which calls fail, and how.
    domain : str or None
        The name of a group of processes. Processes of one user with the same domain see each other like processes of
        one machine. A domain in the environment takes precedence. If both are missing, the child gets the default
        domain, which all processes of this user share.
    isolated : bool
        Whether to use a random domain that no other process has, whatever the environment says. If so, `domain` must be
        None.
    """

    twin_apis: frozenset[Api] = frozenset()
    seed: int | None = None
    faults: Path | None = None
    domain: str | None = None
    isolated: bool = False


def parse_apis(text: str) -> frozenset[Api]:
    """Return the set of APIs that a text such as ``verbs,cuda`` names.

    Raises
    ------
    UsageError
        A name is not an API with a twin, or there are no names.
    """
    api_by_name = {api.value: api for api in APIS_WITH_TWINS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown_names = [name for name in names if name not in api_by_name]
    if unknown_names or not names:
        message = (
            f"the APIs must be some of {', '.join(sorted(api_by_name))}, not {', '.join(unknown_names) or repr(text)}"
        )
        raise UsageError(message)
    return frozenset(api_by_name[name] for name in names)


def twins_available() -> frozenset[Api]:
    """Return the APIs whose twin is installed."""
    return frozenset(api for api in APIS_WITH_TWINS if _find_twin_folder(api) is not None)


def environment(launch: Launch, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child with these options.

    Parameters
    ----------
    launch : Launch
        The options of the child.
    base : mapping or None
        The environment to start from. None means the environment of this process. The function removes all twins from
        the environment before it adds the chosen ones. It keeps GDRKIT_TWINS_DOMAIN and the state of that domain,
        unless `launch` is isolated.

    Raises
    ------
    SetupMissing
        A chosen twin is not installed.
    UsageError
        The seed is out of range, or the launch is isolated and names a domain.
    ApiError
        The fault plan is malformed or cannot be read.
    """
    # The options are checked first, so that a wrong option causes the same error on a machine without twins.
    _check_options(launch)
    child_environment = dict(os.environ if base is None else base)
    twin_folders = [_require_twin_folder(api) for api in sorted(launch.twin_apis, key=lambda api: api.value)]
    _prepend_paths(child_environment, "LD_LIBRARY_PATH", twin_folders)
    audit_library = _find_loader_file(_AUDIT_LIBRARY) if launch.twin_apis else None
    _prepend_paths(child_environment, "LD_AUDIT", [] if audit_library is None else [audit_library])
    child_environment.pop(_LIBRARIES_VARIABLE, None)
    _prepend_paths(child_environment, "LD_PRELOAD", [])  # This only removes the libraries of the twins.
    domain_folder = child_environment.pop(_DOMAIN_STATE_VARIABLE, None)
    if not launch.twin_apis:
        child_environment.pop(USAGE_VARIABLE, None)
        return child_environment
    child_environment[_LIBRARIES_VARIABLE] = os.pathsep.join(_list_twin_files(launch.twin_apis))
    if launch.isolated:
        child_environment["GDRKIT_TWINS_DOMAIN"] = f"run-{os.getpid()}-{secrets.token_hex(6)}"
    elif launch.domain is not None:
        child_environment.setdefault("GDRKIT_TWINS_DOMAIN", launch.domain)
    if launch.seed is not None:
        child_environment["GDRKIT_TWINS_SEED"] = str(launch.seed)
    child_environment.setdefault("GDRKIT_TWINS_SEED", str(secrets.randbits(64)))
    if launch.faults is not None:
        child_environment["GDRKIT_TWINS_FAULTS"] = str(launch.faults.resolve())
    sanitizer_library = child_environment.get(_TWINS_PRELOAD_VARIABLE)
    if sanitizer_library:
        # The runtime of a sanitizer must be loaded before the libraries that were built with the sanitizer.
        other_libraries = [
            name for name in child_environment.get("LD_PRELOAD", "").split(":") if name and name != sanitizer_library
        ]
        child_environment["LD_PRELOAD"] = ":".join([sanitizer_library, *other_libraries])
    if domain_folder is not None and not launch.isolated:
        _preload_devices_library(child_environment, launch, domain_folder)
    return child_environment


def _check_options(launch: Launch) -> None:
    if launch.seed is not None and not 0 <= launch.seed <= _SEED_MAX:
        message = f"seed must be in 0 to 2**64 - 1, not {launch.seed}"
        raise UsageError(message)
    if launch.isolated and launch.domain is not None:
        message = f"an isolated launch has a random domain, so domain must be None, not {launch.domain!r}"
        raise UsageError(message)
    if launch.faults is not None:
        read_plan(launch.faults)


def with_state(
    child_environment: Mapping[str, str], launch: Launch, *, state: Path, usage_file: Path
) -> dict[str, str]:
    """Return the environment of a child that shares the state of its domain and records what it does.

    Parameters
    ----------
    child_environment : mapping
        The result of :func:`environment` for `launch`.
    launch : Launch
        The options of the child.
    state : Path
        The folder of the domain, with the port counters and the tree of device files.
    usage_file : Path
        The file into which the twins of the child and its descendants write.
    """
    reporting_environment = {**child_environment, USAGE_VARIABLE: str(usage_file)}
    # A domain is like a separate machine, so gdrkit must not store facts about the domain as facts about this machine.
    reporting_environment.setdefault(STATE_VARIABLE, str(state / "gdrkit"))
    _prepend_paths(reporting_environment, "LD_PRELOAD", [])
    _preload_devices_library(reporting_environment, launch, str(state))
    return reporting_environment


def device_writer() -> Path | None:
    """Return the program that writes the tree of device files of the verbs twin, or None if it is not installed."""
    return _find_loader_file(_DEVICE_WRITER)


def api_of_library(path: str) -> Api | None:
    """Return the API that a library with this file name implements, e.g. VERBS for ``libibverbs.so.1``, or None."""
    stem = _find_stem(path)
    folder_by_api = {api: folder for api in _TWIN_FILE_BY_API if (folder := _find_twin_folder(api)) is not None}
    return next(
        (api for api, folder in folder_by_api.items() if stem in map(_find_stem, _list_libraries(folder))), None
    )


def is_twin(path: str) -> bool:
    """Return whether the file is in a folder of the twins."""
    return any(Path(path).is_relative_to(folder) for root in _list_twin_roots() for folder in (root, root.resolve()))


def present_hardware(tree: HostTree) -> dict[Api, str]:
    """Return a short description of the hardware of each API that has a twin, read from sysfs, procfs and /dev.

    An API that has no hardware on this host is not in the result.
    """
    hardware_by_api: dict[Api, str] = {}
    # In a child of `gdrkit run`, sysfs shows only the devices of the verbs twin, which are not hardware.
    is_process_on_twins = tree.is_this_host and _DOMAIN_STATE_VARIABLE in os.environ
    nics = [] if is_process_on_twins else [device.name for device in rdma_devices(tree)]
    if nics:
        hardware_by_api[Api.VERBS] = "RDMA devices " + ", ".join(nics)
    gpus = nvidia_gpus(tree)
    if gpus:
        hardware_by_api[Api.CUDA] = "NVIDIA GPUs " + ", ".join(gpu.address for gpu in gpus)
    elif tree.exists("/dev/nvidiactl") or tree.exists("/proc/driver/nvidia/version"):
        # A container may hide the PCI devices and still have the device nodes.
        hardware_by_api[Api.CUDA] = "an NVIDIA driver"
    if Api.CUDA in hardware_by_api:
        # libcufile has no hardware of its own: it is a library of NVIDIA for NVIDIA GPUs.
        hardware_by_api[Api.CUFILE] = hardware_by_api[Api.CUDA]
    accelerators = habana_accelerators(tree)
    if accelerators:
        hardware_by_api[Api.HLTHUNK] = "accelerators " + ", ".join(device.address for device in accelerators)
    return hardware_by_api


def describe_hardware_replaced_by_twins(launch: Launch, tree: HostTree) -> str | None:
    """Return one line that names the hardware that the child will not use because of its twins, or None."""
    descriptions = [
        f"{api.value} runs on its software twin and does not use {hardware}"
        for api, hardware in sorted(present_hardware(tree).items(), key=lambda pair: pair[0].value)
        if api in launch.twin_apis
    ]
    return "; ".join(descriptions) or None


def twin_control() -> TwinControl:
    """Return the module of the twins' package that gives tests access to the twins of this process.

    Raises
    ------
    SetupMissing
        The twins are not installed.
    """
    try:
        module = importlib.import_module(f"{_TWINS_PACKAGE}.control")
    except ModuleNotFoundError as error:
        detail = f"No module named {error.name!r}"
        raise _make_twins_missing_error(_TWINS_PACKAGE, detail) from error
    return cast("TwinControl", module)


def _find_twin_folder(api: Api) -> Path | None:
    """Return the folder of the twin of `api`, or None if the twin is not installed."""
    folder_name, file_name = _TWIN_FILE_BY_API[api]
    for root in _list_twin_roots():
        if (root / folder_name / file_name).is_file():
            return root / folder_name
    return None


def _list_twin_roots() -> list[Path]:
    """Return the folders that contain the folders of the twins."""
    replacing_folder = os.environ.get(_TWINS_FOLDER_VARIABLE)
    if replacing_folder:
        return [Path(replacing_folder).resolve()]
    spec = importlib.util.find_spec(_TWINS_PACKAGE)
    package_folders = spec.submodule_search_locations if spec is not None else None
    return [Path(package_folder) / "lib" for package_folder in package_folders or ()]


def _require_twin_folder(api: Api) -> Path:
    folder = _find_twin_folder(api)
    if folder is None:
        raise _make_twins_missing_error(
            _TWIN_FILE_BY_API[api][1], f"searched {', '.join(map(str, _list_twin_roots())) or 'no folder'}"
        )
    return folder


def _make_twins_missing_error(library: str, detail: str) -> SetupMissing:
    return SetupMissing(
        api=Api.TWINS,
        operation="find the software twins",
        status=None,
        status_name="not installed",
        arguments={"library": library},
        reason=Reason.LIBRARY_MISSING,
        what_to_do=f"pip install the wheel of gdrkit_twins {__version__}, which `nox -s wheels` builds in a checkout",
        detail=detail,
    )


def _preload_devices_library(child_environment: dict[str, str], launch: Launch, domain_folder: str) -> None:
    """Append the library that shows the devices of the verbs twin to LD_PRELOAD, if the child uses that twin."""
    devices_library = _find_loader_file(_DEVICES_LIBRARY)
    if Api.VERBS in launch.twin_apis and devices_library is not None:
        child_environment[_DOMAIN_STATE_VARIABLE] = domain_folder
        other_libraries = filter(None, [child_environment.get("LD_PRELOAD")])
        child_environment["LD_PRELOAD"] = ":".join([*other_libraries, str(devices_library)])


def _list_twin_files(twin_apis: frozenset[Api]) -> list[str]:
    """Return the paths of the libraries of these twins. The twin of verbs has a second library, librdmacm."""
    folders = [_require_twin_folder(api) for api in sorted(twin_apis, key=lambda api: api.value)]
    return [path for folder in folders for path in _list_libraries(folder)]


@functools.cache
def _list_libraries(folder: Path) -> tuple[str, ...]:
    """Return the libraries in a folder of the twins. Symbolic links, which a build folder contains, are left out."""
    return tuple(sorted(str(path) for path in folder.glob("lib*.so*") if not path.is_symlink()))


def _find_loader_file(name: str) -> Path | None:
    """Return the path of a file that native/twins/loader builds, or None if it is not installed."""
    return next((path for root in _list_twin_roots() if (path := root / _LOADER_FOLDER / name).is_file()), None)


def _find_stem(path: str) -> str | None:
    match = _LIBRARY_NAME_PATTERN.match(Path(path).name)
    return None if match is None else match["stem"]


def _prepend_paths(child_environment: dict[str, str], variable: str, paths: list[Path]) -> None:
    """Put `paths` at the front of a variable, and remove all other paths of the twins from it."""
    other_paths = [path for path in child_environment.pop(variable, "").split(":") if path and not is_twin(path)]
    if paths or other_paths:
        child_environment[variable] = ":".join([*map(str, paths), *other_paths])
