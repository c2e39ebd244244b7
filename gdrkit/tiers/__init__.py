"""Storage tiers: files by logical names, each in the tier that its use asks for, migrated without loss of data.

Start with ``TierManager(configure())``. docs/tiers.md describes the rest.
"""

from __future__ import annotations

from gdrkit.tiers.catalogue import Entry
from gdrkit.tiers.configuration import SEED, Configuration, Tier, configure
from gdrkit.tiers.finding import Finding, Kind
from gdrkit.tiers.manager import TierManager
from gdrkit.tiers.migration import Phase
from gdrkit.tiers.results import Migrated, Refused, TierStatus
from gdrkit.tiers.routes import TierRoute
from gdrkit.tiers.tiered_file import TieredFile

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
