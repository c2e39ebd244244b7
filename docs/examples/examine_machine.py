"""Facts, topology, doctor, captures and profiles of this machine, from Python."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gdrkit import inventory
from gdrkit.verdict import Verdict

# Facts about the host. With query_apis=True, child processes also query CUDA, verbs and cuFile.
facts = inventory.probe(query_apis=False)
print(facts.kernel.release, len(facts.rdma_devices), "RDMA devices", facts.digest[:15])

# The doctor finds problems of the machine. With run_experiments=False, it only reads.
# With record_files=True, the machine remembers what it reads, for a capture.
machine = inventory.this_machine(query_apis=False, record_files=True, run_experiments=False, facts=facts)
diagnosis = inventory.diagnose(machine)
for finding in diagnosis.findings_with(Verdict.FAIL):
    print(f"{finding.code}: {finding.text}. To do: {finding.what_to_do}")
print(inventory.rule_of("memlock-low").title)

topology = inventory.topology(machine)
for place in topology.places:
    print(place.kind, place.name, place.address)
# path_limit() returns the limit of the slowest link of these places. device_limit() needs no topology.
link_limit = inventory.path_limit(topology, facts, [place.name for place in topology.places])
print("limit of the links:", link_limit.gb_per_s if link_limit else "unknown")
assert inventory.device_limit(facts, devices=[], nics=[]) is None  # A path without devices has no limit.

# A capture contains the facts about this machine. Another machine can diagnose the capture by the same rules.
with tempfile.TemporaryDirectory() as folder:
    capture_path = Path(folder) / "machine.json.gz"
    inventory.write_capture(capture_path, machine.capture())
    capture = inventory.read_capture(capture_path)
    assert inventory.parse_capture(capture_path.read_bytes()) == capture
    machine_of_capture = inventory.captured_machine(capture)
    capture_diagnosis = inventory.diagnose(machine_of_capture)
    assert [finding.code for finding in capture_diagnosis.findings] == [finding.code for finding in diagnosis.findings]
    # CapturedFiles returns the recorded content of each file that was read on this machine. A Recorder records the
    # reads from such files, or from the files of a disk.
    captured_files = inventory.CapturedFiles(capture.answers)
    recorder = inventory.Recorder(captured_files)
    assert recorder.read("/proc/sys/kernel/osrelease").strip().decode() == facts.kernel.release

# The profile that fits this machine best.
profile = inventory.choose_profile(inventory.load_profiles(), facts, {})
print("profile:", profile.name)
assert inventory.load_profile(profile.name) == profile
# Print which links of a DGX H100 this machine lacks.
for shortfall_text in inventory.link_shortfalls(inventory.load_profile("dgx-h100").links, facts):
    print(shortfall_text)
