"""Detection of hardware in sysfs and procfs, and selection of the Python interpreter, for the nox sessions."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from automation.commands import exit_with_setup_error
from gdrkit.remedies import package_manager, system_install

__all__ = [
    "SYSTEM_PYTHON",
    "find_hardware",
    "find_interpreter",
    "has_pyverbs",
    "make_path_with_sbin",
    "may_load_rxe",
    "python_version",
]

SYSTEM_PYTHON = "/usr/bin/python3"
PYTHON_VERSION_MIN = (3, 11)


def find_hardware() -> dict[str, list[str]]:
    """Return the names of the drivers and devices that sysfs and procfs show, by API: verbs, cuda and hlthunk (Gaudi).

    All lists are empty on a machine without RDMA devices, GPUs and Gaudi accelerators.
    """
    nics = [f"RDMA device {path.name}" for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    gpus = ["the NVIDIA driver"] if Path("/proc/driver/nvidia/version").exists() else []
    accelerators: list[str] = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        # The device may be unplugged after the listing; its files then no longer exist.
        with contextlib.suppress(OSError):
            vendor, pci_class = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
            # The vendor 0x10de is NVIDIA, and 0x1da3 is Habana. The class 0x03 is "display controller".
            if vendor == "0x10de" and pci_class.startswith("0x03"):
                gpus.append(f"NVIDIA GPU {device.name}")
            elif vendor == "0x1da3":
                accelerators.append(f"Habana accelerator {device.name}")
    return {"verbs": nics, "cuda": gpus, "hlthunk": accelerators}


def may_load_rxe() -> bool:
    """Return whether rdma_rxe could be loaded: this user is root, and the module and its tools are installed."""
    has_tools = all(map(shutil.which, ("modprobe", "ip", "rdma")))
    return os.geteuid() == 0 and has_tools and subprocess.call(["modprobe", "-nq", "rdma_rxe"]) == 0


def make_path_with_sbin() -> str:
    """Return PATH with /usr/sbin and /sbin appended, because Debian omits them from the PATH of ordinary users."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


@functools.cache
def find_interpreter() -> tuple[str, bool]:
    """Return the path of the Python that runs the suites, and whether pip must build pyverbs for it.

    The distributions have a package of pyverbs for the system's Python. So the system's Python is used if it is new
    enough. Otherwise another Python that is new enough is used, and pip builds pyverbs from PyPI for it.
    """
    if python_version(SYSTEM_PYTHON) >= PYTHON_VERSION_MIN and (has_pyverbs() or _has_package_manager()):
        return SYSTEM_PYTHON, False
    other_pythons = filter(None, map(shutil.which, ("python3.13", "python3.12", "python3.11")))
    # realpath returns the Python from which a virtual environment was created. So nox selects the same interpreter
    # inside and outside of an environment.
    base_python = os.path.realpath(sys.executable)
    candidate = next(
        (python for python in (base_python, *other_pythons) if python_version(python) >= PYTHON_VERSION_MIN), None
    )
    if candidate is None:
        exit_with_setup_error(
            f"gdrkit needs Python 3.11 or newer, and this machine has none: {system_install('python3')}"
        )
    return candidate, True


def python_version(python: str) -> tuple[int, ...]:
    """Return the version of a Python interpreter, such as (3, 11), or (0,) for a program that is not Python."""
    program = "import sys; print(*sys.version_info[:2])"
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        return tuple(map(int, subprocess.check_output([python, "-c", program], text=True).split())) or (0,)
    return (0,)


def has_pyverbs() -> bool:
    """Return whether the system's Python has pyverbs. pyverbs is not imported, because that would load libibverbs."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('pyverbs') is None)"
    return subprocess.call([SYSTEM_PYTHON, "-I", "-c", program], stderr=subprocess.DEVNULL) == 0


def _has_package_manager() -> bool:
    """Return whether the package manager of the distribution is installed, which can install pyverbs."""
    return shutil.which(package_manager()) is not None
