"""The folders of the available tiers, and the space that gdrkit may use in each tier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, SetupMissing
from gdrkit.handles import ReleaseStack
from gdrkit.tiers.catalogue import TierTotals
from gdrkit.tiers.folder import TierFolder
from gdrkit.tiers.names import GDRKIT_FOLDER
from gdrkit.tiers.policy import TierLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.tiers.catalogue import Catalogue
    from gdrkit.tiers.configuration import Configuration

__all__ = ["TierSet"]


class TierSet:
    """The tiers of a configuration, with their folders. The caller closes the object.

    Parameters
    ----------
    configuration : Configuration
        The tiers that should exist.

    Attributes
    ----------
    folders : dict
        Folders of the available tiers by name, fastest first.
    absent : dict
        The reasons why the other tiers are unavailable, by name of the tier.

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
        self._resources = ReleaseStack()
        try:
            for tier in configuration.tiers:
                try:
                    folder = TierFolder(tier.name, tier.directory)
                except ApiError as error:
                    self.absent[tier.name] = str(error)
                    continue
                self.folders[tier.name] = folder
                self._resources.push(folder.close)
        except BaseException as error:
            self._resources.run_after(error)
            raise
        if not self.folders:
            raise _make_unavailable_error(", ".join(self.absent), "; ".join(self.absent.values()))

    @property
    def fastest(self) -> TierFolder:
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
            raise _make_unavailable_error(name, self.absent.get(name, "it is not configured"))
        return self.folders[name]

    def exclude_unknown_folders(self, catalogue: Catalogue) -> None:
        """Exclude the folders whose identity contradicts the catalogue, and :meth:`~TierFolder.claim` all others.

        A folder whose identity differs from the catalogue is excluded if it has no ``.gdrkit-tiers`` folder, or if it
        has an identity and the catalogue has files of its tier. Such a folder is the mount point of a file system that
        is not mounted, or it is on another disk. gdrkit writes nothing into it, and does not report the files of its
        tier as missing.
        """
        identity_by_tier, totals_by_tier = catalogue.identities(), catalogue.totals()
        for name, folder in tuple(self.folders.items()):
            if name in identity_by_tier and folder.identity != identity_by_tier[name]:
                has_no_gdrkit_folder = not folder.is_claimed
                if has_no_gdrkit_folder or (
                    folder.identity is not None and totals_by_tier.get(name, TierTotals()).files
                ):
                    cause = f"{folder.directory} is not the folder in the catalogue; is its file system mounted?"
                    advice = (
                        f" If you recreated the folder: mkdir {folder.directory / GDRKIT_FOLDER}"
                        if has_no_gdrkit_folder
                        else ""
                    )
                    self.absent[name] = cause + advice
                    del self.folders[name]
                    continue
            folder.claim()
            if folder.identity is not None and identity_by_tier.get(name) != folder.identity:
                catalogue.record_identity(name, folder.identity)

    def limits(self, totals_by_tier: Mapping[str, TierTotals]) -> list[TierLimits]:
        """Return the limits of the available tiers, fastest first, for the policy."""
        tiers = [tier for tier in self._configuration.tiers if tier.name in self.folders]
        return [TierLimits(tier.name, tier.accesses_min, self.limit_bytes(tier.name, totals_by_tier)) for tier in tiers]

    def landing_folders(self, totals_by_tier: Mapping[str, TierTotals]) -> list[TierFolder]:
        """Return the folders of the tiers in which a new file may be created, best first.

        The landing tier comes first, then the slower tiers, then the faster ones. Full tiers come last.
        """
        landing_name, names = self._configuration.landing_tier.name, list(self.folders)
        first_index = names.index(landing_name) if landing_name in names else 0
        ordered_names = [*names[first_index:], *reversed(names[:first_index])]
        full_names = [
            name
            for name in ordered_names
            if _count_used_bytes(name, totals_by_tier) >= self.limit_bytes(name, totals_by_tier)
        ]
        # The sort is stable, and False (not full) comes before True.
        return [self.folders[name] for name in sorted(ordered_names, key=full_names.__contains__)]

    def limit_bytes(self, name: str, totals_by_tier: Mapping[str, TierTotals]) -> int:
        """Return the space that a tier may use, in bytes.

        This is the capacity of the tier, or the size of its files plus the free space of the file system if that is
        less. The headroom is subtracted from it.
        """
        tier, folder = self._configuration.tier(name), self.folders.get(name)
        if folder is None:
            return 0
        fillable_bytes = _count_used_bytes(name, totals_by_tier) + folder.free_bytes()
        limit_bytes = fillable_bytes if tier.capacity_bytes is None else min(fillable_bytes, tier.capacity_bytes)
        return int(limit_bytes * (1 - self._configuration.headroom))

    def close(self) -> None:
        """Close all folders."""
        self._resources.run()


def _count_used_bytes(name: str, totals_by_tier: Mapping[str, TierTotals]) -> int:
    return totals_by_tier.get(name, TierTotals()).allocated_bytes


def _make_unavailable_error(tier: str, cause: str) -> SetupMissing:
    return SetupMissing(
        api=Api.NONE,
        operation="open tier",
        status=None,
        status_name="NOT_AVAILABLE",
        arguments={"tier": tier},
        reason=Reason.NO_DEVICE,
        what_to_do="mount its file system, or correct its directory: --config, --tier, GDRKIT_TIERS_CONFIG",
        detail=cause,
    )
