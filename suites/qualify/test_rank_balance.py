"""Rounds of `gdrkit qualify --mpi`: all hosts transfer at once, in a ring or permutation, and slow pairs are named."""

from __future__ import annotations

import os
import shlex
import signal
from typing import TYPE_CHECKING, Any, cast

import pytest
from qualify.mpi_job import GDRKIT_COMMAND, run_job_on_four_machines
from qualify.test_ranks import NEEDS_TWO_MACHINES, make_rank_facts

from gdrkit.qualify.ranks.pairs import plan_rounds
from gdrkit.report import Record, RunFolder, Verdict, read_records

if TYPE_CHECKING:
    from pathlib import Path

# A case slows this rank down or kills it.
FAULTY_RANK = 2


def get_rank_pair(record: Record) -> tuple[int, int]:
    """Return the initiator and the target of the pair of a record."""
    pair = cast("dict[str, int]", record.evidence["pair"])
    return pair["initiator"], pair["target"]


def test_each_host_is_initiator_and_target_once_in_a_round() -> None:
    ranks = [
        make_rank_facts(0, "a"),
        make_rank_facts(1, "a"),
        make_rank_facts(2, "b"),
        make_rank_facts(3, "c"),
        make_rank_facts(4, "d", nic_count=1),
    ]
    pairs_by_round = {
        planned_round.name: [(pair.initiator, pair.target) for pair in planned_round.pairs]
        for planned_round in plan_rounds(ranks)
    }
    assert pairs_by_round == {
        "ring-rail0": [(0, 2), (2, 3), (3, 4), (4, 0)],
        "permutation-rail0": [(0, 3), (2, 4), (3, 0), (4, 2)],
    }


def test_two_hosts_have_no_balance() -> None:
    assert plan_rounds([make_rank_facts(0, "a"), make_rank_facts(1, "b"), make_rank_facts(2, "c", gpu_count=0)]) == ()


@NEEDS_TWO_MACHINES
@pytest.mark.timeout(300)
def test_slow_pair_among_four_hosts_is_named(tmp_path: Path) -> None:
    """Fault plans delay the completions of all ranks, so that the rates do not depend on the speed of the CPUs."""
    for plan_name, delay_us in (("normal_plan", 1000), ("slow_plan", 8000)):
        rules = [f"wc.{request} call=* delay_us={delay_us}" for request in ("rdma_write", "rdma_read")]
        (tmp_path / plan_name).write_text("\n".join(["gdrkit-faults 1", *rules, ""]))
    program_path = tmp_path / "program"
    program_path.write_text(f"""#!/bin/sh
plan=normal_plan
test "$OMPI_COMM_WORLD_RANK" = {FAULTY_RANK} && plan=slow_plan
export GDRKIT_TWINS_FAULTS={shlex.quote(str(tmp_path))}/$plan
# The software twins (libraries that emulate the hardware) have port counters only below `gdrkit run`.
exec {shlex.join(GDRKIT_COMMAND)} run --software --isolated --quiet -- {shlex.join(GDRKIT_COMMAND)} "$@"
""")
    program_path.chmod(0o700)
    # Without random delays, only the fault plans delay completions.
    variables = {"GDRKIT_TWINS_LATE_US": "0"}
    with run_job_on_four_machines(tmp_path / "out", command=(str(program_path),), variables=variables) as job:
        job.wait_for_line("Report: ")
        exit_code = job.wait()
    run_folder = RunFolder(tmp_path / "out")
    records = [record for record in read_records(run_folder.records) if record.case.startswith("balance/")]
    assert (exit_code, len(records)) == (0, 8)
    slow_records = [record for record in records if record.verdict is Verdict.UNPROVEN]
    # The completions of the initiator are delayed, so the pairs of which FAULTY_RANK is the target are not slow.
    assert {get_rank_pair(record) for record in slow_records} == {(FAULTY_RANK, 3), (FAULTY_RANK, 0)}
    # The host names of a job begin with gk.
    assert all(f"slow pair: rank {FAULTY_RANK} (gk" in record.reasons[0].text for record in slow_records)
    assert all(record.verdict is Verdict.PASS for record in records if record not in slow_records)
    for record in records:
        port_growth = cast("dict[str, dict[str, int]]", record.evidence["port_growth"])
        expected_bytes_by_role = cast("dict[str, int]", record.evidence["port_bytes_expected"])
        assert record.evidence["unproven"] == ""
        for role, expected_bytes in expected_bytes_by_role.items():
            # The port also counts the headers of the packets, which have less than 5 % of the bytes.
            assert expected_bytes <= port_growth[role]["sent_bytes"] < 1.05 * expected_bytes
            assert expected_bytes <= port_growth[role]["received_bytes"] < 1.05 * expected_bytes
    assert "slow pair" in run_folder.index.read_text()


@NEEDS_TWO_MACHINES
@pytest.mark.timeout(300)
def test_dead_rank_fails_only_its_own_pairs(tmp_path: Path) -> None:
    with run_job_on_four_machines(tmp_path / "out") as job:
        job.wait_for_line("4 of 4 ranks")
        os.kill(job.find_rank_process(rank=FAULTY_RANK), signal.SIGKILL)
        # mpirun ends at once, and the ranks go on without it.
        assert job.wait() == 128 + signal.SIGKILL
        job.wait_for_all_processes(limit_s=120)
    run_folder = RunFolder(tmp_path / "out")
    records = read_records(run_folder.records)
    is_failed_by_case: dict[str, Any] = {record.case: record.verdict is Verdict.FAIL for record in records}
    # There are 4 pairs that transfer alone, and 4 in each of the 2 rounds.
    assert len(is_failed_by_case) == 4 + 8
    assert is_failed_by_case == {record.case: FAULTY_RANK in get_rank_pair(record) for record in records}
    assert run_folder.index.is_file()
