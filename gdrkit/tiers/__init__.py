"""Storage tiers: files have logical names, and gdrkit moves each file to the tier that fits its use, without data loss.

Start with ``TierManager(configure())``. ``docs/tiers.md`` is the guide.
"""

from __future__ import annotations

from gdrkit.tiers.catalogue import Entry
from gdrkit.tiers.configuration import DEFAULT_TIERS, Configuration, Tier, configure
from gdrkit.tiers.finding import FindingKind, TierFinding
from gdrkit.tiers.manager import TierManager
from gdrkit.tiers.migration import Phase
from gdrkit.tiers.results import Migrated, RefusedMove, TierStatus
from gdrkit.tiers.routes import TierRoute
from gdrkit.tiers.tiered_file import TieredFile

__all__ = [
    "DEFAULT_TIERS",
    "Configuration",
    "Entry",
    "FindingKind",
    "Migrated",
    "Phase",
    "RefusedMove",
    "Tier",
    "TierFinding",
    "TierManager",
    "TierRoute",
    "TierStatus",
    "TieredFile",
    "configure",
]
