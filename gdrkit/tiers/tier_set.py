"""The folders of the available tiers, and the space that gdrkit may use in each."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, SetupMissing
from gdrkit.handles import ReleaseStack
from gdrkit.tiers.catalogue import Totals
from gdrkit.tiers.folder import TierFolder
from gdrkit.tiers.names import OWN_FOLDER
from gdrkit.tiers.policy import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.configuration import Configuration

__all__ = ["TierSet"]


class TierSet:
    """The tiers of a configuration. The owner closes it.

    Parameters
    ----------
    configuration : Configuration
        The tiers that should exist.

    Attributes
    ----------
    folders : dict
        Folders of the available tiers by name, fastest first.
    absent : dict
        The reason why each other tier is unavailable, by name.

    Raises
    ------
    SetupMissing
        No tier is available.
    UsageError
        A folder belongs to another tier.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.folders: dict[str, TierFolder] = {}
        self.absent: dict[str, str] = {}
        self._parts = ReleaseStack()
        try:
            for tier in configuration.tiers:
                try:
                    folder = TierFolder(tier.name, tier.directory)
                except ApiError as error:
                    self.absent[tier.name] = str(error)
                    continue
                self.folders[tier.name] = folder
                self._parts.push(folder.close)
        except BaseException as error:
            self._parts.run_after(error)
            raise
        if not self.folders:
            raise _absent(", ".join(self.absent), "; ".join(self.absent.values()))

    @property
    def first(self) -> TierFolder:
        """Folder of the fastest available tier."""
        return next(iter(self.folders.values()))

    def folder(self, name: str) -> TierFolder:
        """Return the folder of a tier.

        Raises
        ------
        SetupMissing
            The tier is not available.
        """
        if name not in self.folders:
            raise _absent(name, self.absent.get(name, "it is not configured"))
        return self.folders[name]

    def leave_out_strangers(self, catalogue: Catalogue) -> None:
        """Remove each folder that is not the one that the catalogue knows, and claim folders that are new.

        A removed folder is the mount point of a file system that is not mounted, or another disk. Nothing is written
        into it, and the files of its tier are not reported as missing.
        """
        known, totals = catalogue.identities(), catalogue.totals()
        for name, folder in tuple(self.folders.items()):
            if name in known and folder.identity != known[name]:
                is_empty = not folder.is_claimed
                if is_empty or (folder.identity is not None and totals.get(name, Totals()).files):
                    why = f"{folder.directory} is not the folder that it was: is its file system mounted?"
                    accept = f" If it was made anew: mkdir {folder.directory / OWN_FOLDER}" if is_empty else ""
                    self.absent[name] = why + accept
                    del self.folders[name]
                    continue
            folder.claim()
            if folder.identity is not None and known.get(name) != folder.identity:
                catalogue.identify(name, folder.identity)

    def places(self, totals: Mapping[str, Totals]) -> list[Place]:
        """Return the available tiers in the form that the policy needs."""
        there = [tier for tier in self._configuration.tiers if tier.name in self.folders]
        return [Place(tier.name, tier.accesses_min, self.limit_bytes(tier.name, totals)) for tier in there]

    def landing(self, totals: Mapping[str, Totals]) -> list[TierFolder]:
        """Return the tiers for a new file, best first. Tiers with space come before the others."""
        wanted, names = self._configuration.landing_tier.name, list(self.folders)
        at = names.index(wanted) if wanted in names else 0
        ordered = [*names[at:], *reversed(names[:at])]
        full = [name for name in ordered if _used(name, totals) >= self.limit_bytes(name, totals)]
        return [self.folders[name] for name in sorted(ordered, key=full.__contains__)]

    def limit_bytes(self, name: str, totals: Mapping[str, Totals]) -> int:
        """Return the bytes that a tier may hold: its capacity or its file system's size, less the headroom."""
        tier, folder = self._configuration.tier(name), self.folders.get(name)
        if folder is None:
            return 0
        there = _used(name, totals) + folder.free_bytes()
        limit = there if tier.capacity_bytes is None else min(there, tier.capacity_bytes)
        return int(limit * (1 - self._configuration.headroom))

    def close(self) -> None:
        """Close all folders."""
        self._parts.run()


def _used(name: str, totals: Mapping[str, Totals]) -> int:
    return totals.get(name, Totals()).allocated_bytes


def _absent(tier: str, why: str) -> SetupMissing:
    return SetupMissing(
        api=Api.KERNEL,
        operation="open tier",
        status=errno.ENODEV,
        status_name="absent",
        arguments={"tier": tier},
        reason=Reason.NO_DEVICE,
        what_to_do="mount it, or correct its directory: --config, --tier, GDRKIT_TIERS_CONFIG",
        detail=why,
    )
