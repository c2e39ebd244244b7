"""Search for a file in all tiers, while it may be migrating.

The tier that the catalogue names is tried first, then all others, because the catalogue may be wrong. A migration
creates the name in the new tier before it removes the name from the old tier, so at least one tier has it at any time.
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

# Number of searches without a result after which a file counts as missing. One search can miss an existing file, if a
# migration meanwhile moves the file to a tier that was already searched. The next search can miss it only after another
# migration, and a migration takes longer than all of these searches together.
_SEARCHES_MAX = 16
_NOT_FOUND_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR})


def open_for_reading(name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue) -> tuple[TierFolder, int]:
    """Open a file for reading. Return its tier and a descriptor.

    Raises
    ------
    OSError
        ENOENT: no tier has the file.
    """
    entry, tier_and_fd = _search_and_open(name, folders, catalogue, os.O_RDONLY)
    if tier_and_fd is None:
        raise FileNotFoundError(errno.ENOENT, "no tier has the file")
    if entry is None:
        _record_file(name, tier_and_fd, catalogue)
    return tier_and_fd


def open_for_writing(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, *, landing_tiers: Sequence[TierFolder] | None
) -> tuple[TierFolder, int]:
    """Open a file for reading and writing. Return its tier and a descriptor. The file is not migrated while it is open.

    Parameters
    ----------
    landing_tiers : sequence of TierFolder or None
        Tiers in which a new file may be created, best first. None: the file must exist.

    Raises
    ------
    OSError
        ENOENT: no tier has the file. ENOSPC and others: the file cannot be created.
    """
    while True:
        entry, tier_and_fd = _search_and_open(name, folders, catalogue, os.O_RDWR)
        if tier_and_fd is None:
            if landing_tiers is None:
                raise FileNotFoundError(errno.ENOENT, "no tier has the file")
            tier_and_fd = _create_file(name, landing_tiers, folders, catalogue)
            if tier_and_fd is None:
                continue  # Another process has just created the file.
        tier, descriptor = tier_and_fd
        try:
            lock_shared(descriptor)
            is_current = _has_name(descriptor, name, tier)
            if is_current and entry is None:
                _record_file(name, tier_and_fd, catalogue)
        except BaseException:
            os.close(descriptor)
            raise
        if is_current:
            return tier_and_fd
        os.close(descriptor)  # The file was migrated while this call waited for the lock, so search again.


def _has_name(descriptor: int, name: str, tier: TierFolder) -> bool:
    """Return whether this name in the tier still refers to the open file."""
    named_status, open_status = tier.stat(name), os.fstat(descriptor)
    return named_status is not None and os.path.samestat(named_status, open_status)


def _find_entry(name: str, catalogue: Catalogue) -> Entry | None:
    try:
        return catalogue.find(name)
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise
        return None  # The catalogue is damaged or locked. The disks are searched instead.


def _list_in_search_order(entry: Entry | None, folders: Mapping[str, TierFolder]) -> list[TierFolder]:
    likely_folders = [folders[entry.tier]] if entry is not None and entry.tier in folders else []
    return [*likely_folders, *(folder for folder in folders.values() if folder not in likely_folders)]


def _search_and_open(
    name: str, folders: Mapping[str, TierFolder], catalogue: Catalogue, flags: int
) -> tuple[Entry | None, tuple[TierFolder, int] | None]:
    """Open a file in the tier that has it. Return the entry in the catalogue, and the tier with the descriptor."""
    entry = None
    for _ in range(_SEARCHES_MAX):
        entry = _find_entry(name, catalogue)
        tier_and_fd = _open_first(name, _list_in_search_order(entry, folders), flags)
        if tier_and_fd is not None:
            return entry, tier_and_fd
    return entry, None


def _open_first(name: str, tiers: Sequence[TierFolder], flags: int) -> tuple[TierFolder, int] | None:
    """Open the file in the first tier that has it. Return None if no tier has it."""
    for tier in tiers:
        try:
            return tier, tier.open(name, flags)
        except OSError as error:
            if error.errno not in _NOT_FOUND_ERRNOS:
                raise
    return None


def _record_file(name: str, tier_and_fd: tuple[TierFolder, int], catalogue: Catalogue) -> None:
    """Add a file that the catalogue does not have. If the catalogue fails, the next open of the file tries again."""
    tier, descriptor = tier_and_fd
    try:
        catalogue.record_file(name, tier.name, os.fstat(descriptor))
    except ApiError as error:
        if error.api is not Api.SQLITE:
            raise


def _create_file(
    name: str, landing_tiers: Sequence[TierFolder], folders: Mapping[str, TierFolder], catalogue: Catalogue
) -> tuple[TierFolder, int] | None:
    """Create a file in the first landing tier. Return None if any tier already has a file of this name.

    The write transaction of the catalogue excludes other processes that create files.
    """
    with catalogue.write_transaction("create file"):
        if any(folder.stat(name) is not None for folder in folders.values()):
            return None
        for tier in landing_tiers:
            with tier.open_parent(name, create_like=tier) as (parent_fd, _):
                descriptor = tier.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.fsync(parent_fd)
            catalogue.record_file(name, tier.name, os.fstat(descriptor))
            return tier, descriptor
    return None
