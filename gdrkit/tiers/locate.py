"""Search for a file in all tiers, while it may be migrating.

The tier that the catalogue names is tried first, then all others, because the catalogue may be wrong. A migration
creates the new name before it removes the old one, so a search of all tiers finds the file.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError
from gdrkit.tiers.guard import lock_shared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gdrkit.tiers.catalogue import Catalogue, Entry
    from gdrkit.tiers.folder import TierFolder

__all__ = ["open_for_reading", "open_for_writing"]

# A search misses the file only if a migration moves it from a tier that was not searched yet to one that was. That can
# happen once per migration, and a migration takes longer than all of these searches together.
_SEARCHES_MAX = 16
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


def open_for_reading(name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> tuple[TierFolder, int]:
    """Open a file for reading. Return its tier and a descriptor.

    Raises
    ------
    OSError
        ENOENT: no tier has the file.
    """
    entry, opened = _search(name, folders, catalogue, os.O_RDONLY)
    if opened is None:
        raise FileNotFoundError(errno.ENOENT, "no tier has the file")
    if entry is None:
        _record_file(name, opened, catalogue)
    return opened


def open_for_writing(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, *, landing: Sequence[TierFolder] | None
) -> tuple[TierFolder, int]:
    """Open a file for reading and writing. Return its tier and a descriptor, which blocks migrations while open.

    Parameters
    ----------
    landing : sequence of TierFolder or None
        Tiers in which a new file may be created, best first. None: the file must exist.

    Raises
    ------
    OSError
        ENOENT: no tier has the file. ENOSPC and others: the file cannot be created.
    """
    while True:
        entry, opened = _search(name, folders, catalogue, os.O_RDWR)
        if opened is None:
            if landing is None:
                raise FileNotFoundError(errno.ENOENT, "no tier has the file")
            opened = _create(name, landing, folders, catalogue)
            if opened is None:
                continue  # Another process has just created the file.
        tier, descriptor = opened
        try:
            lock_shared(descriptor)
            is_current = _has_name(descriptor, name, tier)
            if is_current and entry is None:
                _record_file(name, opened, catalogue)
        except BaseException:
            os.close(descriptor)
            raise
        if is_current:
            return opened
        os.close(descriptor)  # The file was migrated while this call waited for the lock, so search again.


def _has_name(descriptor: int, name: str, tier: TierFolder) -> bool:
    """Return whether the open file is the one that has this name in the tier."""
    named, opened = tier.stat(name), os.fstat(descriptor)
    return named is not None and os.path.samestat(named, opened)


def _find_entry(name: str, catalogue: Catalogue) -> Entry | None:
    try:
        return catalogue.find(name)
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise
        return None  # The catalogue is damaged or locked. The disks are searched instead.


def _search_order(entry: Entry | None, folders: Mapping[str, TierFolder]) -> list[TierFolder]:
    first = [folders[entry.tier]] if entry is not None and entry.tier in folders else []
    return [*first, *(folder for folder in folders.values() if folder not in first)]


def _search(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, flags: int
) -> tuple[Entry | None, tuple[TierFolder, int] | None]:
    """Open a file in the tier that has it. Return the catalogue's entry, and the tier and the descriptor."""
    entry = None
    for _ in range(_SEARCHES_MAX):
        entry = _find_entry(name, catalogue)
        opened = _open_first(name, _search_order(entry, folders), flags)
        if opened is not None:
            return entry, opened
    return entry, None


def _open_first(name: str, tiers: Sequence[TierFolder], flags: int) -> tuple[TierFolder, int] | None:
    """Open the file in the first tier that has it. Return None if no tier has it."""
    for tier in tiers:
        try:
            return tier, tier.open(name, flags)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
    return None


def _record_file(name: str, opened: tuple[TierFolder, int], catalogue: Catalogue) -> None:
    """Add a file to the catalogue that was created outside gdrkit. If the catalogue fails, the next open repeats it."""
    tier, descriptor = opened
    try:
        catalogue.record_file(name, tier.name, os.fstat(descriptor))
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise


def _create(
    name: str, landing: Sequence[TierFolder], folders: Mapping[str, TierFolder], catalogue: Catalogue
) -> tuple[TierFolder, int] | None:
    """Create a file in the first landing tier. Return None if a tier has the name already.

    The write transaction of the catalogue excludes other processes that create files.
    """
    with catalogue.write_transaction("create file"):
        if any(folder.stat(name) is not None for folder in folders.values()):
            return None
        for tier in landing:
            with tier.parent(name, like=tier) as (folder, _):
                descriptor = tier.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.fsync(folder)
            catalogue.record_file(name, tier.name, os.fstat(descriptor))
            return tier, descriptor
    return None
