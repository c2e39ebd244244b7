"""On which libraries a child process runs.

Level 3. The one room that knows where the software twins lie. It finds them through the installed package
``gdrkit_twins`` and puts their folders in front of the loader's path; a program above them is not changed and does not
know. Everything here decides before a process starts, since the loader reads its path only then.
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
    "Control",
    "Launch",
    "control",
    "environment",
    "execute",
    "overridden_hardware",
    "parse_apis",
    "present_hardware",
    "twins_available",
]

# The APIs that have a twin: the folder below lib/, and the file that must be in it.
_TWINS = {
    Api.VERBS: ("ibverbs", "libibverbs.so.1"),
    Api.CUDA: ("cuda", "libcuda.so.1"),
    Api.CUFILE: ("cufile", "libcufile.so.0"),
    Api.HLTHUNK: ("hlthunk", "libhl-thunk.so"),
}
TWINNED: frozenset[Api] = frozenset(_TWINS)

_PACKAGE = "gdrkit_twins"
# Another place of the libraries, e.g. a build with sanitizers; the layout below it is that of the wheel's lib folder.
_FOLDER_VARIABLE = "GDRKIT_TWINS_LIB"
_PRELOAD_VARIABLE = "GDRKIT_TWINS_PRELOAD"
_SEED_MAX = (1 << 64) - 1


class Control(Protocol):
    """How a suite looks inside a loaded twin."""

    def ledger(self, api: str) -> dict[str, object] | None:
        """The state of the twin of `api` in this process; None when none is loaded."""

    def set_faults(self, api: str, plan: str) -> None:
        """Replace the fault plan of the twin of `api` in this process."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a child.

    Attributes
    ----------
    software : frozenset of Api
        The APIs that run on twins; every other one runs on what the system has.
    seed : int or None
        Decides keys, queue-pair numbers and delays of the twins; drawn when None.
    faults : Path or None
        A fault plan for the twins.
    domain : str or None
        Processes of one user and one domain see each other as processes of one machine do. When None, that of the
        environment, else the default domain, which all processes of this user share.
    isolated : bool
        Draw a domain that no other process has, whatever the environment says. Not together with `domain`.
    """

    software: frozenset[Api] = frozenset()
    seed: int | None = None
    faults: Path | None = None
    domain: str | None = None
    isolated: bool = False


def parse_apis(text: str) -> frozenset[Api]:
    """``verbs,cuda`` as a set.

    Raises
    ------
    UsageError
        A name that has no twin.
    """
    known = {api.value: api for api in TWINNED}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        message = f"no twin for {', '.join(unknown) or 'nothing'}"
        raise UsageError(message, what_to_do="choose from " + ", ".join(sorted(known)))
    return frozenset(known[name] for name in names)


def twins_available() -> frozenset[Api]:
    """The APIs whose twin is installed."""
    return frozenset(api for api in TWINNED if _folder(api) is not None)


def environment(launch: Launch, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child on this substrate.

    Parameters
    ----------
    launch : Launch
        What it shall run on.
    base : mapping or None
        What to start from; the environment of this process when None. Folders of twins in its LD_LIBRARY_PATH are taken
        out first, so that exactly the chosen twins are found. A GDRKIT_TWINS_DOMAIN in it stays unless `launch` is
        isolated.

    Raises
    ------
    SetupMissing
        A chosen twin is not installed.
    UsageError
        The seed is out of range, or the launch is isolated and names a domain.
    ApiError
        The fault plan is malformed or cannot be read.
    """
    # A mistake in what was asked for is one on every machine, whatever is installed there.
    _check(launch)
    child = dict(os.environ if base is None else base)
    chosen = [_require(api) for api in sorted(launch.software, key=lambda api: api.value)]
    path = [*map(str, chosen), *_without_twins(child.get("LD_LIBRARY_PATH", ""))]
    child.pop("LD_LIBRARY_PATH", None)
    if path:
        child["LD_LIBRARY_PATH"] = os.pathsep.join(path)
    if not launch.software:
        return child
    if launch.isolated:
        child["GDRKIT_TWINS_DOMAIN"] = f"run-{os.getpid()}-{secrets.token_hex(6)}"
    elif launch.domain is not None:
        child.setdefault("GDRKIT_TWINS_DOMAIN", launch.domain)
    if launch.seed is not None:
        child["GDRKIT_TWINS_SEED"] = str(launch.seed)
    child.setdefault("GDRKIT_TWINS_SEED", str(secrets.randbits(64)))
    if launch.faults is not None:
        child["GDRKIT_TWINS_FAULTS"] = str(launch.faults.resolve())
    preload = child.get(_PRELOAD_VARIABLE)
    if preload:
        # A library built with a sanitizer needs its runtime before everything else.
        others = [name for name in child.get("LD_PRELOAD", "").split(":") if name and name != preload]
        child["LD_PRELOAD"] = ":".join([preload, *others])
    return child


