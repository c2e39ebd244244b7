"""Every rule of the doctor that reads passes on a host in good order, and fails where its cause is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.machines import machine
from support.rule_trees import FAILING, PASSING

from gdrkit.inventory import RULES, Finding, diagnose, rule_of
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

# They are shown by a fault plan, in test_acting_rules.py.
ACTING = {"p2p-one-way", "stale-key", "missing-flush"}
READING = [rule.code for rule in RULES if rule.code not in ACTING]
# Passing in the host in good order would need something that such a host has not.
ELSEWHERE = {"ats-off-in-vm", "driver-open"}


def found(root: Path, code: str, different: dict[str, Any]) -> Finding:
    """What one rule says of the host in good order, but for this."""
    return rule_of(code).apply(machine(root, **different))


@pytest.mark.parametrize("code", [code for code in READING if code not in ELSEWHERE])
def test_a_host_in_good_order_has_no_cause(tmp_path: Path, code: str) -> None:
    finding = found(tmp_path, code, {})
    assert (finding.verdict, finding.what_to_do) == (Verdict.PASS, ""), finding.text
    assert finding.read


@pytest.mark.parametrize(("code", "name"), PASSING)
def test_it_passes_where(tmp_path: Path, code: str, name: str) -> None:
    finding = found(tmp_path, code, PASSING[code, name])
    assert finding.verdict is Verdict.PASS, finding.text


@pytest.mark.parametrize(("code", "name"), FAILING)
def test_it_fails_where(tmp_path: Path, code: str, name: str) -> None:
    finding = found(tmp_path, code, FAILING[code, name])
    assert finding.verdict is Verdict.FAIL, finding.text
    assert finding.what_to_do == rule_of(code).remedy
    assert finding.read or finding.text


def test_a_pool_is_judged_by_its_smallest_number(tmp_path: Path) -> None:
    """With these, which are the defaults, cuFile 1.15 waited for ever in a batch of 65 reads of 64 KiB."""
    numbers = '{"properties": {"io_batchsize": 128, "posix_pool_slab_count": [128, 64, 64]}}'
    finding = found(tmp_path, "pool-starved", {"files": {"/etc/cufile.json": numbers}})
    assert (finding.verdict, "64 bounce buffers of one size" in finding.text) == (Verdict.UNPROVEN, True)


def test_what_libcufile_reads_for_ever_is_named(tmp_path: Path) -> None:
    """Without /proc/modules cuFileDriverOpen of 1.15 to 1.20 did not come back, with a libcuda or without."""
    finding = found(tmp_path, "driver-open", FAILING["driver-open", "hangs"])
    assert "there is no /proc/modules" in finding.text
    assert ("/proc/modules", "not there") in {(reading.where, reading.what) for reading in finding.read}


def test_no_rule_lacks_a_passing_or_a_failing_tree(capsys: pytest.CaptureFixture[str]) -> None:
    passing = {code for code, _ in PASSING} | (set(READING) - ELSEWHERE)
    failing = {code for code, _ in FAILING}
    with capsys.disabled():
        print("\npassing trees:", *sorted(passing))  # noqa: T201 - both lists are to be seen.
        print("failing trees:", *sorted(failing))  # noqa: T201
    assert passing == failing == set(READING)


def test_there_is_a_rule_for_every_known_cause() -> None:
    # The 32 that are known from the trackers of others, and the missing udev database.
    assert len({rule.code for rule in RULES}) == len(RULES) == 33
    assert all(rule.title and rule.why and rule.remedy and rule.reads for rule in RULES)


def test_a_machine_without_anything_has_no_cause_and_names_what_is_missing(tmp_path: Path) -> None:
    from gdrkit.evidence import KernelLog
    from gdrkit.host import DiskFiles, HostTree
    from gdrkit.inventory import Machine, probe

    facts = probe(HostTree(tmp_path), environment={}, ask_apis=False)
    bare = Machine(files=DiskFiles(tmp_path), facts=facts, kernel_log=KernelLog((), None), environment={})
    diagnosis = diagnose(bare)
    assert {finding.verdict for finding in diagnosis.findings} == {Verdict.NOT_RUN}
    assert len(diagnosis.missing) == 6


def test_what_may_not_be_read_is_said_and_judged_by_nobody(tmp_path: Path) -> None:
    root = tmp_path / "host"
    host = machine(root)
    for port in ("0000:02:00.0", "0000:02:01.0", "0000:02:02.0"):
        # As an ordinary user has it: the header and nothing behind.
        config = root / f"sys/bus/pci/devices/{port}/config"
        config.write_bytes(config.read_bytes()[:64])
    (root / "run/udev/data/b259:1").unlink()
    (root / "run/udev/data/b259:1").mkdir()
    finding = rule_of("acs-redirect").apply(host)
    assert finding.verdict is Verdict.NOT_RUN
    assert "cannot be read" in finding.text
    assert rule_of("acs-redirect").privilege
    assert "/run/udev/data/b259:1" in {item.path for item in diagnose(host).unreadable}
