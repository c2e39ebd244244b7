"""Rules with experiments: each passes on correct libraries and fails under a fault plan that emulates its cause."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from inventory.rule_examples import FAILING, PASSING
from support import udev

from gdrkit import launch, serialization
from gdrkit.evidence import KernelLog
from gdrkit.harness.needs import cufile, needs, software
from gdrkit.host import DiskFiles
from gdrkit.inventory import RULES, Capture, Machine, replayed, rule_of
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.inventory import Facts

pytestmark = needs(software("verbs"), software("cuda"), software("cufile"), cufile.udev_present)


@dataclass(frozen=True)
class FailingCase:
    """A rule of a fault plan, a part of the expected finding, and the time limit of the experiment."""

    fault: str
    text: str
    timeout_s: float = 60


# A delayed call takes longer than the time limit of the experiment.
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
CODES = list(dict.fromkeys(code for code, _ in FAILING_CASES))


@pytest.fixture
def machine(facts: Facts) -> Iterator[Machine]:
    """The machine of this run, on which experiments may run."""
    this_machine = Machine(
        files=DiskFiles(),
        facts=facts,
        kernel_log=KernelLog((), None),
        environment={},
        may_run_experiments=True,
        timeout_s=60,
    )
    with udev.present(cufile.DISK):
        yield this_machine


@contextmanager
def faults(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str) -> Iterator[None]:
    """Set a fault plan for the children that are started in the block."""
    plan = folder / "plan"
    plan.write_text(f"gdrkit-faults 1\n{fault}\n")
    with monkeypatch.context() as patch:
        for name, value in launch.environment(launch.Launch(software=launch.TWINNED, seed=7, faults=plan)).items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        yield


def test_correct_libraries_pass_here_and_in_a_capture(machine: Machine) -> None:
    findings = {code: rule_of(code).apply(machine) for code in CODES}
    verdicts = {code: finding.verdict for code, finding in findings.items()}
    assert verdicts == dict.fromkeys(CODES, Verdict.PASS), findings
    assert "64 reads of 65536 bytes in one batch: 64 COMPLETE" in findings["pool-starved"].text
    # The capture contains the observations, from which a rule gets the same verdict.
    captured = replayed(serialization.from_json_data(Capture, serialization.to_json_data(machine.capture())))
    for code, finding in findings.items():
        assert rule_of(code).apply(captured).verdict is finding.verdict


@pytest.mark.parametrize(("code", "variant"), FAILING_CASES)
def test_rule_fails_under_a_fault_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, variant: str
) -> None:
    case = FAILING_CASES[code, variant]
    with faults(monkeypatch, tmp_path, case.fault):
        finding = rule_of(code).apply(replace(machine, timeout_s=case.timeout_s, observations={}))
    assert finding.verdict is Verdict.FAIL, finding.text
    assert case.text in finding.text


def test_every_experiment_has_a_passing_and_a_failing_case(capsys: pytest.CaptureFixture[str]) -> None:
    with_experiment = {rule.code for rule in RULES if rule.experiment}
    # Only hardware has links that become slower. The result of that experiment is part of the trees.
    by_tree = {code for code, _ in FAILING} & {code for code, _ in PASSING} & with_experiment - set(CODES)
    with capsys.disabled():
        print("\ncases with twins and fault plans:", *sorted(CODES))  # noqa: T201 - for the reader of the log.
        print("cases with trees of files:", *sorted(by_tree))  # noqa: T201
    assert set(CODES) | by_tree == with_experiment
