"""Needs about cuFile.

Level 7. Whether libcufile opens is asked of a child process once a run, as the product asks it: it was seen not to come
back.
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

# Where cases put files that must be on a disk: what is in /tmp often is in memory.
DISK = Path("/var/tmp")  # noqa: S108 - each makes a folder of its own there.

_UDEV = Path("/run/udev/data")
# Lines by which an entry of the suites is told from one of udev.
OURS = "E:GDRKIT_SUITES=1"
_VECTORS_SINCE = (1, 19)
_STAGED_SIZES_SINCE = (1, 18)


@functools.cache
def _version() -> tuple[int, int] | str:
    """Of libcufile, once its driver opened in a child; else why not."""
    try:
        found = cufile.probe()
    except GdrkitError as error:
        return str(error)
    return found.version // 1000, found.version % 1000 // 10


@dataclass(frozen=True, slots=True)
class _Driver:
    name = "cufile.driver"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - asked of a process, which opens it.
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
    """Udev's own entry of the block device under a path; None where there is none, or one of the suites."""
    device = path.stat().st_dev
    entry = _UDEV / f"b{os.major(device)}:{os.minor(device)}"
    try:
        return None if OURS in entry.read_text(encoding="utf-8").splitlines() else entry
    except OSError:
        return None


driver: Need = _Driver()
vectors: Need = _Vectors()
staged_sizes: Need = _StagedSizes()
# libcufile asks udev's database what a file lies on; cases write an entry for a moment where there is none.
udev_present: Need = _UdevPresent()
udev_absent: Need = _UdevAbsent()
