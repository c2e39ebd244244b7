"""Types of the results that :class:`~gdrkit.tiers.manager.TierManager` returns."""

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
        Heat that a file needs for this tier; see :mod:`gdrkit.tiers.heat`.
    files : int
        Number of files.
    size_bytes, allocated_bytes : int
        Sum of the file sizes and of the space that the files take, in bytes.
    coming_bytes : int
        Space that migrations into this tier have reserved, in bytes.
    limit_bytes : int
        Space that gdrkit may use in total: the capacity or the size of the file system, less the headroom, in bytes.
    free_bytes : int
        Free space of the file system, in bytes.
    absent : str
        The reason why the tier is not available; empty if it is available.
    route : TierRoute
        The route that was observed in the last transfer between this tier and device memory.
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
    """A file that could not be migrated. It stays in its tier.

    Attributes
    ----------
    name, destination : str
        Name of the file, and tier to which it should have moved.
    reason : Reason
        Type of the error.
    text : str
        The message of the error.
    """

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
    refused : tuple of RefusedMove
        Files that had to stay, for example because a program writes them or the destination is full.
    considered : int
        Number of files that the policy examined.
    """

    moved: int
    moved_bytes: int
    refused: tuple[RefusedMove, ...]
    considered: int
