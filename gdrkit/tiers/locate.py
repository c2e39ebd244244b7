"""Search for a file in all tiers, while it may be migrating.

The tier that the catalogue names is tried first, then all others, because the catalogue may be wrong. A migration
creates the new name before it removes the old one, so a search of all tiers finds the file.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError
from gdrkit.tiers.guard import share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gdrkit.tiers.catalogue import Catalogue, Entry
    from gdrkit.tiers.folder import TierFolder

__all__ = ["open_reading", "open_writing"]

# A search misses the file only if a migration moves it from a tier that is not searched yet to one that was. That can
# happen once per migration, and a migration takes longer than all of these searches together.
_LOOKS = 16
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


def open_reading(name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> tuple[TierFolder, int]:
    """Open a file for reading. Return its tier and a descriptor.

    Raises
    ------
    OSError
        ENOENT: no tier has the file.
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
    """Open a file for reading and writing. Return its tier and a descriptor, which blocks migrations while open.

    Parameters
    ----------
    landing : sequence of TierFolder or None
        Tiers for a new file, best first. None: the file must exist.

    Raises
    ------
    OSError
        ENOENT: no tier has the file. ENOSPC and others: the file cannot be created.
    """
    while True:
        entry, found = _look(name, folders, catalogue, os.O_RDWR)
        if found is None:
            if landing is None:
                raise FileNotFoundError(errno.ENOENT, "no tier has it")
            found = _make(name, landing, folders, catalogue)
            if found is None:
                continue  # Another process has just created the file.
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
        os.close(descriptor)  # The file was migrated while this call waited for the lock, so search again.


def _is_the_file(name: str, tier: TierFolder, descriptor: int) -> bool:
    """Return whether the open file still has the name and is not about to lose it."""
    here, ours = tier.stat(name), os.fstat(descriptor)
    return here is not None and (here.st_dev, here.st_ino) == (ours.st_dev, ours.st_ino)


def _entry(name: str, catalogue: Catalogue) -> Entry | None:
    try:
        return catalogue.find(name)
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise
        return None  # The catalogue is damaged or locked. The disks are searched instead.


def _ordered(entry: Entry | None, folders: Mapping[str, TierFolder]) -> list[TierFolder]:
    first = [folders[entry.tier]] if entry is not None and entry.tier in folders else []
    return [*first, *(folder for folder in folders.values() if folder not in first)]


def _look(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, flags: int
) -> tuple[Entry | None, tuple[TierFolder, int] | None]:
    """Return the catalogue's entry, and the tier and descriptor of the file that was found."""
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
    """Add a file to the catalogue that was created outside gdrkit. If that fails now, the next open repeats it."""
    tier, descriptor = found
    try:
        catalogue.see(name, tier.name, os.fstat(descriptor))
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise


def _make(
    name: str, landing: Sequence[TierFolder], folders: Mapping[str, TierFolder], catalogue: Catalogue
) -> tuple[TierFolder, int] | None:
    """Create a file that no tier has, excluding all other processes. Return None if a tier has it."""
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
