"""Installation of the Debian packages that the nox sessions need, by apt.

New packages are installed, and installed packages may be updated within the same Debian or Ubuntu release. No package
is removed, and no package of another vendor is replaced. If a vendor's RDMA stack is installed, apt is not called: nox
prints the missing packages and exits with code 3, or continues without packages that only some cases need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from automation.commands import call, output_of, say, stop
from automation.machine import path_with_sbin

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LAB_PROGRAMS",
    "find_vendor_stack",
    "install",
    "install_filesystem_tools",
    "install_fuse",
    "install_mpi",
    "install_perftest",
    "install_strace",
    "is_release_update",
    "is_replacement",
    "missing_build_packages",
    "missing_pyverbs_packages",
]

# The programs that create the file systems that the cases mount, and the package of each.
MKFS_PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
# The programs that the lab runs, and the package that has each.
LAB_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "ip": "iproute2",
}
RDMA_OR_GPU_PACKAGE = re.compile(r"ibverbs|rdma|ibumad|mlx|mlnx|ofed|doca|nvidia|cuda|cufile")


def missing_build_packages(python: str) -> list[str]:
    """Return the packages that the native build for this Python needs and that are missing on this machine."""
    missing = [] if shutil.which("c++") else ["g++"]
    if not Path("/usr/include/infiniband/verbs.h").exists():
        missing.append("libibverbs-dev")
    headers = Path(output_of([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]), "Python.h")
    return missing if headers.exists() else [*missing, "python3-dev"]


def missing_pyverbs_packages() -> list[str]:
    """Return the missing packages that a build of pyverbs needs in addition to those of the native build."""
    missing = [] if shutil.which("pkg-config") else ["pkgconf"]
    return missing + [name for name in ("libnl-3-dev", "libnl-route-3-dev") if not _is_installed(name)]


def install(packages: Sequence[str]) -> None:
    """Install packages by apt. If apt must not be called, print what to install and exit from nox with code 3."""
    if not packages:
        return
    apt_command = ["apt-get", "install", "-y", "--no-remove", "--no-install-recommends", *packages]
    say("missing on this system: " + " ".join(packages))
    vendor = find_vendor_stack()
    if vendor:
        say(f"This machine has a vendor's RDMA stack ({vendor}). apt might replace parts of it, so apt is not called.")
        stop("Install the missing packages from the vendor's repository, then try again: " + " ".join(packages))
    if not shutil.which("apt-get"):
        stop("apt-get is not installed. Install these Debian packages, then try again: " + " ".join(packages))
    if os.geteuid() != 0:
        stop("Run this line, then try again:  sudo " + " ".join(apt_command))
    changes = _simulate(apt_command)
    if changes is None:
        say("apt does not know these packages yet: apt-get update")
        call(["apt-get", "update", "-q"], shown_words=3)
        changes = _simulate(apt_command)
    if changes is None:
        stop("apt cannot install these packages; this line shows why:  " + " ".join(apt_command))
    replacements = [change for change in changes if is_replacement(change)]
    forbidden_replacements = [change for change in replacements if not is_release_update(change)]
    if forbidden_replacements:
        stop(
            "apt would replace these installed packages, so nothing was installed. Replace them yourself if you agree: "
            + "; ".join(forbidden_replacements)
        )
    if replacements:
        say("apt updates, within this release: " + " ".join(change.split()[1] for change in replacements))
    say("apt installs: " + " ".join(change.split()[1] for change in changes))
    if call([*apt_command, "-qq", "-o", "Dpkg::Use-Pty=0"], environ={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        stop("apt-get failed; its output is above.")


def install_fuse() -> None:
    """Install libfuse3 if this user can mount FUSE file systems. Only the cases of the FUSE mount need it."""
    can_mount = os.geteuid() == 0 and Path("/dev/fuse").exists()
    if can_mount and "libfuse3.so" not in output_of(["/sbin/ldconfig", "-p"]):
        _install_optional(["fuse3"], consequence="the cases of the FUSE mount will not run")


def install_mpi() -> None:
    """Install Open MPI. Only the cases with several ranks need it."""
    if os.geteuid() == 0 and not shutil.which("mpirun"):
        _install_optional(["openmpi-bin", "iproute2"], consequence="the cases of several ranks will not run")


def install_perftest() -> None:
    """Install perftest. Only the comparison of gdrkit's initiator with perftest needs it."""
    if os.geteuid() == 0 and not shutil.which("ib_write_bw"):
        _install_optional(["perftest"], consequence="the initiator will not be compared with perftest")


def install_filesystem_tools() -> None:
    """Install mkfs.ext4 and mkfs.xfs if this user can mount loop devices. Only some cases of the tiers need them."""
    can_mount = os.geteuid() == 0 and Path("/dev/loop-control").exists()
    path = path_with_sbin()
    missing = [package for program, package in MKFS_PROGRAMS.items() if not shutil.which(program, path=path)]
    if can_mount and missing:
        _install_optional(missing, consequence="the cases that mount file systems of their own will not run")


def install_strace() -> None:
    """Install strace. Only the cases that make single system calls fail need it."""
    if os.geteuid() == 0 and not shutil.which("strace"):
        _install_optional(["strace"], consequence="the cases of failing system calls will not run")


def find_vendor_stack() -> str | None:
    """Return a text about a vendor's RDMA libraries, or None if they are the distribution's or are missing."""
    if shutil.which("ofed_info"):
        return "ofed_info is installed"
    for row in output_of(["/sbin/ldconfig", "-p"]).splitlines():
        name, _, path = row.strip().partition(" ")
        if name != "libibverbs.so.1":
            continue
        path = os.path.realpath(path.rpartition("=> ")[2])
        package = output_of(["dpkg-query", "-S", path]).partition(":")[0]
        if not package:
            return f"{path} belongs to no package"
        version_and_maintainer = output_of(["dpkg-query", "-W", "-f", "${Version} ${Maintainer}", package])
        if "mlnx" in version_and_maintainer or not (
            "debian" in version_and_maintainer.lower() or "ubuntu" in version_and_maintainer.lower()
        ):
            return f"{package} {version_and_maintainer}"
    return None


def is_replacement(change: str) -> bool:
    """Return whether a line of ``apt-get -s`` replaces a package: ``Inst name [old version] (new version ...)``."""
    return "[" in change.partition("(")[0]


def is_release_update(change: str) -> bool:
    """Return whether a replacement is an update from the distribution, and the package is not one of RDMA or CUDA."""
    name, new_version = change.split()[1], change.partition("(")[2]
    return (
        RDMA_OR_GPU_PACKAGE.search(name) is None
        and re.search(r" (Debian|Debian-Security|Ubuntu):", new_version) is not None
    )


def _install_optional(packages: Sequence[str], *, consequence: str) -> None:
    """Install packages that only some cases need. If the installation fails, print the consequence and return.

    Without apt-get, and beside a vendor's RDMA stack, do nothing.
    """
    if not shutil.which("apt-get") or find_vendor_stack():
        return
    try:
        install(packages)
    except SystemExit:
        say(f"Continuing without {' '.join(packages)}: {consequence}.")


def _simulate(apt_command: Sequence[str]) -> list[str] | None:
    """Return the ``Inst`` lines that apt prints for this command in a dry run, or None if the dry run fails."""
    result = subprocess.run([*apt_command, "-s"], capture_output=True, text=True, check=False)
    return [row for row in result.stdout.splitlines() if row.startswith("Inst ")] if result.returncode == 0 else None


def _is_installed(package: str) -> bool:
    return output_of(["dpkg-query", "-W", "-f", "${Status}", package]).endswith(" installed")
