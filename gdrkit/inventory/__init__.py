"""What a machine is and what its APIs answer, as frozen facts.

Level 4. ``probe`` reads the host by files alone and asks each API in a child process, so that a damaged library can end
the child and not the question. Everything that decides later (needs, plans, routes, reports) is a pure function over
:class:`Facts`.
"""

from __future__ import annotations

from gdrkit.inventory.facts import (
    ApiFailure,
    CudaDeviceFacts,
    CudaFacts,
    Facts,
    LibraryFacts,
    NicFacts,
    PackageFacts,
    RouteFacts,
    VerbsFacts,
)
from gdrkit.inventory.probe import probe
from gdrkit.inventory.profile import Foreseen, Profile, choose_profile, load_profile, load_profiles

__all__ = [
    "ApiFailure",
    "CudaDeviceFacts",
    "CudaFacts",
    "Facts",
    "Foreseen",
    "LibraryFacts",
    "NicFacts",
    "PackageFacts",
    "Profile",
    "RouteFacts",
    "VerbsFacts",
    "choose_profile",
    "load_profile",
    "load_profiles",
    "probe",
]