def _check(launch: Launch) -> None:
    if launch.seed is not None and not 0 <= launch.seed <= _SEED_MAX:
        message = f"seed {launch.seed} is not in 0 to 2**64 - 1"
        raise UsageError(message)
    if launch.isolated and launch.domain is not None:
        message = f"an isolated launch draws its domain and cannot have {launch.domain!r}"
        raise UsageError(message)
    if launch.faults is not None:
        read_plan(launch.faults)


def execute(launch: Launch, command: Sequence[str], *, base: Mapping[str, str] | None = None) -> NoReturn:
    """Become `command` on this substrate, so that signals and the exit code are its own.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) and whatever else the kernel says.
    SetupMissing, UsageError
        As :func:`environment`.
    """
    if not command:
        message = "no command was given"
        raise UsageError(message, what_to_do="write it after --, e.g. gdrkit run --software -- python my_program.py")
    child = environment(launch, base=base)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), child)  # noqa: S606 - no shell: that is the point.
    except OSError as error:
        number = error.errno or errno.EIO
        raise ApiError(
            api=Api.KERNEL,
            operation="execvp",
            status=number,
            status_name=errno_name(number),
            errno=number,
            arguments={"command": command[0]},
            reason=Reason.NO_PERMISSION if number == errno.EACCES else Reason.BAD_ARGUMENT,
            what_to_do="check the name of the command" if number == errno.ENOENT else "make it executable",
        ) from error


def present_hardware(tree: HostTree) -> dict[Api, str]:
    """What hardware this host has for an API that has a twin: a few words each, from sysfs, procfs and /dev alone."""
    found: dict[Api, str] = {}
    nics = [device.name for device in rdma_devices(tree)]
    if nics:
        found[Api.VERBS] = "RDMA devices " + ", ".join(nics)
    gpus = nvidia_gpus(tree)
    if gpus:
        found[Api.CUDA] = "NVIDIA GPUs " + ", ".join(gpu.address for gpu in gpus)
    elif tree.exists("/dev/nvidiactl") or tree.exists("/proc/driver/nvidia/version"):
        # A container may hide PCI and still have the device nodes.
        found[Api.CUDA] = "an NVIDIA driver"
    if Api.CUDA in found:
        # libcufile is a library of the driver's makers, for its devices; there is no hardware of its own.
        found[Api.CUFILE] = found[Api.CUDA]
    accelerators = habana_accelerators(tree)
    if accelerators:
        found[Api.HLTHUNK] = "accelerators " + ", ".join(device.address for device in accelerators)
    return found


def overridden_hardware(launch: Launch, tree: HostTree) -> str | None:
    """One line that says which present hardware the twins stand before; None when there is none."""
    parts = [
        f"{api.value} runs on its software twin and leaves {what} alone"
        for api, what in sorted(present_hardware(tree).items(), key=lambda pair: pair[0].value)
        if api in launch.software
    ]
    return "; ".join(parts) or None


def control() -> Control:
    """The module by which suites look inside the twins of this process.

    Raises
    ------
    SetupMissing
        The twins are not installed.
    """
    try:
        module = importlib.import_module(f"{_PACKAGE}.control")
    except ModuleNotFoundError as error:
        detail = f"no module {error.name}"
        raise _missing(_PACKAGE, detail) from error
    return cast("Control", module)


def _folder(api: Api) -> Path | None:
    folder, file = _TWINS[api]
    for root in _roots():
        if (root / folder / file).is_file():
            return root / folder
    return None


def _roots() -> list[Path]:
    chosen = os.environ.get(_FOLDER_VARIABLE)
    if chosen:
        return [Path(chosen).resolve()]
    spec = importlib.util.find_spec(_PACKAGE)
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / "lib" for location in locations or ()]


def _require(api: Api) -> Path:
    folder = _folder(api)
    if folder is None:
        raise _missing(_TWINS[api][1], f"searched {', '.join(map(str, _roots())) or 'no folder'}")
    return folder


def _missing(library: str, detail: str) -> SetupMissing:
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
    twins = {str(folder) for api in TWINNED if (folder := _folder(api)) is not None}
    return [folder for folder in path.split(os.pathsep) if folder and folder not in twins]
