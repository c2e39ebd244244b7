"""Facts about a machine and its APIs, as frozen values, and the doctor that examines them.

``probe`` reads the host from files alone and queries each API in a child process, so that a damaged library can end
only the child. ``diagnose`` applies the rules to this machine or to a captured one; each rule is a cause of transfers
that are not direct. All later decisions (needs, plans, routes, reports) are pure functions of :class:`Facts`.
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
