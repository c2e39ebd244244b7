"""Tests of the rules of ``gdrkit doctor`` that run an experiment on devices.

Each rule passes on correct libraries. It fails under a fault plan, with which the software twins emulate the problem
that the rule detects.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from inventory.rule_examples import FAILING_EXAMPLES, PASSING_EXAMPLES
from support import udev

from gdrkit import launch, serialization
from gdrkit.evidence import KernelLog
from gdrkit.harness.needs import cufile, needs, software
from gdrkit.host import DiskFiles
from gdrkit.inventory import RULES, Capture, Machine, captured_machine, rule_of
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.inventory import Facts

pytestmark = needs(software("verbs"), software("cuda"), software("cufile"), cufile.udev_present)


@dataclass(frozen=True)
class FailingCase:
    """A line of a fault plan, a part of the expected finding, and the time limit of the experiment."""

    fault_line: str
    expected_text: str
    timeout_s: float = 60


# The key is the code of the rule and the name of the case. Each delay (delay_us) is longer than the time limit of its
# experiment. The statuses are IBV_WC_REM_ACCESS_ERR (10), CUDA_ERROR_INVALID_CONTEXT (201), CUDA_ERROR_NOT_SUPPORTED
# (801) and CU_FILE_DRIVER_VERSION_MISMATCH (5004).
FAILING_CASES = {
    ("p2p-one-way", "an error"): FailingCase("wc.rdma_read call=* status=10", "RDMA READ from GPU 0"),
    ("p2p-one-way", "a hang"): FailingCase("ibv_post_send call=1 delay_us=10000000", "no result within 2 s", 2),
    ("stale-key", "an error"): FailingCase("cuPointerGetAttribute call=* status=201", "cuPointerGetAttribute"),
    ("missing-flush", "an error"): FailingCase(
        "cuFlushGPUDirectRDMAWrites call=* status=801", "cuFlushGPUDirectRDMAWrites"
    ),
    ("driver-open", "an error"): FailingCase("cuFileDriverOpen call=* status=5004", "cuFileDriverOpen"),
    ("driver-open", "a hang"): FailingCase("cuFileDriverOpen call=* delay_us=10000000", "did not return", 2),
    ("pool-starved", "a hang"): FailingCase("cufile.batch_io call=2 delay_us=10000000", "did not complete", 2),
}
CODES_WITH_CASES = list(dict.fromkeys(rule_code for rule_code, _ in FAILING_CASES))


@pytest.fixture
def machine(facts: Facts) -> Iterator[Machine]:
    """Yield the machine on which this test runs. The rules may run experiments on it."""
    this_machine = Machine(
        files=DiskFiles(),
        facts=facts,
        kernel_log=KernelLog((), None),
        environment={},
        may_run_experiments=True,
        timeout_s=60,
    )
    with udev.provide_entry(cufile.DISK_FOLDER):
        yield this_machine


@contextmanager
def set_fault_plan(monkeypatch: pytest.MonkeyPatch, folder: Path, fault_line: str) -> Iterator[None]:
    """Set a fault plan with this one line for the child processes that are started in the block."""
    plan_path = folder / "plan"
    plan_path.write_text(f"gdrkit-faults 1\n{fault_line}\n")
    with monkeypatch.context() as patch:
        for name, value in launch.environment(
            launch.Launch(twin_apis=launch.APIS_WITH_TWINS, seed=7, faults=plan_path)
        ).items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        yield


def test_correct_libraries_pass_here_and_in_a_capture(machine: Machine) -> None:
    findings = {rule_code: rule_of(rule_code).apply(machine) for rule_code in CODES_WITH_CASES}
    verdicts = {rule_code: finding.verdict for rule_code, finding in findings.items()}
    assert verdicts == dict.fromkeys(CODES_WITH_CASES, Verdict.PASS), findings
    assert "128 reads of 65536 bytes in one batch: 128 COMPLETE" in findings["pool-starved"].text
    # The capture contains the results of the experiments, so each rule reaches the same verdict without the devices.
    machine_of_capture = captured_machine(
        serialization.from_json_data(Capture, serialization.to_json_data(machine.capture()))
    )
    for rule_code, finding in findings.items():
        assert rule_of(rule_code).apply(machine_of_capture).verdict is finding.verdict


@pytest.mark.parametrize(("rule_code", "case_name"), FAILING_CASES)
def test_rule_fails_under_a_fault_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule_code: str, case_name: str
) -> None:
    case = FAILING_CASES[rule_code, case_name]
    with set_fault_plan(monkeypatch, tmp_path, case.fault_line):
        finding = rule_of(rule_code).apply(replace(machine, timeout_s=case.timeout_s, observations={}))
    assert finding.verdict is Verdict.FAIL, finding.text
    assert case.expected_text in finding.text


def test_every_experiment_has_a_passing_and_a_failing_case(capsys: pytest.CaptureFixture[str]) -> None:
    codes_with_experiment = {rule.code for rule in RULES if rule.experiment}
    # No fault plan emulates a PCIe link that slows down. For that experiment, rule_examples.py has example results.
    codes_with_examples = (
        {rule_code for rule_code, _ in FAILING_EXAMPLES}
        & {rule_code for rule_code, _ in PASSING_EXAMPLES}
        & codes_with_experiment - set(CODES_WITH_CASES)
    )
    with capsys.disabled():
        print("\nrules with cases on twins and fault plans:", *sorted(CODES_WITH_CASES))  # noqa: T201 - for the reader of the log.
        print("rules with examples of results:", *sorted(codes_with_examples))  # noqa: T201
    assert set(CODES_WITH_CASES) | codes_with_examples == codes_with_experiment
