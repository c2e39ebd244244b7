"""Duration of `gdrkit doctor` with the real libraries of the machine. The goal is less than a second without hardware.

The cases measure the command with and without the checks that act on devices, and as an unprivileged user. The
duration is meaningful only on an idle machine or with a real-time priority (`chrt -f 1`). So the record has the
scheduling policy and the load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.other_user import UNPRIVILEGED_DOCTOR, make_program_command

from gdrkit import launch
from gdrkit.harness.needs import host, needs
from gdrkit.inventory.rules import RULES

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from gdrkit.harness.evidence import Evidence

SCHEDULING_POLICY_NAMES = {os.SCHED_OTHER: "other", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr", os.SCHED_BATCH: "batch"}


def measure_doctor(
    benchmark: BenchmarkFixture, evidence: Evidence, command: list[str], environ: dict[str, str]
) -> None:
    """Measure a command that runs the doctor. Each run must exit with a code of the doctor and print its summary."""
    policy = os.sched_getscheduler(0)
    evidence["scheduling"] = SCHEDULING_POLICY_NAMES.get(policy, str(policy))
    evidence.number("load_1min_count", os.getloadavg()[0])
    rounds_count = 9 if benchmark.enabled else 1

    def run() -> None:
        completed = subprocess.run(
            command, env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=100
        )
        # The doctor exits with 0 (no cause was found), 1 (a cause was found) or 4 (no GPU and no NIC).
        assert completed.returncode in (0, 1, 4), completed.stderr
        assert f"{len(RULES)} known causes: " in completed.stdout

    benchmark.pedantic(run, rounds=rounds_count, warmup_rounds=int(benchmark.enabled))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("command", ["doctor", "doctor --read-only"])
def test_doctor(benchmark: BenchmarkFixture, evidence: Evidence, command: str) -> None:
    environ = launch.environment(launch.Launch(twin_apis=frozenset()))
    measure_doctor(benchmark, evidence, [sys.executable, "-m", "gdrkit", *command.split()], environ)


@needs(host.capability("CAP_SETUID"), host.package_for_all_users)
def test_doctor_as_an_unprivileged_user(benchmark: BenchmarkFixture, evidence: Evidence) -> None:
    command, environ = make_program_command(
        UNPRIVILEGED_DOCTOR, launch.environment(launch.Launch(twin_apis=frozenset()))
    )
    measure_doctor(benchmark, evidence, command, environ)
