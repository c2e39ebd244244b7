"""Facts about a machine and its APIs, as frozen dataclasses, and the doctor: rules that examine them.

``probe`` reads the files of the host and queries each API in a child process, so that a damaged library can crash only
the child. ``diagnose`` applies rules to this machine or to a captured machine. Each rule looks for one cause of
transfers that are not direct. Later decisions, such as which cases can run, depend only on :class:`Facts`.
"""

from __future__ import annotations

from gdrkit.inventory.capture import Capture, CapturedFiles, RecordedReads, Recorder
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
from gdrkit.inventory.limits import Limit, device_limit, path_limit
from gdrkit.inventory.links import ExpectedLink, link_shortfalls
from gdrkit.inventory.machine import Machine, captured_machine, this_machine
from gdrkit.inventory.observation import Observation
from gdrkit.inventory.probe import probe
from gdrkit.inventory.profile import (
    ExpectedNumber,
    ExpectedRefusal,
    ForeseenAbsence,
    Profile,
    RefusalCause,
    choose_profile,
    load_profile,
    load_profiles,
)
from gdrkit.inventory.rules import RULES, Finding, Reading, Rule, rule_of
from gdrkit.inventory.topology import Topology, TopologyDevice, topology

__all__ = [
    "RULES",
    "ApiFailure",
    "Capture",
    "CapturedFiles",
    "ConfigFacts",
    "CudaDeviceFacts",
    "CudaFacts",
    "CufileFacts",
    "Diagnosis",
    "ExpectedLink",
    "ExpectedNumber",
    "ExpectedRefusal",
    "Facts",
    "Finding",
    "ForeseenAbsence",
    "LibraryFacts",
    "Limit",
    "Machine",
    "NicFacts",
    "Observation",
    "PackageFacts",
    "Profile",
    "Reading",
    "RecordedReads",
    "Recorder",
    "RefusalCause",
    "RouteFacts",
    "Rule",
    "Topology",
    "TopologyDevice",
    "VerbsFacts",
    "captured_machine",
    "choose_profile",
    "device_limit",
    "diagnose",
    "link_shortfalls",
    "load_profile",
    "load_profiles",
    "parse_capture",
    "path_limit",
    "probe",
    "read_capture",
    "rule_of",
    "this_machine",
    "topology",
    "write_capture",
]
