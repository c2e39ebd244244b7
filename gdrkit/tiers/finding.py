"""Findings of ``gdrkit tiers check``: differences between the catalogue and the disks, and interrupted migrations."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["FindingKind", "TierFinding"]


class FindingKind(enum.Enum):
    """The type of a finding."""

    DAMAGED = "damaged"
    """The catalogue is not a valid database."""
    ABSENT = "absent"
    """The tier is not available: its folder cannot be opened, or is not the folder that the catalogue knows."""
    INTERRUPTED = "interrupted"
    """A process died while it migrated the file."""
    MISSING = "missing"
    """The catalogue has the file, and no tier has it."""
    ELSEWHERE = "elsewhere"
    """The file is in another tier than the catalogue states."""
    UNKNOWN = "unknown"
    """The file is in a tier, and the catalogue does not have it."""
    CHANGED = "changed"
    """The size of the file, or the number of its hard links, differs from the catalogue."""
    TWICE = "twice"
    """Several tiers have a file of this name. gdrkit uses the file in the tier that the catalogue states."""
    FOREIGN = "foreign"
    """The name belongs to a symbolic link, a device or another special file. gdrkit does not touch it."""
    KEPT = "kept"
    """A recovery moved this file to the ``kept`` folder, because it may be the only copy of its data."""


@dataclass(frozen=True, slots=True)
class TierFinding:
    """One finding.

    Attributes
    ----------
    kind : FindingKind
        Type of the finding.
    name, tier : str
        Name of the file and of its tier. A finding about a tier has the name of the tier in both, and a finding about
        the catalogue has the path of the catalogue and an empty string.
    text : str
        Details in words, for the administrator.
    mended : bool
        Whether the command has repaired the difference.
    """

    kind: FindingKind
    name: str
    tier: str
    text: str
    mended: bool = False

    @property
    def needs_action(self) -> bool:
        """Whether an administrator has to act."""
        return not self.mended and self.kind is not FindingKind.FOREIGN
