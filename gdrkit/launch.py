"""Start of child processes on software twins or on the libraries of the system.

A software twin is a drop-in library that emulates the hardware. This is the only module that knows where the twins are.
It finds them in the installed package ``gdrkit_twins`` and puts their folders at the front of LD_LIBRARY_PATH in the
environment of the child. The program in the child is not changed. The dynamic loader reads LD_LIBRARY_PATH only at the
start of a process, so a process cannot switch to other libraries later.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from gdrkit.errors import Api, ApiError, Reason, SetupMissing, UsageError, errno_name
from gdrkit.faultplan import read_plan
from gdrkit.host import HostTree, habana_accelerators, nvidia_gpus, rdma_devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "TWINNED",
    "Launch",
    "TwinControl",
    "environment",
    "execute",
    "overridden_hardware",
    "parse_apis",
    "present_hardware",
    "twin_control",
    "twins_available",
]

# For each API that has a twin: the folder below lib/, and the file that this folder must contain.
_TWINS = {
    Api.VERBS: ("ibverbs", "libibverbs.so.1"),
    Api.CUDA: ("cuda", "libcuda.so.1"),
    Api.CUFILE: ("cufile", "libcufile.so.0"),
    Api.HLTHUNK: ("hlthunk", "libhl-thunk.so"),
}
TWINNED: frozenset[Api] = frozenset(_TWINS)

_TWINS_PACKAGE = "gdrkit_twins"
# This variable names a folder of twins that replaces the installed ones, such as a build with sanitizers. Its layout is
# that of the lib folder of the installed package.
_TWINS_FOLDER_VARIABLE = "GDRKIT_TWINS_LIB"
# This variable names the runtime library of a sanitizer, which is then added to LD_PRELOAD.
_TWINS_PRELOAD_VARIABLE = "GDRKIT_TWINS_PRELOAD"
_SEED_MAX = (1 << 64) - 1


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
    software : frozenset of Api
        The APIs that run on twins. All others run on the libraries of the system.
    seed : int or None
        The seed of the twins' keys, queue pair numbers and delays. None means a random seed.
    faults : Path or None
        A fault plan for the twins: a file that says which calls fail, and how.
    domain : str or None
        The name of a group of processes. Processes of one user with the same domain see each other like processes of
        one machine. A domain in the environment takes precedence. If both are missing, the child gets the default
        domain, which all processes of this user share.
    isolated : bool
        Use a random domain that no other process has, whatever the environment says. `domain` must then be None.
    """

    software: frozenset[Api] = frozenset()
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
    api_of_name = {api.value: api for api in TWINNED}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in api_of_name]
    if unknown or not names:
        message = f"the APIs must be some of {', '.join(sorted(api_of_name))}, not {', '.join(unknown) or repr(text)}"
        raise UsageError(message)
    return frozenset(api_of_name[name] for name in names)


def twins_available() -> frozenset[Api]:
    """Return the APIs whose twin is installed."""
    return frozenset(api for api in TWINNED if _twin_folder(api) is not None)


