"""Installation of the distribution's packages that the nox sessions need, by apt or dnf.

New packages are installed, and installed packages may be updated within the same release. No package is removed, and no
package of another vendor is replaced. If a vendor's RDMA stack is installed, the package manager is not called: nox
prints the missing packages and exits with code 3, or continues without packages that only some cases need. Packages
have their Debian names here; `gdrkit.remedies` has their names for dnf.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from automation.commands import call, exit_with_setup_error, get_output, print_line
from automation.machine import SYSTEM_PYTHON, make_path_with_sbin, python_version
from gdrkit.remedies import OS_RELEASE, package_manager, package_names

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "LAB_PROGRAMS",
    "Change",
    "find_missing_build_packages",
    "find_missing_pyverbs_packages",
    "find_vendor_stack",
    "install_filesystem_tools",
    "install_fuse",
    "install_mpi",
    "install_packages",
    "install_perftest",
    "install_strace",
    "list_apt_changes",
    "list_dnf_changes",
]

# The programs that create the file systems that the cases mount, and the package of each.
MKFS_PROGRAMS = {"mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs"}
# The programs that hardware/lab runs, and the package of each.
LAB_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "ip": "iproute2",
}
RDMA_OR_GPU_PACKAGE = re.compile(r"ibverbs|rdma|ibumad|mlx|mlnx|ofed|doca|nvidia|cuda|cufile")
# The vendors of the distributions, as dpkg and rpm state them for a package.
DISTRIBUTORS = re.compile(r"debian|ubuntu|red ?hat|rocky|alma|centos|fedora|oracle america", re.IGNORECASE)
# The repositories of the distributions, as dnf names them.
DNF_RELEASE_REPOSITORY = re.compile(r"baseos|appstream|crb|extras|epel|rhel-|ol\d+_|fedora|updates")
# After its first start, a machine often runs apt-get in the background. So the installation by apt-get waits up to
# 600 s for the lock of the package database. dnf waits by default.
_LOCK_WAIT_OPTIONS = ("-o", "DPkg::Lock::Timeout=600")
_DNF_COLUMNS = 6  # Name, architecture, version, repository, and a size of two words.


@dataclass(frozen=True)
class Change:
    """One change of an installed system, as the package manager announces it in a dry run.

    Attributes
    ----------
    package : str
        Name of the package.
    replaces : bool
        Whether the change replaces or removes an installed version of the package.
    is_allowed : bool
        Whether the change adds a package, or updates one within the release. An update of a package of RDMA or GPUs is
        never allowed.
    text : str
        The change in the words of the package manager.
    """

    package: str
    replaces: bool
    is_allowed: bool
    text: str


def find_missing_build_packages(python: str) -> list[str]:
    """Return the packages that the native build for this Python needs and that are missing on this machine."""
    missing_packages = [] if shutil.which("c++") else ["g++"]
    if not Path("/usr/include/infiniband/verbs.h").exists():
        missing_packages.append("libibverbs-dev")
    python_header = Path(
        get_output([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]), "Python.h"
    )
    if python_header.exists():
        return missing_packages
    # python3-dev has headers only for the system's Python.
    is_system_python = python_version(python) == python_version(SYSTEM_PYTHON)
    version = "3" if is_system_python else ".".join(map(str, python_version(python)))
    return [*missing_packages, f"python{version}-dev"]


def find_missing_pyverbs_packages() -> list[str]:
    """Return the missing packages that a build of pyverbs needs in addition to the packages of the native build."""
    missing_packages = [] if shutil.which("pkg-config") else ["pkgconf"]
    header_by_package = {"libnl-3-dev": "netlink/netlink.h", "libnl-route-3-dev": "netlink/route/link.h"}
    return missing_packages + [
        name for name, file in header_by_package.items() if not Path("/usr/include/libnl3", file).exists()
    ]


def install_packages(packages: Sequence[str], *, os_release: Path = OS_RELEASE) -> None:
    """Install packages by the package manager of the distribution that the file `os_release` names.

    `packages` are names of Debian packages. If the package manager must not be called, print what to install and exit
    from nox with code 3. Also exit with code 3 if the package manager fails, or announces a change that is not allowed.
    """
    if not packages:
        return
    manager = package_manager(os_release)
    names = package_names(*packages, manager=manager)
    print_line("missing on this system: " + " ".join(names))
    vendor_stack = find_vendor_stack()
    if vendor_stack:
        print_line(
            f"This machine has a vendor's RDMA stack ({vendor_stack}). {manager} might replace parts of it and is not "
            "called."
        )
        exit_with_setup_error(
            "Install the missing packages from the vendor's repository, then try again: " + " ".join(names)
        )
    if not shutil.which(manager):
        exit_with_setup_error(f"{manager} is not installed. Install these packages, then try again: " + " ".join(names))
    command = _make_install_command(manager, names)
    if os.geteuid() != 0:
        exit_with_setup_error("Run this line, then try again:  sudo " + " ".join(command))
    changes = _simulate_installation(manager, command)
    if changes is None:
        refresh_command = [manager, "update", "-q"] if manager == "apt-get" else [manager, "makecache", "-q"]
        print_line(f"{manager} does not know these packages yet; running: {' '.join(refresh_command)}")
        call(refresh_command, printed_words_max=3)
        changes = _simulate_installation(manager, command)
    if changes is None:
        exit_with_setup_error(
            f"{manager} cannot install these packages. To see why, run this line:  " + " ".join(command)
        )
    _check_changes(manager, changes)
    quiet_options = ["-qq", "-o", "Dpkg::Use-Pty=0", *_LOCK_WAIT_OPTIONS] if manager == "apt-get" else ["-q"]
    if call([*command, *quiet_options], environ={"DEBIAN_FRONTEND": "noninteractive"}) != 0:
        exit_with_setup_error(f"{manager} failed; its output is above.")


def install_fuse() -> None:
    """Install libfuse3 if this user can mount FUSE file systems. Only the cases of the FUSE mount need it."""
    can_mount = os.geteuid() == 0 and Path("/dev/fuse").exists()
    if can_mount and "libfuse3.so" not in get_output(["/sbin/ldconfig", "-p"]):
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
    """Install mkfs.ext4 and mkfs.xfs if this user can mount loop devices. Some cases of storage tiers need them."""
    can_mount = os.geteuid() == 0 and Path("/dev/loop-control").exists()
    path = make_path_with_sbin()
    missing_packages = [package for program, package in MKFS_PROGRAMS.items() if not shutil.which(program, path=path)]
    if can_mount and missing_packages:
        _install_optional(missing_packages, consequence="the cases that mount file systems of their own will not run")


def install_strace() -> None:
    """Install strace. Only the cases that inject errors into system calls need it."""
    if os.geteuid() == 0 and not shutil.which("strace"):
        _install_optional(["strace"], consequence="the cases of failing system calls will not run")


def find_vendor_stack() -> str | None:
    """Return a description of a vendor's RDMA libraries, or None if no vendor has replaced the distribution's."""
    if shutil.which("ofed_info"):
        return "ofed_info is installed"
    for row in get_output(["/sbin/ldconfig", "-p"]).splitlines():
        name, _, description = row.strip().partition(" ")
        if name != "libibverbs.so.1":
            continue
        path = os.path.realpath(description.rpartition("=> ")[2])
        owner = _find_owner(path)
        if not owner:
            return f"{path} belongs to no package"
        if "mlnx" in owner or not DISTRIBUTORS.search(owner):
            return owner
    return None


def list_apt_changes(output: str) -> list[Change]:
    """Return the changes that ``apt-get install -s`` announces: ``Inst name [old version] (new version ...)``."""
    changes = []
    for row in output.splitlines():
        if row.startswith("Inst "):
            name, (row_before_version, _, new_version) = row.split()[1], row.partition("(")
            replaces = "[" in row_before_version
            is_from_distribution = re.search(r" (Debian|Debian-Security|Ubuntu):", new_version) is not None
            is_update = is_from_distribution and not RDMA_OR_GPU_PACKAGE.search(name)
            changes.append(Change(name, replaces, not replaces or is_update, row.removeprefix("Inst ")))
    return changes


def list_dnf_changes(output: str) -> list[Change]:
    """Return the changes that ``dnf install --assumeno`` announces, in the table of its transaction."""
    changes: list[Change] = []
    section, words = "", list[str]()
    for row in output.splitlines():
        if row.startswith("Transaction Summary"):
            break
        if not row.startswith(" "):
            section, words = row.rstrip(":").lower(), []
            continue
        if row.split()[:1] == ["replacing"]:
            changes.append(Change(row.split()[1], replaces=True, is_allowed=False, text=row.strip()))
            continue
        # dnf wraps a row after a long name, so a change ends after its last column, not with its line.
        words += row.split()
        if len(words) >= _DNF_COLUMNS and words[0] != "Package":
            name, replaces = words[0], not section.startswith("installing")
            is_update = section.startswith("upgrading") and not RDMA_OR_GPU_PACKAGE.search(name)
            is_allowed = not replaces or (is_update and DNF_RELEASE_REPOSITORY.search(words[3]) is not None)
            changes.append(Change(name, replaces, is_allowed, f"{section}: {' '.join(words[:4])}"))
            words = []
    return changes


def _check_changes(manager: str, changes: Sequence[Change]) -> None:
    """Print the changes. Exit from nox with code 3 if one of them is not allowed."""
    forbidden_changes = [change.text for change in changes if not change.is_allowed]
    if forbidden_changes:
        exit_with_setup_error(
            f"{manager} would replace these installed packages, so nothing was installed. Replace them yourself if you "
            "agree: " + "; ".join(forbidden_changes)
        )
    updates = [change.package for change in changes if change.replaces]
    if updates:
        print_line(f"{manager} updates, within this release: " + " ".join(updates))
    print_line(f"{manager} installs: " + " ".join(change.package for change in changes))


def _make_install_command(manager: str, names: Sequence[str]) -> list[str]:
    if manager == "dnf":
        return ["dnf", "install", "-y", "--setopt=install_weak_deps=False", *names]
    return ["apt-get", "install", "-y", "--no-remove", "--no-install-recommends", *names]


def _simulate_installation(manager: str, command: Sequence[str]) -> list[Change] | None:
    """Return the changes that the package manager announces in a dry run, or None if the dry run fails."""
    if manager == "apt-get":
        result = subprocess.run([*command, "-s"], capture_output=True, text=True, check=False)
        return list_apt_changes(result.stdout) if result.returncode == 0 else None
    arguments = [word for word in command if word != "-y"]
    result = subprocess.run([*arguments, "--assumeno"], capture_output=True, text=True, check=False)
    # dnf ends with 1 if it would change anything, because --assumeno refuses that.
    is_resolved = result.returncode == 0 or "Transaction Summary" in result.stdout
    return list_dnf_changes(result.stdout) if is_resolved else None


def _install_optional(packages: Sequence[str], *, consequence: str) -> None:
    """Install packages that only some cases need. If the installation fails, print the consequence and return.

    This function does nothing if the package manager is missing or a vendor's RDMA stack is installed.
    """
    if not shutil.which(package_manager()) or find_vendor_stack():
        return
    try:
        install_packages(packages)
    except SystemExit:
        print_line(f"Continuing without {' '.join(packages)}: {consequence}.")


def _find_owner(path: str) -> str:
    """Return name, version and vendor of the package that owns a file, or an empty text."""
    if shutil.which("dpkg-query"):
        package = get_output(["dpkg-query", "-S", path]).partition(":")[0]
        return package and f"{package} {get_output(['dpkg-query', '-W', '-f', '${Version} ${Maintainer}', package])}"
    owner = get_output(["rpm", "-qf", "--qf", "%{NAME} %{VERSION}-%{RELEASE} %{VENDOR}", path])
    return "" if "not owned" in owner else owner
