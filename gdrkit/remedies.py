"""Install commands for missing packages, with the package names that this machine's Linux distribution uses.

The nox sessions also use the table of names, before any package is installed. So this module needs only the standard
library.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["DNF_NAMES", "OS_RELEASE", "package_manager", "package_names", "pip_install", "system_install"]

OS_RELEASE = Path("/etc/os-release")
# This table has the names on RHEL and Rocky Linux, for each Debian package whose name differs there. The packages
# chromium and busybox are in the repository EPEL, and the headers of libnl and Open MPI are in CRB or AppStream.
DNF_NAMES = {
    "busybox-static": "busybox",
    "fuse3": "fuse3 fuse3-libs",
    "g++": "gcc-c++",
    "ibverbs-utils": "libibverbs-utils",
    "iproute2": "iproute",
    "libfabric-bin": "libfabric",
    "libibverbs-dev": "rdma-core-devel",
    "libnl-3-dev": "libnl3-devel",
    "libnl-route-3-dev": "libnl3-devel",
    "librdmacm1": "librdmacm",
    "openmpi-bin": "openmpi",
    "pkgconf": "pkgconf-pkg-config",
    # The package python3 of RHEL 9 is Python 3.9, and gdrkit needs 3.11.
    "python3": "python3.12",
    "qemu-system-x86": "qemu-kvm",
    "rdmacm-utils": "librdmacm-utils",
    "ucx-utils": "ucx",
}
_DNF_DISTRIBUTIONS = frozenset({"almalinux", "centos", "fedora", "ol", "rhel", "rocky"})
_PYTHON_HEADERS = re.compile(r"(python3(?:\.\d+)?)-dev")
_OS_ID_FIELD = re.compile(r"""^(ID|ID_LIKE)=["']?([^"'\n]*)""", re.MULTILINE)
# A requirement of an extra in the metadata of a package, such as `mpi4py>=4; extra == "mpi"`.
_EXTRA_REQUIREMENT = re.compile(r"""^(.*?)\s*;.*\bextra\s*==\s*["']([\w-]+)["']""")


def package_manager(os_release: Path = OS_RELEASE) -> str:
    """Return ``dnf`` on RHEL, Rocky Linux and other distributions of that family, and ``apt-get`` elsewhere."""
    try:
        os_release_text = os_release.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "apt-get"
    distribution_ids = {name for _, value in _OS_ID_FIELD.findall(os_release_text) for name in value.split()}
    return "dnf" if distribution_ids & _DNF_DISTRIBUTIONS else "apt-get"


def package_names(*debian_names: str, manager: str) -> tuple[str, ...]:
    """Return the names of these Debian packages in the repositories of `manager`, each once."""
    if manager != "dnf":
        return tuple(dict.fromkeys(debian_names))
    package_lists = (DNF_NAMES.get(name, _PYTHON_HEADERS.sub(r"\1-devel", name)) for name in debian_names)
    return tuple(dict.fromkeys(name for package_list in package_lists for name in package_list.split()))


def system_install(*debian_names: str, os_release: Path = OS_RELEASE) -> str:
    """Return the command that installs these Debian packages, by the names that this machine's distribution uses."""
    manager = package_manager(os_release)
    return f"{manager} install {' '.join(package_names(*debian_names, manager=manager))}"


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra of gdrkit, e.g. ``mpi``.

    gdrkit itself is on no package index, so the command names the packages that the extra requires.
    """
    from importlib import metadata  # This import takes longer than the import of this module.

    try:
        requirements = metadata.requires("gdrkit") or ()
    except metadata.PackageNotFoundError:
        requirements = ()
    matches = [match for text in requirements if (match := _EXTRA_REQUIREMENT.match(text)) and match[2] == extra]
    packages = " ".join(f"'{match[1]}'" for match in matches)
    return f"pip install {packages}" if packages else f"pip install the packages of the extra {extra} of gdrkit"
