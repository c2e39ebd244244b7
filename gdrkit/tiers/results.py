"""Results of the tier manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.errors import Reason
    from gdrkit.tiers.routes import TierRoute

__all__ = ["Migrated", "RefusedMove", "TierStatus"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The current state of one tier.

    Attributes
    ----------
    accesses_min : int
        Heat that a file needs for this tier, in fresh accesses.
    files : int
        Number of files.
    size_bytes, allocated_bytes : int
        Sum of the file sizes and of the space that the files take, in bytes.
    coming_bytes : int
        Space that migrations in progress have reserved, in bytes.
    limit_bytes : int
        Space that gdrkit may use in total: the capacity or the size of the file system, less the headroom, in bytes.
    free_bytes : int
        Free space of the file system, in bytes.
    absent : str
        The reason why the tier cannot be used; empty if it can.
    route : TierRoute
        The route of its bytes to device memory in the last transfer that showed one.
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
class RefusedMove:
    """A file that could not be migrated and is where it was."""

    name: str
    destination: str
    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """The result of a run of the policy.

    Attributes
    ----------
    moved, moved_bytes : int
        Number of files that were moved, and the space that they take, in bytes.
    refused : tuple of Refused
        Files that had to stay, for example because a program writes them or the destination is full.
    considered : int
        Number of all files.
    """

    moved: int
    moved_bytes: int
    refused: tuple[RefusedMove, ...]
    considered: int
