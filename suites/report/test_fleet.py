"""`gdrkit report --fleet`: many hosts in one report; a damaged one hides no other."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.hosts import host_facts, host_records, write_run
from support.records import record_of

from gdrkit.errors import UsageError
from gdrkit.report import RunFolder
from gdrkit.report.fleet import Fleet, render_fleet
from gdrkit.report.render import render

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.inventory import Facts

FACTS = host_facts(gpus=1, nics=1)


def host(folder: Path, name: str, *, facts: Facts = FACTS, factor: float = 1.0, started: str = "12") -> Path:
    """The run of a host of its own: its NIC has a GUID that no other has."""
    (nic,) = facts.rdma_devices
    own = dataclasses.replace(facts, rdma_devices=(dataclasses.replace(nic, node_guid=folder.name),), cuda=None)
    path = write_run(folder, own, list(host_records(FACTS, factor=factor)), host=name)
    run = RunFolder(path).read_run()
    RunFolder(path).write_run(dataclasses.replace(run, started=f"2026-11-20T{started}:00:00Z"))
    return path


def test_hosts_are_rows_that_lead_to_their_pages(tmp_path: Path) -> None:
    for number in range(3):
        render(host(tmp_path / f"run{number}", f"node{number}"))
    made = render_fleet(tmp_path)
    assert made.problems == ()
    page = (tmp_path / "index.html").read_text()
    assert "<h1>3 of 3 qualified</h1>" in page
    assert '<a href="run1/index.html">node1</a>' in page


def test_who_is_slower_or_unlike_the_others_is_named(tmp_path: Path) -> None:
    for number in range(4):
        host(tmp_path / f"run{number}", f"node{number}", factor=0.8 if number == 2 else 0.99)
    old = dataclasses.replace(FACTS, nvidia_driver_version="570.1")
    host(tmp_path / "run4", "node4", facts=old)
    hosts = {it.name: it for it in render_fleet(tmp_path).hosts}
    assert {name for name, it in hosts.items() if it.slow} == {"node2"}
    assert round(hosts["node2"].slow[0].percent) == -19
    assert {name: it.differs for name, it in hosts.items() if it.differs} == {
        "node4": ("NVIDIA driver 570.1, usual is 580.159.04",)
    }


def test_a_damaged_host_is_a_row_with_its_error_and_hides_no_other(tmp_path: Path) -> None:
    host(tmp_path / "good", "good")
    (host(tmp_path / "bad", "bad") / "records.jsonl").write_text('{"half')
    made = render_fleet(tmp_path)
    assert [(it.name, bool(it.error)) for it in made.hosts] == [("bad", True), ("good", False)]
    (problem,) = made.problems
    assert problem.startswith("bad: ")
    assert "records.jsonl:1: no JSON" in problem


def test_two_hosts_of_one_name_are_two_rows_and_a_problem(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        host(tmp_path / folder, "node")
    made = render_fleet(tmp_path)
    assert [it.name for it in made.hosts] == ["node (a)", "node (b)"]
    assert made.problems == ("2 hosts are called node: a, b",)
    text = (tmp_path / "metrics.prom").read_text()
    assert 'host="node (a)"' in text
    assert 'host="node"' not in text


def test_of_one_host_the_last_run_counts(tmp_path: Path) -> None:
    for folder, started in (("first", "08"), ("last", "20")):
        (nic,) = FACTS.rdma_devices
        path = write_run(tmp_path / folder, FACTS, [record_of()], host="node", host_id="ab")
        run = RunFolder(path).read_run()
        RunFolder(path).write_run(dataclasses.replace(run, started=f"2026-11-20T{started}:00:00Z"))
        assert nic.node_guid
    made = render_fleet(tmp_path)
    assert [it.folder for it in made.hosts] == ["last"]
    assert made.problems == ()
    assert json.loads((tmp_path / "fleet.json").read_text())["older_runs"] == ["first"]


def test_a_hostile_host_name_is_text(tmp_path: Path) -> None:
    host(tmp_path / "run", "<script>alert(1)</script>\x1b[2J")
    render_fleet(tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in page


def test_a_folder_without_runs_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no folder of a run"):
        render_fleet(tmp_path)


def test_the_command_says_problems_in_a_line_each_and_ends_with_1(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        host(tmp_path / folder, "node\x1b[1m")
    command = [sys.executable, "-m", "gdrkit", "report", "--fleet", str(tmp_path), "--output", str(tmp_path / "made")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "gdrkit: 2 hosts are called node\\x1b[1m: a, b\n"
    assert (tmp_path / "made" / "fleet.json").exists()


def test_a_hundred_hosts_are_still_a_page(tmp_path: Path) -> None:
    for number in range(100):
        write_run(tmp_path / f"run{number}", FACTS, [record_of()], host=f"node{number}", host_id=f"{number:x}")
        made: Fleet
    made = render_fleet(tmp_path)
    # All have the serials of one machine, and so are told apart by their names alone.
    assert len(made.hosts) == 100
    assert (tmp_path / "index.html").stat().st_size < 1_000_000
