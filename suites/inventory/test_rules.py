"""Each rule of the doctor that needs no experiment passes on a correct host, and fails if its cause is present."""

from __future__ import annotations

import gzip
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from inventory.healthy_machine import GPU_ADDRESS, make_machine
from inventory.rule_examples import (
    FAILING_EXAMPLES,
    HCA_FOLDER,
    NO_PEER_MEMORY_FILES,
    NO_RDMA_FILES,
    PASSING_EXAMPLES,
    PEER_MEMORY_CLIENT_FILE,
    make_failed_driver_open,
)

from gdrkit.errors import Reason
from gdrkit.inventory import (
    RULES,
    Finding,
    Recorder,
    captured_machine,
    diagnose,
    read_capture,
    rule_of,
    write_capture,
)
from gdrkit.units import MIB
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

# These rules need an experiment on devices. test_experiments.py tests them.
CODES_WITH_EXPERIMENT = {"p2p-one-way", "stale-key", "missing-flush"}
RULE_CODES = [rule.code for rule in RULES if rule.code not in CODES_WITH_EXPERIMENT]
# These rules do not apply to the correct host. For each of them, PASSING_EXAMPLES has a variant of the host on which
# the rule passes.
NOT_APPLICABLE_CODES = {"ats-off-in-vm", "driver-open"}


def apply_rule(root: Path, rule_code: str, changes: dict[str, Any]) -> Finding:
    """Return the finding of a rule on the correct host with changes."""
    return rule_of(rule_code).apply(make_machine(root, **changes))


@pytest.mark.parametrize("rule_code", [rule_code for rule_code in RULE_CODES if rule_code not in NOT_APPLICABLE_CODES])
def test_rule_passes_on_the_correct_host(tmp_path: Path, rule_code: str) -> None:
    finding = apply_rule(tmp_path, rule_code, {})
    assert (finding.verdict, finding.what_to_do) == (Verdict.PASS, ""), finding.text
    assert finding.read


@pytest.mark.parametrize(("rule_code", "example_name"), PASSING_EXAMPLES)
def test_rule_passes_on_a_variant(tmp_path: Path, rule_code: str, example_name: str) -> None:
    finding = apply_rule(tmp_path, rule_code, PASSING_EXAMPLES[rule_code, example_name])
    assert finding.verdict is Verdict.PASS, finding.text


@pytest.mark.parametrize(("rule_code", "example_name"), FAILING_EXAMPLES)
def test_rule_fails_on_a_variant(tmp_path: Path, rule_code: str, example_name: str) -> None:
    finding = apply_rule(tmp_path, rule_code, FAILING_EXAMPLES[rule_code, example_name])
    assert finding.verdict is Verdict.FAIL, finding.text
    assert finding.what_to_do == rule_of(rule_code).remedy
    assert finding.read or finding.text


def test_smallest_pool_of_bounce_buffers_counts(tmp_path: Path) -> None:
    """With these settings, cuFile 1.15 waited for ever in a batch of 65 reads of 64 KiB."""
    cufile_json = '{"properties": {"io_batchsize": 128, "posix_pool_slab_count": [128, 64, 64]}}'
    finding = apply_rule(tmp_path, "pool-starved", {"files": {"/etc/cufile.json": cufile_json}})
    assert (finding.verdict, "64 bounce buffers of one size" in finding.text) == (Verdict.UNPROVEN, True)


def test_missing_proc_modules_is_named(tmp_path: Path) -> None:
    """Without /proc/modules, cuFileDriverOpen of 1.15 to 1.20 did not return, with and without libcuda."""
    finding = apply_rule(tmp_path, "driver-open", FAILING_EXAMPLES["driver-open", "hangs"])
    assert "there is no /proc/modules" in finding.text
    assert ("/proc/modules", "does not exist") in {(reading.where, reading.what) for reading in finding.read}


def test_bar1_beyond_the_direct_map_is_undecided(tmp_path: Path) -> None:
    """The fix (Linux commit 7ffb791423c7) was backported, so the version does not show whether a kernel has the fix."""
    files = PASSING_EXAMPLES["kaslr-p2pdma", "a large padding"]["files"] | {
        "/boot/config-6.8.0-60-generic": "CONFIG_RANDOMIZE_MEMORY=y\nCONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING=0x28\n"
    }
    finding = apply_rule(tmp_path, "kaslr-p2pdma", {"files": files})
    # 2 TiB of memory and 40 TiB of padding end where BAR1 begins.
    assert (finding.verdict, "first 42 TiB" in finding.text) == (Verdict.UNPROVEN, True), finding.text


