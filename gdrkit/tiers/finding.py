"""Differences between the catalogue and the disks."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Kind"]


class Kind(enum.Enum):
    """The kinds of findings."""

    DAMAGED = "damaged"
    """The catalogue is no whole database."""
    ABSENT = "absent"
    """The folder of a tier is another one than it was: its file system is not mounted."""
    INTERRUPTED = "interrupted"
    """A process died while it migrated the file."""
    MISSING = "missing"
    """The catalogue has it, no tier does."""
    ELSEWHERE = "elsewhere"
    """It lies in another tier than the catalogue says."""
    UNKNOWN = "unknown"
    """It lies in a tier, and the catalogue does not have it."""
    CHANGED = "changed"
    """Its size, or the number of its names, is another one."""
    TWICE = "twice"
    """Two tiers have a file of that name; the one that the catalogue names is the file."""
    FOREIGN = "foreign"
    """A symbolic link, a device: it is left alone."""
    KEPT = "kept"
    """A recovery did not want to choose, and put it aside."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference. `mended` is True if it was repaired."""

    kind: Kind
    name: str
    tier: str
    text: str
    mended: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether an administrator has to act."""
        return not self.mended and self.kind is not Kind.FOREIGN