def environment(launch: Launch, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child with these options.

    Parameters
    ----------
    launch : Launch
        The options of the child.
    base : mapping or None
        The environment to start from. None means the environment of this process. Folders of twins are first removed
        from its LD_LIBRARY_PATH, so that the child finds only the chosen twins. Its GDRKIT_TWINS_DOMAIN is kept unless
        `launch` is isolated.

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
    folders = [_require_twin_folder(api) for api in sorted(launch.software, key=lambda api: api.value)]
    path = [*map(str, folders), *_without_twins(child_environment.get("LD_LIBRARY_PATH", ""))]
    child_environment.pop("LD_LIBRARY_PATH", None)
    if path:
        child_environment["LD_LIBRARY_PATH"] = os.pathsep.join(path)
    if not launch.software:
        return child_environment
    if launch.isolated:
        child_environment["GDRKIT_TWINS_DOMAIN"] = f"run-{os.getpid()}-{secrets.token_hex(6)}"
    elif launch.domain is not None:
        child_environment.setdefault("GDRKIT_TWINS_DOMAIN", launch.domain)
    if launch.seed is not None:
        child_environment["GDRKIT_TWINS_SEED"] = str(launch.seed)
    child_environment.setdefault("GDRKIT_TWINS_SEED", str(secrets.randbits(64)))
    if launch.faults is not None:
        child_environment["GDRKIT_TWINS_FAULTS"] = str(launch.faults.resolve())
    preload = child_environment.get(_TWINS_PRELOAD_VARIABLE)
    if preload:
        # The runtime of a sanitizer must be loaded before the libraries that were built with the sanitizer.
        other_libraries = [
            name for name in child_environment.get("LD_PRELOAD", "").split(":") if name and name != preload
        ]
        child_environment["LD_PRELOAD"] = ":".join([preload, *other_libraries])
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


def execute(launch: Launch, command: Sequence[str], *, base: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process with `command` in the environment of :func:`environment`.

    Signals and the exit code are then those of the command.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) or another errno of execvp.
    SetupMissing, UsageError
        See :func:`environment`.
    """
    if not command:
        message = "no command was given"
        raise UsageError(
            message, what_to_do="write it after --, for example: gdrkit run --software -- python my_program.py"
        )
    child_environment = environment(launch, base=base)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), child_environment)  # noqa: S606 - the command is not passed through a shell.
    except OSError as error:
        error_number = error.errno or errno.EIO
        raise ApiError(
            api=Api.KERNEL,
            operation="execvp",
            status=error_number,
            status_name=errno_name(error_number),
            errno=error_number,
            arguments={"command": command[0]},
            reason=Reason.NO_PERMISSION if error_number == errno.EACCES else Reason.BAD_ARGUMENT,
            what_to_do="check the name of the command" if error_number == errno.ENOENT else "make it executable",
        ) from error


def present_hardware(tree: HostTree) -> dict[Api, str]:
    """Return a short description of the hardware of each API that has a twin, read from sysfs, procfs and /dev.

    An API that has no hardware on this host is not in the result.
    """
    hardware_of_api: dict[Api, str] = {}
    nics = [device.name for device in rdma_devices(tree)]
    if nics:
        hardware_of_api[Api.VERBS] = "RDMA devices " + ", ".join(nics)
    gpus = nvidia_gpus(tree)
    if gpus:
        hardware_of_api[Api.CUDA] = "NVIDIA GPUs " + ", ".join(gpu.address for gpu in gpus)
    elif tree.exists("/dev/nvidiactl") or tree.exists("/proc/driver/nvidia/version"):
        # A container may hide the PCI devices and still have the device nodes.
        hardware_of_api[Api.CUDA] = "an NVIDIA driver"
    if Api.CUDA in hardware_of_api:
        # libcufile has no hardware of its own: it is a library of NVIDIA for NVIDIA GPUs.
        hardware_of_api[Api.CUFILE] = hardware_of_api[Api.CUDA]
    accelerators = habana_accelerators(tree)
    if accelerators:
        hardware_of_api[Api.HLTHUNK] = "accelerators " + ", ".join(device.address for device in accelerators)
    return hardware_of_api


def overridden_hardware(launch: Launch, tree: HostTree) -> str | None:
    """Return one line that names the hardware that the child will not use because of its twins, or None."""
    sentences = [
        f"{api.value} runs on its software twin and does not use {hardware}"
        for api, hardware in sorted(present_hardware(tree).items(), key=lambda pair: pair[0].value)
        if api in launch.software
    ]
    return "; ".join(sentences) or None


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
        raise _twins_missing(_TWINS_PACKAGE, detail) from error
    return cast("TwinControl", module)


def _twin_folder(api: Api) -> Path | None:
    """Return the folder of the twin of `api`, or None if the twin is not installed."""
    folder, file = _TWINS[api]
    for root in _twin_roots():
        if (root / folder / file).is_file():
            return root / folder
    return None


def _twin_roots() -> list[Path]:
    """Return the folders whose subfolders are the folders of the twins."""
    override = os.environ.get(_TWINS_FOLDER_VARIABLE)
    if override:
        return [Path(override).resolve()]
    spec = importlib.util.find_spec(_TWINS_PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / "lib" for location in locations or ()]


def _require_twin_folder(api: Api) -> Path:
    folder = _twin_folder(api)
    if folder is None:
        raise _twins_missing(_TWINS[api][1], f"searched {', '.join(map(str, _twin_roots())) or 'no folder'}")
    return folder


def _twins_missing(library: str, detail: str) -> SetupMissing:
    return SetupMissing(
        api=Api.TWINS,
        operation="find the software twins",
        status=None,
        status_name="nothing",
        arguments={"library": library},
        reason=Reason.LIBRARY_MISSING,
        what_to_do="pip install 'gdrkit[software]'",
        detail=detail,
    )


def _without_twins(path: str) -> list[str]:
    twins = {str(folder) for api in TWINNED if (folder := _twin_folder(api)) is not None}
    return [folder for folder in path.split(os.pathsep) if folder and folder not in twins]
