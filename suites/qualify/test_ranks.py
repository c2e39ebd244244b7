"""Qualification of several machines: the planned pairs, and the report after a process was killed or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from qualify.mpi_job import job_on_this_machine, job_on_two_machines

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software
from gdrkit.host import HostTree, host_identity
from gdrkit.qualify.ranks.pairs import RankFacts, plan_pairs
from gdrkit.report import RunFolder, Verdict, read_records

if TYPE_CHECKING:
    from pathlib import Path

MPI = (software(Api.VERBS), software(Api.CUDA), host.module("mpi4py"), host.program("mpirun"))
JOB = needs(*MPI, host.program("ip"), host.capability("CAP_NET_ADMIN"), host.capability("CAP_SYS_ADMIN"))
# Two ranks on one machine need no network namespaces.
PAIR = needs(*MPI)


def rank(number: int, machine: str, *, nics: int = 2, gpus: int = 2) -> RankFacts:
    facts = SimpleNamespace(
        verbs=SimpleNamespace(nics=[SimpleNamespace(name=f"n{each}", active_ports=(1,)) for each in range(nics)]),
        cuda=SimpleNamespace(devices=[SimpleNamespace(index=each) for each in range(gpus)]),
    )
    return RankFacts(number, machine, cast("Any", facts))


def test_gpu_and_nic_combinations_are_planned_once_each() -> None:
    ranks = [rank(0, "a"), rank(1, "a"), rank(2, "b"), rank(3, "b")]
    planned = plan_pairs(ranks, within_hosts=False)
    hosts = {each.rank: each.host for each in ranks}
    assert len({(hosts[pair.target], pair.target_nic, pair.device) for pair in planned}) == len(planned) == 8
    assert all(hosts[pair.initiator] != hosts[pair.target] for pair in planned)
    # A rail: the NICs at the same position on both sides.
    assert all(pair.initiator_nic == pair.target_nic for pair in planned)


@pytest.mark.parametrize("machines", [("a", "a"), ("a", "a", "b", "b")])
def test_pairs_within_hosts_have_both_ranks_on_one_machine(machines: tuple[str, ...]) -> None:
    ranks = [rank(number, machine) for number, machine in enumerate(machines)]
    planned = plan_pairs(ranks, within_hosts=True)
    assert len(planned) == 4 * len(set(machines))
    assert all(machines[pair.initiator] == machines[pair.target] for pair in planned)
    assert all(pair.initiator != pair.target for pair in planned)


def test_machine_without_a_nic_has_no_pairs() -> None:
    assert plan_pairs([rank(0, "a", nics=0), rank(1, "b", nics=0)], within_hosts=False) == ()
    assert plan_pairs([rank(0, "a", nics=0), rank(1, "b")], within_hosts=False) == ()


@JOB
@pytest.mark.timeout(600)
def test_killed_measuring_process_fails_one_pair_only(tmp_path: Path) -> None:
    with job_on_two_machines(tmp_path / "out") as running:
        running.wait_for_line("pass  ")
        killed_s = time.monotonic()
        os.kill(running.measuring_process(rank=0), signal.SIGKILL)
        running.wait_for_line("SIGKILL")
        assert time.monotonic() - killed_s < 60
        code = running.wait()
    records = read_records(tmp_path / "out" / "records.jsonl")
    failed = [record for record in records if record.verdict is Verdict.FAIL]
    assert (code, len(records), len(failed)) == (1, 8, 1)
    assert "rank 0" in failed[0].reasons[0].text
    for record in records:
        hosts = cast("dict[str, str]", record.evidence["hosts"])
        assert hosts["initiator"] != hosts["target"]
        assert record.verdict is Verdict.FAIL or record.substrate == {"cuda": "twin", "verbs": "twin"}
    assert (tmp_path / "out" / "index.html").is_file()


@JOB
@pytest.mark.timeout(600)
def test_killed_job_has_a_report_of_the_measured_pairs(tmp_path: Path) -> None:
    with job_on_two_machines(tmp_path / "out") as running:
        running.wait_for_line("pass  ")
        running.kill()
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert 1 <= len(records) < 8
    command = [sys.executable, "-m", "gdrkit", "report", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "The job did not end" in page
    assert records[0].case in page


@PAIR
def test_folder_of_a_killed_job_has_no_file_of_an_earlier_job(tmp_path: Path) -> None:
    """The earlier job had more ranks. The run names the machine of the killed job."""
    folder = RunFolder(tmp_path / "out")
    old_files = (*folder.files, folder.path / "hosts" / "rank-0.json", folder.path / "hosts" / "rank-9.json")
    (folder.path / "hosts").mkdir(parents=True)
    for file in old_files:
        file.write_text("of an earlier job")
    with job_on_this_machine(folder.path) as running:
        running.wait_for_line("2 of 2 ranks")
        running.kill()
    assert not [file for file in old_files if file.exists() and file.read_text() == "of an earlier job"]
    assert sorted(file.name for file in (folder.path / "hosts").iterdir()) == ["rank-0.json", "rank-1.json"]
    identity, run = host_identity(HostTree()), folder.read_run()
    assert (run.host, run.host_id) == (identity.name, identity.digest)


@PAIR
@pytest.mark.timeout(300)
def test_rank_that_hangs_fails_one_pair_only(tmp_path: Path) -> None:
    with job_on_this_machine(tmp_path / "out") as running:
        running.wait_for_line("2 of 2 ranks")
        stopped_s = time.monotonic()
        os.kill(running.rank_process(rank=1), signal.SIGSTOP)
        running.wait_for_line("FAIL  ")
        assert time.monotonic() - stopped_s < 60
        os.kill(running.rank_process(rank=1), signal.SIGCONT)
        code = running.wait()
    records = read_records(tmp_path / "out" / "records.jsonl")
    assert (code, [record.verdict for record in records]) == (1, [Verdict.FAIL] + [Verdict.PASS] * 3)
    assert "on rank 1" in records[0].reasons[0].text
    assert "did not reply in time" in records[0].reasons[0].text


@PAIR
@pytest.mark.timeout(300)
def test_killed_rank_fails_its_pairs_and_the_report_exists(tmp_path: Path) -> None:
    with job_on_this_machine(tmp_path / "out") as running:
        assert str(tmp_path / "out" / "index.html") in running.wait_for_line("2 of 2 ranks")
        os.kill(running.rank_process(rank=1), signal.SIGKILL)
        # This is the exit code of mpirun, which waits only a second or two for the other ranks.
        assert running.wait() == 128 + signal.SIGKILL
        running.wait_for_all(limit_s=120)
    folder = RunFolder(tmp_path / "out")
    records, run = read_records(folder.records), folder.read_run()
    assert [record.verdict for record in records] == [Verdict.FAIL] * 4
    assert all(
        "on rank 1" in record.reasons[0].text and "has closed its connection" in record.reasons[0].text
        for record in records
    )
    assert (run.exit_code, run.verdict) == (1, "4 of 4 cases failed")
    assert folder.index.is_file()


@PAIR
def test_rank_of_another_version_is_a_failed_record(tmp_path: Path) -> None:
    other = "import gdrkit, gdrkit.cli; gdrkit.__version__ = '0.0.9'; gdrkit.cli.main()"
    with job_on_this_machine(tmp_path / "out", second=(sys.executable, "-c", other)) as running:
        running.wait_for_line("1 of 2 ranks")
        assert running.wait() == 1
    (record,) = read_records(tmp_path / "out" / "records.jsonl")
    assert (record.case, record.verdict) == ("ranks/1", Verdict.FAIL)
    assert "gdrkit 0.0.9, and rank 0 has" in record.reasons[0].text


@PAIR
def test_ranks_exit_with_the_code_of_a_missing_set_up(tmp_path: Path) -> None:
    """All ranks have one exit code, because mpirun reports the code of any of them."""
    (tmp_path / "file").touch()
    program = "import pathlib, sys\nfrom gdrkit.cli import main\ntry:\n    main()\nexcept SystemExit as ended:\n"
    program += f"    pathlib.Path({str(tmp_path / 'code')!r}).write_text(str(ended.code))\n    raise"
    with job_on_this_machine(tmp_path / "file" / "out", second=(sys.executable, "-c", program)) as running:
        assert "Not a directory (ENOTDIR). To do: name a folder" in running.wait_for_line("mkdir")
        assert running.wait() == 3
    # mpirun may have killed the rank before it could write the file.
    assert not (tmp_path / "code").exists() or (tmp_path / "code").read_text() != "1"
