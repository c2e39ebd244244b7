"""Installation of Debian packages by apt.

apt may add packages and may update them within the same Debian or Ubuntu release. It never removes a package, never
replaces a package of another vendor. If a vendor's RDMA stack is installed, apt is not called: the missing packages are
printed instead.
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

# The program that makes each file system that the cases mount, and the package that has it.
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
    """Return the packages that the native build for this Python needs and that are not installed."""
    missing = [] if shutil.which("c++") else ["g++"]
    if not Path("/usr/include/infiniband/verbs.h").exists():
        missing.append("libibverbs-dev")
    headers = Path(output_of([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]), "Python.h")
    return missing if headers.exists() else [*missing, "python3-dev"]


def missing_pyverbs_packages() -> list[str]:
    """Return the packages, beside those of the native build, that pyverbs needs and that are not installed."""
    missing = [] if shutil.which("pkg-config") else ["pkgconf"]
    return missing + [name for name in ("libnl-3-dev", "libnl-route-3-dev") if not _is_installed(name)]


def install(packages: Sequence[str]) -> None:
    """Install packages by apt. If apt must not be called, print what to install and exit from nox with code 3."""
    if not packages:
        return
    line = ["apt-get", "install", "-y", "--no-remove", "--no-install-recommends", *packages]
    say("missing on this system: " + " ".join(packages))
    vendor = find_vendor_stack()
    if vendor:
        say(f"This machine has a vendor's RDMA stack ({vendor}), and apt might replace parts of it.")
        stop("Install the missing packages from the vendor's repository, then try again: " + " ".join(packages))
    if not shutil.which("apt-get"):
        stop("apt-get is not installed. Install what Debian calls " + " ".join(packages) + ", then try again.")
    if os.geteuid() != 0:
        stop("Run this line, then try again:  sudo " + " ".join(line))
    changes = _simulate(line)
    if changes is None:
        say("apt does not know these packages yet: apt-get update")
        call(["apt-get", "update", "-q"], shown_words=3)
        changes = _simulate(line)
    if changes is None:
        stop("apt cannot install these packages; this line shows why:  " + " ".join(line))
    replaced = [change for change in changes if is_replacement(change)]
    foreign = [change for change in replaced if not is_release_update(change)]
    if foreign:
        stop("apt would replace installed packages, and that is your decision: " + "; ".join(foreign))
    if replaced:
        say("apt updates, within this release: " + " ".join(change.split()[1] for change in replaced))
    say("apt installs: " + " ".join(change.split()[1] for change in changes))
    if call([*line, "-qq", "-o", "Dpkg::Use-Pty=0"], environ={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        stop("apt-get failed; its output is above.")


def install_fuse() -> None:
    """Install libfuse3 if this user can mount by FUSE. Without it only the cases of the FUSE mount do not run."""
    mountable = os.geteuid() == 0 and Path("/dev/fuse").exists()
    if mountable and "libfuse3.so" not in output_of(["/sbin/ldconfig", "-p"]):
        _install_optional(["fuse3"], consequence="the cases of the FUSE mount will not run")


def install_mpi() -> None:
    """Install Open MPI. Without it only the cases of several ranks do not run."""
    if os.geteuid() == 0 and not shutil.which("mpirun"):
        _install_optional(["openmpi-bin", "iproute2"], consequence="the cases of several ranks will not run")


def install_perftest() -> None:
    """Install perftest. Without it only the comparison of the initiator with perftest does not run."""
    if os.geteuid() == 0 and not shutil.which("ib_write_bw"):
        _install_optional(["perftest"], consequence="the initiator will not run beside perftest")


def install_filesystem_tools() -> None:
    """Install mkfs.ext4 and mkfs.xfs if this user can mount loop devices. Without them some tier cases do not run."""
    mountable = os.geteuid() == 0 and Path("/dev/loop-control").exists()
    path = path_with_sbin()
    missing = [package for program, package in MKFS_PROGRAMS.items() if not shutil.which(program, path=path)]
    if mountable and missing:
        _install_optional(missing, consequence="the cases that mount file systems of their own will not run")


def install_strace() -> None:
    """Install strace. Without it only the cases that make single system calls fail do not run."""
    if os.geteuid() == 0 and not shutil.which("strace"):
        _install_optional(["strace"], consequence="the cases of failing system calls will not run")


def find_vendor_stack() -> str | None:
    """Return why the RDMA libraries are a vendor's, or None if they are the distribution's or absent."""
    if shutil.which("ofed_info"):
        return "ofed_info is installed"
    for row in output_of(["/sbin/ldconfig", "-p"]).splitlines():
        name, _, path = row.strip().partition(" ")
        if name != "libibverbs.so.1":
            continue
        path = os.path.realpath(path.rpartition("=> ")[2])
        owner = output_of(["dpkg-query", "-S", path]).partition(":")[0]
        if not owner:
            return f"{path} belongs to no package"
        about = output_of(["dpkg-query", "-W", "-f", "${Version} ${Maintainer}", owner])
        if "mlnx" in about or not ("debian" in about.lower() or "ubuntu" in about.lower()):
            return f"{owner} {about}"
    return None


def is_replacement(change: str) -> bool:
    """Return whether a line of ``apt-get -s`` replaces a package: ``Inst name [old version] (new version ...)``."""
    return "[" in change.partition("(")[0]


def is_release_update(change: str) -> bool:
    """Return whether a replacement is an update of the distribution's own, of a package outside RDMA and CUDA."""
    name, new = change.split()[1], change.partition("(")[2]
    return RDMA_OR_GPU_PACKAGE.search(name) is None and re.search(r" (Debian|Debian-Security|Ubuntu):", new) is not None


def _install_optional(packages: Sequence[str], *, consequence: str) -> None:
    """Install packages that only some cases need. If apt must not be called or fails, print the consequence."""
    if not shutil.which("apt-get") or find_vendor_stack():
        return
    try:
        install(packages)
    except SystemExit:
        say(f"Going on without {' '.join(packages)}: {consequence}.")


def _simulate(line: Sequence[str]) -> list[str] | None:
    """Return the ``Inst`` lines that apt prints for this command in a dry run, or None if the dry run fails."""
    result = subprocess.run([*line, "-s"], capture_output=True, text=True, check=False)
    return [row for row in result.stdout.splitlines() if row.startswith("Inst ")] if result.returncode == 0 else None


def _is_installed(package: str) -> bool:
    return output_of(["dpkg-query", "-W", "-f", "${Status}", package]).endswith(" installed")