def test_configuration_of_the_kernel_is_decompressed_in_part(tmp_path: Path) -> None:
    """A capture may hold 64 MiB of text in 64 KiB of gzip data."""
    kernel_config = b"CONFIG_RANDOMIZE_MEMORY=y\nCONFIG_RANDOMIZE_MEMORY_PHYSICAL_PADDING=0x28\n" + bytes(64 * MIB)
    changed_files = {"/boot/config-6.8.0-60-generic": None, "/proc/config.gz": gzip.compress(kernel_config)}
    files = PASSING_EXAMPLES["kaslr-p2pdma", "a large padding"]["files"] | changed_files
    changed_host = make_machine(tmp_path, files=files)
    tracemalloc.start()
    try:
        finding = rule_of("kaslr-p2pdma").apply(changed_host)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "first 42 TiB" in finding.text
    assert peak_bytes < 32 * MIB


def test_p2pmem_folder_without_memory_proves_no_mapping(tmp_path: Path) -> None:
    """Linux creates p2pmem, then maps the memory, and keeps p2pmem if the mapping fails (pci_p2pdma_add_resource)."""
    changes = PASSING_EXAMPLES["kaslr-p2pdma", "P2PDMA has mapped BAR1"]
    files = {name: "0\n" if name.endswith("/p2pmem/size") else text for name, text in changes["files"].items()}
    finding = apply_rule(tmp_path, "kaslr-p2pdma", {"files": files})
    assert finding.verdict is Verdict.UNPROVEN, finding.text


def test_call_that_never_returned_shows_no_descriptor_0(tmp_path: Path) -> None:
    changes = {"files": {"/dev/nvidia-fs0": None}, "observations": make_failed_driver_open(Reason.TIMEOUT)}
    assert apply_rule(tmp_path, "cufile-descriptor-0", changes).verdict is Verdict.FAIL


@pytest.mark.parametrize("relative_path", ["memory_peers/amdkfd/version", "holders/ib_uverbs", "none"])
def test_peermem_that_nothing_lists_is_undecided(tmp_path: Path, relative_path: str) -> None:
    """A loaded module was built with support for peer memory: without it, nv_mem_client_init() returns EINVAL."""
    parent_folder = {"memory_peers/amdkfd/version": "/sys/kernel/mm", "holders/ib_uverbs": "/sys/module/ib_core"}.get(
        relative_path
    )
    changes = {
        "files": {PEER_MEMORY_CLIENT_FILE: None} | ({f"{parent_folder}/{relative_path}": ""} if parent_folder else {}),
        "facts": {"routes": ()},
    }
    finding = apply_rule(tmp_path, "peermem-refused", changes)
    assert (finding.verdict, "nvidia_peermem is loaded" in finding.text) == (Verdict.UNPROVEN, True), finding.text


@pytest.mark.parametrize("facts", [{}, {"routes": ()}])
def test_old_firmware_alone_is_undecided(tmp_path: Path, facts: dict[str, Any]) -> None:
    """Old firmware and an unloaded nvidia_peermem have the same effect, but different remedies."""
    changes = {
        "files": NO_PEER_MEMORY_FILES | {f"{HCA_FOLDER}/fw_ver": "28.34.1002\n"},
        "working_registration_methods": (),
    }
    finding = apply_rule(tmp_path, "nic-too-old", changes | {"facts": facts})
    assert (finding.verdict, "28.34.1002" in finding.text) == (Verdict.UNPROVEN, True), finding.text


def test_old_nic_beside_a_newer_one_is_undecided(tmp_path: Path) -> None:
    changes = FAILING_EXAMPLES["nic-too-old", "ConnectX-3 Pro"]
    files = changes["files"] | {"/sys/class/infiniband/mlx5_1/hca_type": "MT4129\n"}
    assert apply_rule(tmp_path, "nic-too-old", changes | {"files": files}).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize(
    ("rule_code", "example_name"),
    [key for key in FAILING_EXAMPLES if key[0] == "gpu-too-old"],
)
def test_old_gpu_without_a_nic_is_not_judged(tmp_path: Path, rule_code: str, example_name: str) -> None:
    """A machine with an old GPU or driver, nvidia-fs and no RDMA device has no defect."""
    changes = FAILING_EXAMPLES[rule_code, example_name]
    changes = changes | {
        "files": changes.get("files", {}) | NO_RDMA_FILES,
        "links": {f"{HCA_FOLDER}/device": None},
        "facts": changes.get("facts", {}) | {"verbs": None},
    }
    finding = apply_rule(tmp_path, rule_code, changes)
    assert (finding.verdict, finding.text) == (Verdict.NOT_RUN, "no RDMA device here")


