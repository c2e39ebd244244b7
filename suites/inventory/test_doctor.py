"""The commands doctor, topology and explain: their text, JSON and exit codes.

Some cases apply the remedy that the doctor prints, and require that the doctor then finds no cause.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from inventory.healthy_machine import make_machine
from inventory.rule_examples import FAILING_EXAMPLES
from support.other_user import UNPRIVILEGED_DOCTOR, run_program

from gdrkit import serialization
from gdrkit.cli import main
from gdrkit.harness.needs import host, needs
from gdrkit.host import HostTree, Limits, process_limits
from gdrkit.inventory import RULES, Recorder, diagnose, rule_of, topology, write_capture
from gdrkit.report.doctor import describe_diagnosis, describe_rule, list_rules, rules_document
from gdrkit.report.topology import describe_topology
from gdrkit.verdict import Verdict

PRINT_UNPRIVILEGED_LIMITS_PROGRAM = """
import json, resource
from gdrkit import serialization
from gdrkit.host import HostTree, Limits, process_limits
from support.other_user import become_unprivileged
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
become_unprivileged()
print(json.dumps(serialization.to_json_data(process_limits(HostTree()))))
"""


def run_gdrkit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run a command, and return its exit code and output."""
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    return int(exit_info.value.code or 0), capsys.readouterr().out


def test_doctor_leaves_no_file_in_the_current_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gdrkit", "doctor", "--json"]
    process = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=110)
    assert process.stdout, process.stderr
    diagnosis = json.loads(process.stdout)
    failed_findings = [finding for finding in diagnosis["findings"] if finding["verdict"] == "fail"]
    missing_text = " ".join(diagnosis["missing"])
    # The exit code 4 means that the machine has neither a GPU nor an RDMA device.
    assert process.returncode == (4 if "GPU" in missing_text and "RDMA" in missing_text else int(bool(failed_findings)))
    assert list(tmp_path.iterdir()) == []


@needs(host.capability("CAP_SETUID"), host.package_for_all_users)
def test_doctor_names_what_an_ordinary_user_cannot_read() -> None:
    process = run_program(UNPRIVILEGED_DOCTOR)
    assert process.returncode in (0, 1, 4), process.stderr
    assert "Not readable without a privilege" in process.stdout
    assert "config space beyond 64 bytes needs CAP_SYS_ADMIN (acs-redirect" in process.stdout
    assert "Traceback" not in process.stdout + process.stderr


def test_json_and_text_have_the_same_findings(tmp_path: Path) -> None:
    diagnosis = diagnose(make_machine(tmp_path, **FAILING_EXAMPLES["acs-redirect", "a port of the switch"]))
    description = describe_diagnosis(diagnosis)
    diagnosis_data = json.loads(diagnosis.to_json())
    assert [finding["code"] for finding in diagnosis_data["findings"] if finding["verdict"] == "fail"] == [
        "acs-redirect"
    ]
    assert "Present (1):" in description
    assert "ACSCtl of 0000:02:00.0: SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+" in description
    assert "To do: switch off ACS" in description


