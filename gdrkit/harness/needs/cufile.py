"""Needs about cuFile.

A child process checks once per run whether libcufile opens, because libcufile can hang.
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

__all__ = ["DISK", "OURS", "driver", "entry_of", "staged_sizes", "udev_absent", "udev_present", "vectors"]

# The folder for files that must be on a disk. /tmp is often in memory.
DISK = Path("/var/tmp")  # noqa: S108 - each case makes its own folder there.

_UDEV = Path("/run/udev/data")
# A line that marks entries that the suites have written.
OURS = "E:GDRKIT_SUITES=1"
_VECTORS_SINCE = (1, 19)
_STAGED_SIZES_SINCE = (1, 18)


@functools.cache
def _version() -> tuple[int, int] | str:
    """Return the major and minor version of libcufile, or the error if its driver does not open in a child process."""
    try:
        result = cufile.probe()
    except GdrkitError as error:
        return str(error)
    return result.version // 1000, result.version % 1000 // 10


@dataclass(frozen=True, slots=True)
class _Driver:
    name = "cufile.driver"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - a child process checks it.
        version = _version()
        return f"cufile does not answer: {version}" if isinstance(version, str) else None


@dataclass(frozen=True, slots=True)
class _Vectors:
    name = "cufile.vectors"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        version = _version()
        if isinstance(version, str):
            return f"cufile does not answer: {version}"
        if version < _VECTORS_SINCE:
            return f"libcufile {version[0]}.{version[1]} has no cuFileReadv"
        return None


@dataclass(frozen=True, slots=True)
class _StagedSizes:
    name = "cufile.staged_sizes"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        version = _version()
        if isinstance(version, str):
            return f"cufile does not answer: {version}"
        if version < _STAGED_SIZES_SINCE:
            return f"libcufile {version[0]}.{version[1]} forgets sizes that were staged"
        return None


@dataclass(frozen=True, slots=True)
class _UdevPresent:
    name = "cufile.udev_present"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        if entry_of(DISK) or os.geteuid() == 0:
            return None
        return "udev's database is not here, and this user may not write it"


@dataclass(frozen=True, slots=True)
class _UdevAbsent:
    name = "cufile.udev_absent"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002
        return "udev's database is here" if entry_of(DISK) else None


def entry_of(path: Path) -> Path | None:
    """Return the entry of udev for the block device of a path, or None if there is none or the suites wrote it."""
    device = path.stat().st_dev
    entry = _UDEV / f"b{os.major(device)}:{os.minor(device)}"
    try:
        return None if OURS in entry.read_text(encoding="utf-8").splitlines() else entry
    except OSError:
        return None


driver: Need = _Driver()
vectors: Need = _Vectors()
staged_sizes: Need = _StagedSizes()
# libcufile reads the udev database to find the device of a file. Cases write a temporary entry if there is none.
udev_present: Need = _UdevPresent()
udev_absent: Need = _UdevAbsent()