@pytest.mark.parametrize(("rule_code", "example_name"), [key for key in FAILING_EXAMPLES if key[0] == "nic-too-old"])
def test_old_nic_without_a_gpu_is_not_judged(tmp_path: Path, rule_code: str, example_name: str) -> None:
    """A storage server with an old NIC and no GPU has no defect."""
    changes = FAILING_EXAMPLES[rule_code, example_name]
    changes = changes | {
        "links": changes.get("links", {}) | {f"/sys/bus/pci/devices/{GPU_ADDRESS}": None},
        "facts": {"cuda": None, "routes": ()},
    }
    finding = apply_rule(tmp_path, rule_code, changes)
    assert (finding.verdict, finding.text) == (Verdict.NOT_RUN, "no GPU here")


def test_every_rule_has_a_passing_and_a_failing_tree(capsys: pytest.CaptureFixture[str]) -> None:
    passing_codes = {rule_code for rule_code, _ in PASSING_EXAMPLES} | (set(RULE_CODES) - NOT_APPLICABLE_CODES)
    failing_codes = {rule_code for rule_code, _ in FAILING_EXAMPLES}
    with capsys.disabled():
        print("\npassing trees:", *sorted(passing_codes))  # noqa: T201 - for the reader of the log.
        print("failing trees:", *sorted(failing_codes))  # noqa: T201
    assert passing_codes == failing_codes == set(RULE_CODES)


@pytest.mark.parametrize(("rule_code", "example_name"), FAILING_EXAMPLES)
def test_cause_is_found_on_a_replayed_capture(tmp_path: Path, rule_code: str, example_name: str) -> None:
    faulty_host = make_machine(tmp_path / "host", **FAILING_EXAMPLES[rule_code, example_name])
    faulty_host = replace(faulty_host, files=Recorder(faulty_host.files))
    finding = rule_of(rule_code).apply(faulty_host)
    write_capture(tmp_path / "capture.json", faulty_host.capture())
    replayed_machine = captured_machine(read_capture(tmp_path / "capture.json"))
    assert (finding.verdict, rule_of(rule_code).apply(replayed_machine)) == (Verdict.FAIL, finding)


def test_replayed_capture_of_the_correct_host_is_silent(tmp_path: Path) -> None:
    correct_host = make_machine(tmp_path / "host")
    correct_host = replace(correct_host, files=Recorder(correct_host.files))
    diagnose(correct_host)
    write_capture(tmp_path / "capture.json", correct_host.capture())
    diagnosis = diagnose(captured_machine(read_capture(tmp_path / "capture.json")))
    assert not diagnosis.findings_with(Verdict.FAIL)
    assert {finding.code for finding in diagnosis.findings_with(Verdict.UNPROVEN)} <= NOT_APPLICABLE_CODES


def test_every_rule_has_its_own_code_and_texts() -> None:
    assert len({rule.code for rule in RULES}) == len(RULES)
    assert all(rule.title and rule.why and rule.remedy and rule.reads for rule in RULES)


def test_machine_without_devices_has_no_cause(tmp_path: Path) -> None:
    from gdrkit.evidence import KernelLog
    from gdrkit.host import DiskFiles, HostTree
    from gdrkit.inventory import Machine, probe

    facts = probe(HostTree(tmp_path), environment={}, query_apis=False)
    machine_without_devices = Machine(
        files=DiskFiles(tmp_path), facts=facts, kernel_log=KernelLog((), None), environment={}
    )
    diagnosis = diagnose(machine_without_devices)
    assert {finding.verdict for finding in diagnosis.findings} == {Verdict.NOT_RUN}
    assert len(diagnosis.missing) == 6


def test_unreadable_files_are_reported_and_not_judged(tmp_path: Path) -> None:
    root = tmp_path / "host"
    healthy_host = make_machine(root)
    for port_address in ("0000:02:00.0", "0000:02:01.0", "0000:02:02.0"):
        # An ordinary user can read only the header.
        config_path = root / f"sys/bus/pci/devices/{port_address}/config"
        config_path.write_bytes(config_path.read_bytes()[:64])
    (root / "run/udev/data/b259:1").unlink()
    (root / "run/udev/data/b259:1").mkdir()  # A folder cannot be read as a file.
    finding = rule_of("acs-redirect").apply(healthy_host)
    assert finding.verdict is Verdict.NOT_RUN
    assert "cannot be read" in finding.text
    assert rule_of("acs-redirect").privilege
    assert "/run/udev/data/b259:1" in {unreadable_file.path for unreadable_file in diagnose(healthy_host).unreadable}
