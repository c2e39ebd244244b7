"""Check what tests need of a machine against the facts about this machine, outside a run of pytest."""

from __future__ import annotations

from pathlib import Path

from gdrkit import inventory
from gdrkit.errors import Api
from gdrkit.harness.needs import cufile, gaudi, host, needs, possible_apis, software, verbs, without_twin

facts = inventory.probe()
# check() returns None if the machine meets the need, else the reason why it does not.
for need in (
    verbs.nic(count_min=2),
    gaudi.device(),
    host.memlock(1 << 20),
    host.open_files(256),
    host.capability("CAP_IPC_LOCK"),
    host.module("json"),
    host.program("sh"),
    host.variable("HOME"),
    host.device_file("/dev/null"),
    host.file_system("xfs"),
    software(Api.VERBS),
    without_twin(Api.CUDA),
):
    print(f"{need.name}: {need.check(facts) or 'met'}", *sorted(possible_apis(need)))

# needs(...) returns a pytest mark, with which a test declares its needs.
assert needs(host.module("json")).mark.args == (host.module("json"),)
print("udev knows the disk of this folder:", bool(cufile.find_udev_entry(Path.cwd())))