def test_exit_code_is_1_if_a_cause_is_present(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for host_name, changes, expected_exit_code in (
        ("correct", {}, 0),
        ("failing", FAILING_EXAMPLES["acs-redirect", "a port of the switch"], 1),
    ):
        synthetic_host = make_machine(tmp_path / host_name, **changes)
        synthetic_host = replace(synthetic_host, files=Recorder(synthetic_host.files))
        diagnose(synthetic_host)
        write_capture(tmp_path / f"{host_name}.json", synthetic_host.capture())
        replay_arguments = ("doctor", "--replay", str(tmp_path / f"{host_name}.json"))
        assert run_gdrkit(capsys, *replay_arguments)[0] == expected_exit_code
        assert run_gdrkit(capsys, *replay_arguments, "--any")[0] == 0
    assert run_gdrkit(capsys, "doctor", "--replay", "/no/such/file")[0] == 2


def test_exit_code_is_4_without_gpu_and_nic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders: dict[str, list[str]] = {"/sys/bus/pci/devices": [], "/sys/class/infiniband": []}
    capture = {"schema_version": 1, "origin": "a case", "answers": {"folders": folders}}
    (tmp_path / "bare.json").write_text(json.dumps(capture))
    replay_arguments = ("doctor", "--replay", str(tmp_path / "bare.json"))
    exit_code, output = run_gdrkit(capsys, *replay_arguments)
    assert (exit_code, "no RDMA device" in output) == (4, True)
    assert run_gdrkit(capsys, *replay_arguments, "--any") == (0, output)


def test_explain_as_json_has_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, output = run_gdrkit(capsys, "explain", "--json")
    rules = json.loads(output)
    assert (exit_code, [rule["code"] for rule in rules]) == (0, [rule.code for rule in RULES])
    assert {rule["code"] for rule in rules if rule["acts"]} == {rule.code for rule in RULES if rule.experiment}
    exit_code, output = run_gdrkit(capsys, "explain", "udev-database", "--json")
    assert (exit_code, json.loads(output)) == (0, next(rule for rule in rules if rule["code"] == "udev-database"))
    assert run_gdrkit(capsys, "explain", "nonsense", "--json")[0] == 2


def test_explain_lists_and_describes_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_gdrkit(capsys, "explain")[1].splitlines()
    assert [line.split()[0] for line in lines] == [rule.code for rule in RULES]
    assert lines == list_rules(RULES).splitlines()
    for rule in RULES:
        description = describe_rule(rule)
        assert all(word in description for word in (rule.code, rule.title, "Why it matters", "What to do", "Reads"))
    assert run_gdrkit(capsys, "explain", "udev-database")[1].startswith("udev-database: no udev database")
    assert run_gdrkit(capsys, "explain", "nonsense")[0] == 2


def test_document_contains_every_rule() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
    if document.is_file():  # The wheel contains the suites, but no documents.
        assert rules_document(RULES) in document.read_text()


def test_topology_text_has_devices_and_distances(tmp_path: Path) -> None:
    description = describe_topology(topology(make_machine(tmp_path)))
    assert "NIC mlx5_0 0000:04:00.0" in description
    assert re.search(r"GPU0: PIX mlx5_0, nvme0", description)
    assert "PIX     below one PCIe switch" in description


def test_remedy_of_a_missing_udev_database_works(tmp_path: Path) -> None:
    faulty_host = make_machine(tmp_path, **FAILING_EXAMPLES["udev-database", "none"])
    rule = rule_of("udev-database")
    assert rule.apply(faulty_host).verdict is Verdict.FAIL
    # The remedy names a file and lines. The case writes these lines into that file.
    lines = re.findall(r"E:ID_FS_\w+=\w+", rule.remedy)
    (tmp_path / "run/udev/data").mkdir(parents=True)
    (tmp_path / "run/udev/data/b259:1").write_text("\n".join(lines) + "\n")
    assert rule.apply(faulty_host).verdict is Verdict.PASS


@pytest.mark.parametrize("example_name", ["forced", "few slabs"])
def test_remedy_in_cufile_json_works(tmp_path: Path, example_name: str) -> None:
    rule_code = next(rule_code for rule_code, failing_name in FAILING_EXAMPLES if failing_name == example_name)
    faulty_host, rule = make_machine(tmp_path, **FAILING_EXAMPLES[rule_code, example_name]), rule_of(rule_code)
    assert rule.apply(faulty_host).verdict is Verdict.FAIL
    # These settings follow the remedies of both rules.
    settings = {
        "force_compat_mode": False,
        "allow_compat_mode": False,
        "io_batchsize": 16,
        "posix_pool_slab_count": [16],
    }
    assert all(
        key in rule.remedy for key in (["force_compat_mode"] if example_name == "forced" else ["posix_pool_slab_count"])
    )
    (tmp_path / "etc/cufile.json").write_text(json.dumps({"properties": settings}))
    assert rule.apply(faulty_host).verdict is Verdict.PASS


@needs(host.capability("CAP_SETUID"), host.capability("CAP_IPC_LOCK"))
def test_remedy_of_a_low_memlock_limit_works(tmp_path: Path) -> None:
    healthy_host, rule = make_machine(tmp_path), rule_of("memlock-low")
    process = run_program(PRINT_UNPRIVILEGED_LIMITS_PROGRAM)
    assert process.returncode == 0, process.stderr
    # The kernel reports both limits: for a user without the capability, and for this process, which has the capability.
    for limits, verdict in (
        (serialization.from_json_data(Limits, json.loads(process.stdout)), Verdict.FAIL),
        (process_limits(HostTree()), Verdict.PASS),
    ):
        assert rule.apply(replace(healthy_host, facts=replace(healthy_host.facts, limits=limits))).verdict is verdict
    assert "CAP_IPC_LOCK" in rule.remedy
