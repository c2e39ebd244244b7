"""Find a file in whichever tier it is, while it may be moving.

Level 4. The catalogue is asked first and never believed: a tier that does not have the file is followed by the others.
A migration gives a file its new name before it takes the old one away, so that whoever looks everywhere finds one.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError
from gdrkit.gds.tiers.guard import share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gdrkit.gds.tiers.catalogue import Catalogue, Entry
    from gdrkit.gds.tiers.folder import TierFolder

__all__ = ["open_reading", "open_writing"]

# A file is missed only where it went behind our back, from a tier not yet looked at into one that was: once for each
# migration, which takes longer than all looks together.
_LOOKS = 16
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


def open_reading(name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> tuple[TierFolder, int]:
    """The tier of a file and a descriptor to read it.

    Raises
    ------
    OSError
        ENOENT: no tier has it.
    """
    entry, found = _look(name, folders, catalogue, os.O_RDONLY)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no tier has it")
    if entry is None:
        _learn(name, found, catalogue)
    return found


def open_writing(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, *, landing: Sequence[TierFolder] | None
) -> tuple[TierFolder, int]:
    """The tier of a file and a descriptor to read and write it, which keeps migrations away until it is closed.

    Parameters
    ----------
    landing : sequence of TierFolder or None
        Where to make the file when no tier has it, best first; None: it has to be there.

    Raises
    ------
    OSError
        ENOENT: no tier has it; ENOSPC and others of making it.
    """
    while True:
        entry, found = _look(name, folders, catalogue, os.O_RDWR)
        if found is None:
            if landing is None:
                raise FileNotFoundError(errno.ENOENT, "no tier has it")
            found = _make(name, landing, folders, catalogue)
            if found is None:
                continue  # Somebody else has made it just now.
        tier, descriptor = found
        try:
            share(descriptor)
            is_ours = _is_the_file(name, tier, descriptor)
            if is_ours and entry is None:
                _learn(name, found, catalogue)
        except BaseException:
            os.close(descriptor)
            raise
        if is_ours:
            return found
        os.close(descriptor)  # Migrated while we waited for it: where it is now, we are not yet.


def _is_the_file(name: str, tier: TierFolder, descriptor: int) -> bool:
    """Whether what we have open still has the name, and nobody is about to take it away again."""
    here, ours = tier.stat(name), os.fstat(descriptor)
    return here is not None and (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)


def _entry(name: str, catalogue: Catalogue) -> Entry | None:
    try:
        return catalogue.find(name)
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise
        return None  # Damaged or locked: the disks know as well.


def _ordered(entry: Entry | None, folders: Mapping[str, TierFolder]) -> list[TierFolder]:
    first = [folders[entry.tier]] if entry is not None and entry.tier in folders else []
    return [*first, *(folder for folder in folders.values() if folder not in first)]


def _look(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, flags: int
) -> tuple[Entry | None, tuple[TierFolder, int] | None]:
    """What the catalogue says, and what is there."""
    entry = None
    for _ in range(_LOOKS):
        entry = _entry(name, catalogue)
        found = _first(name, _ordered(entry, folders), flags)
        if found is not None:
            return entry, found
    return entry, None


def _first(name: str, tiers: Sequence[TierFolder], flags: int) -> tuple[TierFolder, int] | None:
    for tier in tiers:
        try:
            return tier, tier.open(name, flags)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
    return None


def _learn(name: str, found: tuple[TierFolder, int], catalogue: Catalogue) -> None:
    """Have the catalogue know a file that somebody put there past gdrkit; if it cannot now, it will the next time."""
    tier, descriptor = found
    try:
        catalogue.see(name, tier.name, os.fstat(descriptor))
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise


def _make(
    name: str, landing: Sequence[TierFolder], folders: Mapping[str, TierFolder], catalogue: Catalogue
) -> tuple[TierFolder, int] | None:
    """Make a file that no tier has, alone among all processes; None when one has it."""
    with catalogue.writing("make"):
        if _first_stat(name, folders):
            return None
        for tier in landing:
            with tier.parent(name, like=tier) as (folder, _):
                descriptor = tier.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.fsync(folder)
            catalogue.see(name, tier.name, os.fstat(descriptor))
            return tier, descriptor
    return None


def _first_stat(name: str, folders: Mapping[str, TierFolder]) -> bool:
    return any(folder.stat(name) is not None for folder in folders.values())
