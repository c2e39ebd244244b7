"""`gdrkit report --fleet` writes one report about many hosts, even if the files of a host are damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.hosts import HARDWARE_SUBSTRATES, make_host_facts, make_host_records, write_run
from support.other_user import folder_for_all_users, run_program
from support.records import make_record

from gdrkit.errors import UsageError
from gdrkit.harness.needs import host as host_needs
from gdrkit.harness.needs import needs
from gdrkit.report import RunFolder, RunState, Verdict, append_record
from gdrkit.report.fleet import render_fleet
from gdrkit.report.render import render
from gdrkit.verdict import NOISE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.inventory import Facts
    from gdrkit.serialization import Json

FACTS = make_host_facts(gpu_count=1, nic_count=1)
# Program that writes the report of a fleet as an unprivileged user. Its arguments are the folder of the runs and the
# output folder. The unprivileged user cannot read the checkout, so the program loads all modules and the template
# before it changes its user.
RENDER_FLEET_UNPRIVILEGED = """
import sys
from pathlib import Path
from gdrkit.errors import SetupMissing
from gdrkit.report.fleet import render_fleet
from gdrkit.report.render import make_template_environment
from support.other_user import become_unprivileged
make_template_environment(escaped=True).get_template("fleet.html.j2")
become_unprivileged()
try:
    fleet = render_fleet(Path(sys.argv[1]), Path(sys.argv[2]))
except SetupMissing as error:
    sys.exit(f"{error.operation} {error.status_name} {error.arguments['path']}")
