"""Needs about cuFile: the driver of libcufile, its version, and the udev database that it reads.

The driver is opened in a child process, once per run, because libcufile may hang.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import cufile
from gdrkit.errors import GdrkitError

if TYPE_CHECKING:
    from gdrkit.harness.needs.base import Need
    from gdrkit.inventory import Facts

__all__ = [
    "DISK_FOLDER",
    "SUITES_UDEV_LINE",
    "driver",
    "find_udev_entry",
    "staged_sizes",
    "udev_absent",
    "udev_present",
    "vectors",
]

# A folder on a disk, for files that must not be in memory. /tmp is often a file system in memory.
DISK_FOLDER = Path("/var/tmp")  # noqa: S108 - each case makes its own folder there.

_UDEV_DATA_FOLDER = Path("/run/udev/data")
# The line by which the suites mark the udev entries that they have written.
SUITES_UDEV_LINE = "E:GDRKIT_SUITES=1"
# The first versions of libcufile (major, minor) that meet the needs `vectors` and `staged_sizes`.
_VECTORS_VERSION_MIN = (1, 19)
_STAGED_SIZES_VERSION_MIN = (1, 18)


@functools.cache
def _query_version_or_error() -> tuple[int, int] | str:
    """Return the major and minor version of libcufile, or the error if its driver does not open in a child process."""
    try:
        probe_result = cufile.probe()
    except GdrkitError as error:
        return str(error)
    # The version number is 1000 * major + 10 * minor.
    return probe_result.version // 1000, probe_result.version % 1000 // 10


@dataclass(frozen=True, slots=True)
class _Driver:
    name = "cufile.driver"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - a child process checks it.
        version = _query_version_or_error()
        return f"cufile does not answer: {version}" if isinstance(version, str) else None


@dataclass(frozen=True, slots=True)
class _Vectors:
    name = "cufile.vectors"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        version = _query_version_or_error()
        if isinstance(version, str):
            return f"cufile does not answer: {version}"
        if version < _VECTORS_VERSION_MIN:
            return f"libcufile {version[0]}.{version[1]} has no cuFileReadv"
        return None


@dataclass(frozen=True, slots=True)
class _StagedSizes:
    name = "cufile.staged_sizes"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        version = _query_version_or_error()
        if isinstance(version, str):
            return f"cufile does not answer: {version}"
        if version < _STAGED_SIZES_VERSION_MIN:
            return f"libcufile {version[0]}.{version[1]} forgets sizes that were staged"
        return None


@dataclass(frozen=True, slots=True)
class _UdevPresent:
    name = "cufile.udev_present"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        if find_udev_entry(DISK_FOLDER) or os.geteuid() == 0:
            return None
        return "udev's database is not here, and this user may not write it"


@dataclass(frozen=True, slots=True)
class _UdevAbsent:
    name = "cufile.udev_absent"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        return "udev's database is here" if find_udev_entry(DISK_FOLDER) else None


def find_udev_entry(path: Path) -> Path | None:
    """Return the path of the entry (a file) in udev's database for the block device on which `path` is.

    The result is None if there is no such entry, or if the suites have written it.
    """
    device_number = path.stat().st_dev
    entry_path = _UDEV_DATA_FOLDER / f"b{os.major(device_number)}:{os.minor(device_number)}"
    try:
        return None if SUITES_UDEV_LINE in entry_path.read_text(encoding="utf-8").splitlines() else entry_path
    except OSError:
        return None


driver: Need = _Driver()
# This need is met if libcufile has calls for several memory ranges, such as cuFileReadv.
vectors: Need = _Vectors()
# A staged size is a size that was set while the driver was closed. libcufile 1.18 and later keep it when the driver
# opens. Older versions discard it; see gdrkit/cufile/parameters.py.
staged_sizes: Need = _StagedSizes()
# libcufile reads udev's database to find the device of a file. Cases with the need udev_present write a temporary entry
# for the device of DISK_FOLDER if there is none. Cases with the need udev_absent require that there is none.
udev_present: Need = _UdevPresent()
udev_absent: Need = _UdevAbsent()
