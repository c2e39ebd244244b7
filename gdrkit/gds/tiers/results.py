"""What the manager of tiers answers.

Level 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.errors import Reason
    from gdrkit.gds.tiers.routes import TierRoute

__all__ = ["Migrated", "Refused", "TierStatus"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier now.

    Attributes
    ----------
    limit_bytes : int
        What may lie in it: the capacity that was said, or what the file system has, less the headroom.
    free_bytes : int
        What its file system has left.
    absent : str
        Why it cannot be used; empty when it can.
    route : TierRoute
        Which way its bytes go to device memory, as it was seen last.
    """

    name: str
    directory: str
    accesses_min: int
    files: int
    size_bytes: int
    allocated_bytes: int
    coming_bytes: int
    limit_bytes: int
    free_bytes: int
    absent: str
    route: TierRoute


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that could not be migrated now, and is where it was."""

    name: str
    destination: str
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """What a run of the policy did.

    Attributes
    ----------
    moved, moved_bytes : int
        Files that are in another tier now.
    refused : tuple of Refused
        Those that had to stay: somebody writes them, there is no room ...
    considered : int
        How many files there were.
    """

    moved: int
    moved_bytes: int
    refused: tuple[Refused, ...]
    considered: int
