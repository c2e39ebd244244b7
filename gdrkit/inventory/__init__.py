"""What a machine is and what its APIs answer, as frozen facts.

Level 4. ``probe`` reads the host by files alone and asks each API in a child process, so that a damaged library can end
the child and not the question. ``diagnose`` applies the rules, each a cause for which a transfer is not direct, to this
machine or a captured one. Everything that decides later (needs, plans, routes, reports) is a pure function over
:class:`Facts`.
"""

from __future__ import annotations

from gdrkit.inventory.capture import Answers, Capture, CapturedFiles, Recorder
from gdrkit.inventory.capture_file import parse_capture, read_capture, write_capture
from gdrkit.inventory.doctor import Diagnosis, diagnose
from gdrkit.inventory.facts import (
    ApiFailure,
    ConfigFacts,
    CudaDeviceFacts,
    CudaFacts,
    CufileFacts,
    Facts,
    LibraryFacts,
    NicFacts,
    PackageFacts,
    RouteFacts,
    VerbsFacts,
)
from gdrkit.inventory.limits import Limit, device_limit, way_limit
from gdrkit.inventory.machine import Machine, replayed, this_machine
from gdrkit.inventory.observation import Observation
from gdrkit.inventory.probe import probe
from gdrkit.inventory.profile import (
    Expected,
    Foreseen,
    Profile,
    Refused,
    RefusedCause,
    choose_profile,
    load_profile,
    load_profiles,
)
from gdrkit.inventory.rules import RULES, Finding, Reading, Rule, rule_of
from gdrkit.inventory.topology import Place, Topology, topology

__all__ = [
    "RULES",
    "Answers",
    "ApiFailure",
    "Capture",
    "CapturedFiles",
    "ConfigFacts",
    "CudaDeviceFacts",
    "CudaFacts",
    "CufileFacts",
    "Diagnosis",
    "Expected",
    "Facts",
    "Finding",
    "Foreseen",
    "LibraryFacts",
    "Limit",
    "Machine",
    "NicFacts",
    "Observation",
    "PackageFacts",
    "Place",
    "Profile",
    "Reading",
    "Recorder",
    "Refused",
    "RefusedCause",
    "RouteFacts",
    "Rule",
    "Topology",
    "VerbsFacts",
    "choose_profile",
    "device_limit",
    "diagnose",
    "load_profile",
    "load_profiles",
    "parse_capture",
    "probe",
    "read_capture",
    "replayed",
    "rule_of",
    "this_machine",
    "topology",
    "way_limit",
    "write_capture",
]
