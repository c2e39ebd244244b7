"""`gdrkit qualify --mpi`: the planned pairs of ranks, and the report if a process was killed or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from qualify.mpi_job import run_job_on_this_machine, run_job_on_two_machines

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software
from gdrkit.host import HostTree, host_identity
from gdrkit.qualify.ranks.pairs import RankFacts, plan_pairs
from gdrkit.report import RunFolder, Verdict, read_records

if TYPE_CHECKING:
    from pathlib import Path

MPI_NEEDS = (software(Api.VERBS), software(Api.CUDA), host.module("mpi4py"), host.program("mpirun"))
NEEDS_TWO_MACHINES = needs(
    *MPI_NEEDS, host.program("ip"), host.capability("CAP_NET_ADMIN"), host.capability("CAP_SYS_ADMIN")
)
# Jobs with two ranks on one machine need no network namespaces, so they need no `ip` and no capability.
NEEDS_MPI = needs(*MPI_NEEDS)


def make_rank_facts(rank: int, machine: str, *, nic_count: int = 2, gpu_count: int = 2) -> RankFacts:
    """Return the facts of a rank on a machine with this many NICs and GPUs."""
    facts = SimpleNamespace(
        verbs=SimpleNamespace(
            nics=[SimpleNamespace(name=f"n{index}", active_ports=(1,)) for index in range(nic_count)]
        ),
        cuda=SimpleNamespace(devices=[SimpleNamespace(index=index) for index in range(gpu_count)]),
    )
    return RankFacts(rank, machine, cast("Any", facts))


def test_gpu_and_nic_combinations_are_planned_once_each() -> None:
    ranks = [make_rank_facts(0, "a"), make_rank_facts(1, "a"), make_rank_facts(2, "b"), make_rank_facts(3, "b")]
    pairs = plan_pairs(ranks, within_hosts=False)
    host_by_rank = {rank_facts.rank: rank_facts.host for rank_facts in ranks}
    # There are 2 target machines, each with 2 NICs and 2 GPUs.
    assert len({(host_by_rank[pair.target], pair.target_nic, pair.device) for pair in pairs}) == len(pairs) == 8
    assert all(host_by_rank[pair.initiator] != host_by_rank[pair.target] for pair in pairs)
    # Each pair is on one rail: its two NICs have the same position on their machines.
    assert all(pair.initiator_nic == pair.target_nic for pair in pairs)


@pytest.mark.parametrize("machines", [("a", "a"), ("a", "a", "b", "b")])
def test_pairs_within_hosts_have_both_ranks_on_one_machine(machines: tuple[str, ...]) -> None:
    ranks = [make_rank_facts(rank, machine) for rank, machine in enumerate(machines)]
    pairs = plan_pairs(ranks, within_hosts=True)
    # Each machine has 2 NICs and 2 GPUs.
    assert len(pairs) == 4 * len(set(machines))
    assert all(machines[pair.initiator] == machines[pair.target] for pair in pairs)
    assert all(pair.initiator != pair.target for pair in pairs)


def test_machine_without_a_nic_has_no_pairs() -> None:
    assert (
        plan_pairs([make_rank_facts(0, "a", nic_count=0), make_rank_facts(1, "b", nic_count=0)], within_hosts=False)
        == ()
    )
    assert plan_pairs([make_rank_facts(0, "a", nic_count=0), make_rank_facts(1, "b")], within_hosts=False) == ()


@NEEDS_TWO_MACHINES
@pytest.mark.timeout(600)
def test_killed_measuring_process_fails_one_pair_only(tmp_path: Path) -> None:
    with run_job_on_two_machines(tmp_path / "out") as job:
        # The job prints a line with the verdict of each pair.
        job.wait_for_line("pass  ")
        kill_time_s = time.monotonic()
        os.kill(job.find_measuring_process(rank=0), signal.SIGKILL)
        job.wait_for_line("SIGKILL")
        assert time.monotonic() - kill_time_s < 60
        exit_code = job.wait()
    records = read_records(tmp_path / "out" / "records.jsonl")
    failed_records = [record for record in records if record.verdict is Verdict.FAIL]
    assert (exit_code, len(records), len(failed_records)) == (1, 8, 1)
    assert "rank 0" in failed_records[0].reasons[0].text
    for record in records:
        host_by_role = cast("dict[str, str]", record.evidence["hosts"])
        assert host_by_role["initiator"] != host_by_role["target"]
        assert record.verdict is Verdict.FAIL or record.substrate == {"cuda": "twin", "verbs": "twin"}
    assert (tmp_path / "out" / "index.html").is_file()


@NEEDS_TWO_MACHINES
@pytest.mark.timeout(600)
def test_killed_job_has_a_report_of_the_measured_pairs(tmp_path: Path) -> None:
    with run_job_on_two_machines(tmp_path / "out") as job:
        job.wait_for_line("pass  ")
        job.kill()
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert 1 <= len(records) < 8
    command = [sys.executable, "-m", "gdrkit", "report", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    report_page = (tmp_path / "out" / "index.html").read_text()
    assert "The job did not end" in report_page
    assert records[0].case in report_page


@NEEDS_MPI
def test_folder_of_a_killed_job_has_no_file_of_an_earlier_job(tmp_path: Path) -> None:
    """The earlier job had more ranks than the killed job. run.json must name the machine of the killed job."""
    run_folder = RunFolder(tmp_path / "out")
    old_paths = (
        *run_folder.files,
        run_folder.path / "hosts" / "rank-0.json",
        run_folder.path / "hosts" / "rank-9.json",
    )
    (run_folder.path / "hosts").mkdir(parents=True)
    for path in old_paths:
        path.write_text("of an earlier job")
    with run_job_on_this_machine(run_folder.path) as job:
        job.wait_for_line("2 of 2 ranks")
        job.kill()
    assert not [path for path in old_paths if path.exists() and path.read_text() == "of an earlier job"]
    assert sorted(path.name for path in (run_folder.path / "hosts").iterdir()) == ["rank-0.json", "rank-1.json"]
    identity, run_data = host_identity(HostTree()), run_folder.read_run()
    assert (run_data.host, run_data.host_id) == (identity.name, identity.digest)


@NEEDS_MPI
@pytest.mark.timeout(300)
def test_rank_that_hangs_fails_one_pair_only(tmp_path: Path) -> None:
    with run_job_on_this_machine(tmp_path / "out") as job:
        job.wait_for_line("2 of 2 ranks")
        stop_time_s = time.monotonic()
        os.kill(job.find_rank_process(rank=1), signal.SIGSTOP)
        job.wait_for_line("FAIL  ")
        assert time.monotonic() - stop_time_s < 60
        os.kill(job.find_rank_process(rank=1), signal.SIGCONT)
        exit_code = job.wait()
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert (exit_code, [record.verdict for record in records]) == (1, [Verdict.FAIL] + [Verdict.PASS] * 3)
    assert "on rank 1" in records[0].reasons[0].text
    assert "did not reply in time" in records[0].reasons[0].text


@NEEDS_MPI
@pytest.mark.timeout(300)
def test_killed_rank_fails_its_pairs_and_the_report_exists(tmp_path: Path) -> None:
    with run_job_on_this_machine(tmp_path / "out") as job:
        assert str(tmp_path / "out" / "index.html") in job.wait_for_line("2 of 2 ranks")
        os.kill(job.find_rank_process(rank=1), signal.SIGKILL)
        # The exit code comes from mpirun, which waits only a second or two for the other ranks.
        assert job.wait() == 128 + signal.SIGKILL
        job.wait_for_all_processes(limit_s=120)
    run_folder = RunFolder(tmp_path / "out")
    records, run_data = read_records(run_folder.records), run_folder.read_run()
    assert [record.verdict for record in records] == [Verdict.FAIL] * 4
    assert all(
        "on rank 1" in record.reasons[0].text and "has closed its connection" in record.reasons[0].text
        for record in records
    )
    assert (run_data.exit_code, run_data.verdict) == (1, "4 of 4 cases failed")
    assert run_folder.index.is_file()


@NEEDS_MPI
def test_rank_of_another_version_is_a_failed_record(tmp_path: Path) -> None:
    program_of_rank_1 = "import gdrkit, gdrkit.cli; gdrkit.__version__ = '0.0.9'; gdrkit.cli.main()"
    with run_job_on_this_machine(tmp_path / "out", command_of_rank_1=(sys.executable, "-c", program_of_rank_1)) as job:
        job.wait_for_line("1 of 2 ranks")
        assert job.wait() == 1
    (record,) = read_records(tmp_path / "out" / "records.jsonl")
    assert (record.case, record.verdict) == ("ranks/1", Verdict.FAIL)
    assert "gdrkit 0.0.9, and rank 0 has" in record.reasons[0].text


@NEEDS_MPI
def test_ranks_exit_with_the_code_of_a_missing_set_up(tmp_path: Path) -> None:
    """mpirun reports the exit code of an arbitrary rank, so all ranks must exit with the same code."""
    # Rank 0 cannot create a folder below a file, so the set-up of the job is not complete.
    (tmp_path / "file").touch()
    program_of_rank_1 = (
        "import pathlib, sys\nfrom gdrkit.cli import main\ntry:\n    main()\nexcept SystemExit as exit_error:\n"
    )
    program_of_rank_1 += (
        f"    pathlib.Path({str(tmp_path / 'exit_code')!r}).write_text(str(exit_error.code))\n    raise"
    )
    with run_job_on_this_machine(
        tmp_path / "file" / "out", command_of_rank_1=(sys.executable, "-c", program_of_rank_1)
    ) as job:
        assert "Not a directory (ENOTDIR). To do: name a folder" in job.wait_for_line("mkdir")
        assert job.wait() == 3
    # mpirun may have killed the rank before it could write the file.
    assert not (tmp_path / "exit_code").exists() or (tmp_path / "exit_code").read_text() == "3"
