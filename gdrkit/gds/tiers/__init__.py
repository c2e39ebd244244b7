"""Storage tiers: files by logical names, each in the tier that its use asks for, migrated without loss of data.

Start with ``TierManager(configure())``. docs/tiers.md describes the rest.
"""

from __future__ import annotations

from gdrkit.gds.tiers.catalogue import Entry
from gdrkit.gds.tiers.configuration import SEED, Configuration, Tier, configure
from gdrkit.gds.tiers.finding import Finding, Kind
from gdrkit.gds.tiers.manager import TierManager
from gdrkit.gds.tiers.migration import Phase
from gdrkit.gds.tiers.results import Migrated, Refused, TierStatus
from gdrkit.gds.tiers.routes import TierRoute
from gdrkit.gds.tiers.tiered_file import TieredFile

__all__ = [
    "SEED",
    "Configuration",
    "Entry",
    "Finding",
    "Kind",
    "Migrated",
    "Phase",
    "Refused",
    "Tier",
    "TierManager",
    "TierRoute",
    "TierStatus",
    "TieredFile",
    "configure",
]