print(*(f"{host.name} {host.folder}" for host in fleet.hosts), *fleet.problems, sep="\\n")
"""


def write_host_run(folder: Path, host_name: str, *, facts: Facts = FACTS, rate_factor: float = 1.0) -> Path:
    """Write the run of a host into `folder`. The GUID of the NIC is the name of the folder, so that hosts differ."""
    (nic,) = facts.rdma_devices
    facts_of_host = dataclasses.replace(
        facts, rdma_devices=(dataclasses.replace(nic, node_guid=folder.name),), cuda=None
    )
    run_path = write_run(folder, facts_of_host, list(make_host_records(FACTS, rate_factor=rate_factor)), host=host_name)
    host_run = RunFolder(run_path).read_run()
    RunFolder(run_path).write_run(dataclasses.replace(host_run, started="2026-11-20T12:00:00Z"))
    return run_path


def test_hosts_are_rows_with_links_to_their_pages(tmp_path: Path) -> None:
    for host_index in range(3):
        render(write_host_run(tmp_path / f"run{host_index}", f"node{host_index}"))
    fleet = render_fleet(tmp_path)
    assert fleet.problems == ()
    fleet_html = (tmp_path / "index.html").read_text()
    assert "<h1>3 hosts: 3 qualified</h1>" in fleet_html
    assert '<a href="run1/index.html">node1</a>' in fleet_html


TWIN_SUBSTRATE = {"verbs": "twin", "cuda": "twin"}
# The fields in which a run differs from a passed run on hardware, and the state of this run in every report.
FIELDS_AND_STATES: list[tuple[dict[str, Any], str]] = [
    ({}, "qualified"),
    ({"software_asked": True, "substrate": TWIN_SUBSTRATE}, "software only"),
    # A run on twins says nothing about the machine, even if --software was not given.
    ({"substrate": TWIN_SUBSTRATE}, "software only"),
    ({"selection": "-k write"}, "partial"),
    ({"selection": "-k write", "software_asked": True, "substrate": TWIN_SUBSTRATE}, "partial"),
    ({"selection": "--suites /elsewhere", "exit_code": 4}, "partial"),
    # gdrkit 0.1.0 recorded the selection only in the command line.
    ({"command": "gdrkit qualify -k 'write and not read'"}, "partial"),
    ({"command": "gdrkit qualify '-k"}, "partial"),  # The quotation mark is not closed.
    ({"command": "gdrkit qualify --suites=/elsewhere"}, "partial"),
    ({"is_interrupted": True, "exit_code": 1}, "interrupted"),
    ({"is_interrupted": True, "software_asked": True, "selection": "-k write"}, "interrupted"),
    ({"selection": "-k write", "exit_code": 1}, "failed"),
    ({"software_asked": True, "substrate": TWIN_SUBSTRATE, "exit_code": 1}, "failed"),
    ({"exit_code": 3}, "set-up is missing"),
    ({"exit_code": 4}, "nothing proven"),
    ({"exit_code": 77}, "failed"),  # gdrkit has no such exit code.
]


@pytest.mark.parametrize(("run_fields", "expected_state"), FIELDS_AND_STATES, ids=range(len(FIELDS_AND_STATES)))
def test_state_of_a_run_is_the_same_in_every_document(
    tmp_path: Path, run_fields: dict[str, Any], expected_state: str
) -> None:
    run_folder = RunFolder(write_host_run(tmp_path / "run", "node"))
    records = [record for record in make_host_records(FACTS) if record.verdict is Verdict.PASS]
    run_folder.records.unlink()
    for record in records:
        append_record(run_folder.records, record)
    run = dataclasses.replace(run_folder.read_run(), exit_code=0, verdict="It ended", causes=())
    run_folder.write_run(dataclasses.replace(run, **run_fields))
    render(run_folder.path)
    (row,) = render_fleet(tmp_path).hosts
    assert row.state == expected_state
    assert json.loads((tmp_path / "fleet.json").read_text())["tally"] == {expected_state: 1}
    fleet_html = (tmp_path / "index.html").read_text()
    assert f"<h1>1 host: 1 {expected_state}</h1>" in fleet_html
    # Only a qualified run has the green dot in the fleet page and in its own page.
    assert ('class="state pass"' in fleet_html) == (expected_state == "qualified")
    assert ('class="mark good"' in run_folder.index.read_text()) == (expected_state == "qualified")
    assert json.loads(run_folder.report.read_text())["state"] == expected_state
    assert f" · {expected_state} · exit code " in run_folder.summary.read_text()
    assert f'<property name="state" value="{expected_state}" />' in run_folder.junit.read_text()
    for metrics in (run_folder.metrics, tmp_path / "metrics.prom"):
        state_samples = [line for line in metrics.read_text().splitlines() if line.startswith("gdrkit_state{")]
        assert [line for line in state_samples if line.endswith(" 1")] == [
            f'gdrkit_state{{host="node",profile="any",state="{expected_state}"}} 1'
        ]
        assert len(state_samples) == len(RunState)


def test_hosts_that_need_attention_come_first(tmp_path: Path) -> None:
    run_fields_by_host: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"software_asked": True, "substrate": TWIN_SUBSTRATE},
        "c": {"selection": "-k write"},
        "d": {"exit_code": 4},
        "e": {"is_interrupted": True},
        "f": {"exit_code": 1},
        "g": {},
    }
    for host_name, run_fields in run_fields_by_host.items():
        run_folder = RunFolder(write_host_run(tmp_path / host_name, host_name))
        run_folder.write_run(dataclasses.replace(run_folder.read_run(), **{"exit_code": 0, **run_fields}))
    (tmp_path / "g" / "records.jsonl").write_text('{"half')
    # The unreadable run is first. Interrupted and failed runs follow, then runs that prove a part, then qualified runs.
    assert [row.name for row in render_fleet(tmp_path).hosts] == ["g", "e", "f", "b", "c", "d", "a"]


def test_slower_and_different_hosts_are_named(tmp_path: Path) -> None:
    for host_index in range(4):
        write_host_run(tmp_path / f"run{host_index}", f"node{host_index}", rate_factor=0.8 if host_index == 2 else 0.99)
    facts_of_old_driver = dataclasses.replace(FACTS, nvidia_driver_version="570.1")
    write_host_run(tmp_path / "run4", "node4", facts=facts_of_old_driver)
    row_by_host = {row.name: row for row in render_fleet(tmp_path).hosts}
    assert {name for name, row in row_by_host.items() if row.slow} == {"node2"}
    assert round(row_by_host["node2"].slow[0].percent) == -19
    assert {name: row.differs for name, row in row_by_host.items() if row.differs} == {
        "node4": ("NVIDIA driver is 570.1, on most hosts 580.159.04",)
    }


@pytest.mark.parametrize(
    ("numbers", "expected_percents"),
    [
        ({"rate_gb_per_s_median": 8.0}, [-20.0]),
        # A higher rate is not slower, and a rate that is 4 % lower is within the noise.
        ({"rate_gb_per_s_median": 12.0}, []),
        ({"rate_gb_per_s_median": 9.6}, []),
        # The name of a number may consist of its unit alone.
        ({"gb_per_s": 8.0}, [-20.0]),
        ({"us_median": 12.0}, [20.0]),
        ({"ms": 8.0}, []),
        # A difference within the noise of the rounds does not count.
        ({"rate_gb_per_s_median": 8.0, "rate_spread_percent": 40.0, "rounds_count": 15.0}, []),
        ({"rate_gb_per_s_median": 8.0, "rate_spread_percent": 1.0, "rounds_count": 15.0}, [-20.0]),
        # A ratio, a bound and the minimum of rounds are not compared.
        ({"direct_over_by_host_ratio": 8.0}, []),
        ({"limit_gb_per_s": 8.0}, []),
        ({"rate_gb_per_s_min": 8.0}, []),
    ],
    ids=str,
)
def test_slower_numbers_are_those_beyond_their_noise(
    tmp_path: Path, numbers: dict[str, float], expected_percents: list[float]
) -> None:
    # The other hosts have 10 for each measured value, and the same spread and number of rounds.
    numbers_of_other_hosts = {name: 10.0 if value in {8.0, 9.6, 12.0} else value for name, value in numbers.items()}
    for host_index in range(5):
        record = make_record(
            numbers=numbers if host_index == 2 else numbers_of_other_hosts, substrate=HARDWARE_SUBSTRATES
        )
        write_run(tmp_path / f"run{host_index}", FACTS, [record], host=f"node{host_index}", host_id=f"{host_index}")
    row_by_host = {row.name: row for row in render_fleet(tmp_path).hosts}
    assert [slow_number.percent for slow_number in row_by_host["node2"].slow] == expected_percents
    assert [row.slow for name, row in row_by_host.items() if name != "node2"] == [()] * 4
    assert f"by more than {NOISE_PERCENT:g} %" in (tmp_path / "index.html").read_text()


def test_records_of_a_case_in_one_host_are_combined(tmp_path: Path) -> None:
    for host_index in range(4):
        # On one host, the case ran three times. Only one of its rates is low, and the median counts.
        rates = (8.0, 10.0, 10.1) if host_index == 2 else (10.0,)
        records = [
            make_record(numbers={"rate_gb_per_s": rate}, substrate=HARDWARE_SUBSTRATES) for rate in reversed(rates)
        ]
        write_run(tmp_path / f"run{host_index}", FACTS, records, host=f"node{host_index}", host_id=f"{host_index}")
    assert [row.slow for row in render_fleet(tmp_path).hosts] == [()] * 4


def test_damaged_host_is_a_row_with_its_error(tmp_path: Path) -> None:
    write_host_run(tmp_path / "good", "good")
    (write_host_run(tmp_path / "bad", "bad") / "records.jsonl").write_text('{"half')
    fleet = render_fleet(tmp_path)
    assert [(row.name, bool(row.error)) for row in fleet.hosts] == [("bad", True), ("good", False)]
    (problem,) = fleet.problems
    assert problem.startswith("bad: ")
    assert "records.jsonl:1: not JSON" in problem


def change_fields(file: Path, **fields: Json) -> None:
    """Change fields in a JSON file, or in the first line of a file of JSON lines."""
    first_line, line_end, later_lines = (
        file.read_text().partition("\n") if file.suffix == ".jsonl" else (file.read_text(), "", "")
    )
    file.write_text(json.dumps({**json.loads(first_line), **fields}) + line_end + later_lines)


def make_run_unfinished(run_folder: RunFolder, plan: Json) -> None:
    run_folder.run.unlink()
    run_folder.plan.write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("damage_run", "expected_text"),
    [
        (
            lambda run_folder: change_fields(run_folder.run, started="yesterday"),
            "run.json.started: expected a time such as 2026-11-20T",
        ),
        (
            lambda run_folder: change_fields(run_folder.run, started="2026-02-30T12:00:00Z"),
            "found '2026-02-30T12:00:00Z'",
        ),
        (lambda run_folder: change_fields(run_folder.run, started="2026-11-20T12:00:00"), "run.json.started"),
        (
            lambda run_folder: change_fields(run_folder.run, substrate={"cuda": "magic"}),
            "run.json.substrate.cuda: expected one of hardware",
        ),
        (
            lambda run_folder: change_fields(run_folder.run, duration_s=10**400),
            "run.json.duration_s: expected a finite number",
        ),
        (lambda run_folder: change_fields(run_folder.run, exit_code=10**400), "run.json.exit_code: expected 0 to 255"),
        (lambda run_folder: change_fields(run_folder.records, started="never"), "records.jsonl:1.started"),
        (
            lambda run_folder: change_fields(run_folder.records, substrate={"verbs": ""}),
            "records.jsonl:1.substrate.verbs",
        ),
        (
            lambda run_folder: make_run_unfinished(run_folder, {"cases": 5}),
            "plan.json: expected an object with a list of cases",
        ),
        (
            lambda run_folder: make_run_unfinished(run_folder, ["case"]),
            "plan.json: expected an object with a list of cases",
        ),
        (
            lambda run_folder: make_run_unfinished(run_folder, {"cases": [{"case": "a"}, {}]}),
            "plan.json.cases: expected the name of each",
        ),
        # run.json is a symbolic link to itself.
        (lambda run_folder: (run_folder.run.unlink(), run_folder.run.symlink_to(run_folder.run)), "ELOOP"),
    ],
    ids=range(12),
)
def test_malformed_run_is_a_row_with_its_error(
    tmp_path: Path, damage_run: Callable[[RunFolder], object], expected_text: str
) -> None:
    write_host_run(tmp_path / "good", "good")
    damage_run(RunFolder(write_host_run(tmp_path / "bad", "bad")))
    fleet = render_fleet(tmp_path)
    assert [(row.name, row.state) for row in fleet.hosts] == [("bad", "not readable"), ("good", "qualified")]
    (problem,) = fleet.problems
    assert expected_text in problem


@needs(host_needs.capability("CAP_SETUID"), host_needs.package_for_all_users)
def test_unreadable_run_is_a_row_and_unreadable_fleet_an_error() -> None:
    with folder_for_all_users() as folder:
        for name in ("good", "private"):
            write_host_run(folder / "fleet" / name, name)
        (folder / "fleet" / "private").chmod(0o700)
        output_folder = folder / "output"
        output_folder.mkdir()
        output_folder.chmod(0o777)
        completed = run_program(RENDER_FLEET_UNPRIVILEGED, str(folder / "fleet"), str(output_folder))
        assert completed.returncode == 0, completed.stderr
        *names_and_folders, problem = completed.stdout.splitlines()
        assert names_and_folders == ["private ../fleet/private", "good ../fleet/good"]
        assert problem.startswith("private: ")
        assert "EACCES" in problem
        (folder / "fleet").chmod(0o700)
        completed = run_program(RENDER_FLEET_UNPRIVILEGED, str(folder / "fleet"), str(output_folder))
        assert completed.stderr == f"read EACCES {folder / 'fleet'}\n"


def test_folder_name_that_is_not_utf_8_has_a_row_and_a_link(tmp_path: Path) -> None:
    # Hosts are sorted by the numbers in their names. int() refuses a text of 5000 digits, so the sort must not use it.
    render(write_host_run(tmp_path / "odd", "9" * 5000))
    (tmp_path / "odd").rename(os.fsdecode(os.fsencode(tmp_path) + b"/node\xff:1"))
    write_host_run(tmp_path / "other", "node10")
    write_host_run(tmp_path / "another", "node9")
    fleet = render_fleet(tmp_path)
    assert [row.name for row in fleet.hosts] == ["9" * 5000, "node9", "node10"]
    assert fleet.problems == ()
    assert '<a href="node%FF%3A1/index.html">' in (tmp_path / "index.html").read_text()


def test_two_hosts_with_one_name_are_two_rows_and_a_problem(tmp_path: Path) -> None:
    for folder_name in ("a", "b"):
        write_host_run(tmp_path / folder_name, "node")
    fleet = render_fleet(tmp_path)
    assert [row.name for row in fleet.hosts] == ["node (a)", "node (b)"]
    assert fleet.problems == ("2 hosts have the name node: a, b",)
    metrics_text = (tmp_path / "metrics.prom").read_text()
    assert 'host="node (a)"' in metrics_text
    assert 'host="node"' not in metrics_text


def test_last_run_of_a_host_counts(tmp_path: Path) -> None:
    for folder_name, start_hour in (("first", "08"), ("last", "20")):
        run_path = write_run(tmp_path / folder_name, FACTS, [make_record()], host="node", host_id="ab")
        run = RunFolder(run_path).read_run()
        RunFolder(run_path).write_run(dataclasses.replace(run, started=f"2026-11-20T{start_hour}:00:00Z"))
    fleet = render_fleet(tmp_path)
    assert [row.folder for row in fleet.hosts] == ["last"]
    assert fleet.problems == ()
    assert json.loads((tmp_path / "fleet.json").read_text())["older_runs"] == ["first"]


def test_hostile_host_name_is_text(tmp_path: Path) -> None:
    write_host_run(tmp_path / "run", "<script>alert(1)</script>\x1b[2J")
    render_fleet(tmp_path)
    fleet_html = (tmp_path / "index.html").read_text()
    assert "<script" not in fleet_html
    assert "\x1b" not in fleet_html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J" in fleet_html


def test_folder_without_runs_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="contains no folder of a run"):
        render_fleet(tmp_path)


def test_command_prints_problems_and_has_exit_code_1(tmp_path: Path) -> None:
    for folder_name in ("a", "b"):
        write_host_run(tmp_path / folder_name, "node\x1b[1m")
    command = [sys.executable, "-m", "gdrkit", "report", "--fleet", str(tmp_path), "--output", str(tmp_path / "output")]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    assert completed.stderr == "gdrkit: 2 hosts have the name node\\x1b[1m: a, b\n"
    assert (tmp_path / "output" / "fleet.json").exists()


def test_page_of_100_hosts_is_below_1_mb(tmp_path: Path) -> None:
    for host_index in range(100):
        write_run(
            tmp_path / f"run{host_index}", FACTS, [make_record()], host=f"node{host_index}", host_id=f"{host_index:x}"
        )
    fleet = render_fleet(tmp_path)
    # The hosts have equal devices, but different names and ids, so each of them has a row.
    assert len(fleet.hosts) == 100
    assert (tmp_path / "index.html").stat().st_size < 1_000_000


def test_fleet_page_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    for host_index in range(3):
        write_host_run(tmp_path / f"run{host_index}", f"node{host_index}", rate_factor=0.8 if host_index == 2 else 1.0)
    run_folder = RunFolder(tmp_path / "run1")
    causes = ("no route to GPU 0 is proven", "no route to GPU 1 is proven", "no route to GPU 2 is proven")
    run = dataclasses.replace(run_folder.read_run(), exit_code=1, causes=causes, to_do=("gdrkit doctor",))
    run_folder.write_run(run)
    render_fleet(tmp_path)
    fleet_html = (tmp_path / "index.html").read_text()
    assert "<div>no route to GPU 1 is proven</div>" in fleet_html
    assert "1 more on the page of the host" in fleet_html
    assert "To do: gdrkit doctor" in fleet_html
    # The fleet page shows the title that the measured number has on the page of its host, not the test function.
    assert "<div>Pinned copy host to device at 64 KiB: 11 GB/s, median 13.75 GB/s (-20.0 %)</div>" in fleet_html
    assert "test_pinned_copy" not in fleet_html
