"""`gdrkit qualify` as a command: what it writes, what it prints first, how it ends."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.report import Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TWINS = needs(software(Api.VERBS), software(Api.CUDA), verbs.nic(), cuda.device())
GOOD = '''
import pytest
@pytest.mark.qualify
def test_good():
    """It is good."""
def test_of_no_interest():
    raise AssertionError
'''
BAD = """
import os, pytest
pytestmark = pytest.mark.qualify
def test_before(): ...
def test_ends_its_process():
    os.abort()
def test_after(): ...
def test_fails():
    assert [1] == [2]
"""
SLOW = """
import pathlib, subprocess, sys, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.fixture
def opened():
    yield
    time.sleep(0.5)
    (HERE / "closed").touch()
@pytest.mark.qualify
def test_slow(opened):
    stays = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); held = open(sys.argv[1], 'w')"
    stays += "; held.write('.'); held.flush(); signal.alarm(60); signal.pause()"
    started = subprocess.Popen([sys.executable, "-c", stays, HERE / "alive"])
    started.wait()
"""
HELD = """
import ctypes, pathlib, subprocess, sys, pytest
HERE = pathlib.Path(__file__).parent
@pytest.mark.qualify
def test_held():
    # A debugger of this process, in a session of its own: what is traced is collected by its tracer first.
    holds = "import ctypes, os, signal, sys; library = ctypes.CDLL(None, use_errno=True); traced = os.getppid()"
    holds += "; failed = library.ptrace(0x4206, traced, None, None); signal.alarm(120)"
    holds += "; open(sys.argv[1], 'w').write('!' if failed else '.'); open(sys.argv[1]).read()"
    holds += "; open(sys.argv[2]).read()"
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))
    started = [sys.executable, "-c", holds, HERE / "alive", HERE / "end"]
    subprocess.Popen(started, start_new_session=True).wait()
"""
FILES = {"facts.json", "index.html", "junit.xml", "plan.json", "records.jsonl", "run.json", "summary.md"}


def command_of(folder: Path, source: str) -> list[str]:
    suites = folder / "suites"
    suites.mkdir()
    (suites / "test_cases.py").write_text(source)
    return [sys.executable, "-m", "gdrkit", "qualify", "--suites", str(suites), "--output", str(folder / "report")]


def qualify(folder: Path, source: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*command_of(folder, source), *options]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


@TWINS
def test_a_software_run_that_passes_ends_with_0(tmp_path: Path) -> None:
    ended = qualify(tmp_path, GOOD, "--software", "--seed", "3", "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["run"]["verdict"] == "The code passed on software twins"
    assert {status["state"] for status in told["routes"]} <= {"unproven", "not_possible"}
    assert ended.stderr.splitlines()[0] == "software twins: this proves the code, not this machine"
    report = tmp_path / "report"
    assert {path.name for path in report.iterdir()} >= FILES
    (record,) = read_records(report / "records.jsonl")
    assert (record.case, record.title, record.seed) == ("test_cases.py::test_good", "It is good.", 3)
    assert record.command.startswith("gdrkit qualify --suites")
    assert (report / "summary.md").read_text().startswith("software twins: this proves the code, not this machine\n")


@TWINS
def test_failures_end_with_1_and_a_case_that_ends_its_process_stops_no_other(tmp_path: Path) -> None:
    ended = qualify(tmp_path, BAD, "--software")
    assert ended.returncode == 1, ended.stdout
    assert ended.stdout.splitlines()[0] == "software twins: this proves the code, not this machine"
    assert "2 of 4 cases failed" in ended.stdout
    records = {record.case.partition("::")[2]: record for record in read_records(tmp_path / "report" / "records.jsonl")}
    assert [record.verdict for record in records.values()] == [
        Verdict.PASS,
        Verdict.FAIL,
        Verdict.PASS,
        Verdict.FAIL,
    ]
    assert "ended by SIGABRT" in records["test_ends_its_process"].reasons[0].text


@TWINS
def test_without_a_route_nothing_is_proven_whatever_passes(tmp_path: Path) -> None:
    ended = qualify(tmp_path, GOOD)
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "Nothing was proven on hardware" in ended.stdout
    assert "To do: run it where a GPU and an RDMA NIC are" in ended.stdout


@pytest.mark.parametrize(
    "options",
    [
        *(["--profile", "never"], ["--seed", "-1"], ["--suites", "/never"], ["more"], ["-k", "("]),
        # The cases of a job are its pairs.
        *(["--mpi", "-k", "good"], ["--mpi", "--json"], ["--mpi"]),
    ],
)
def test_wrong_usage_ends_with_2(tmp_path: Path, options: list[str]) -> None:
    ended = qualify(tmp_path, GOOD, *options)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_missing_twins_end_with_3(tmp_path: Path) -> None:
    ended = qualify(tmp_path, GOOD, "--software", GDRKIT_TWINS_LIB=str(tmp_path))
    assert ended.returncode == 3
    assert ended.stderr.strip().endswith("To do: pip install 'gdrkit[software]'")
    assert len(ended.stderr.splitlines()) == 1


@TWINS
def test_damaged_twins_end_with_3_and_still_leave_a_report(tmp_path: Path) -> None:
    twins = {
        "ibverbs": "libibverbs.so.1",
        "cuda": "libcuda.so.1",
        "cufile": "libcufile.so.0",
        "hlthunk": "libhl-thunk.so",
    }
    for folder, name in twins.items():
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / name).write_bytes(b"\x7fELF")
    variables = {"GDRKIT_TWINS_LIB": str(tmp_path / "lib"), "LD_LIBRARY_PATH": ""}
    ended = qualify(tmp_path, GOOD, "--software", "--profile", "any", **variables)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    assert "The set-up of this machine is not complete" in ended.stdout
    assert (tmp_path / "report" / "index.html").exists()


@pytest.fixture
def heeded(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that is not ignored, as nohup and a shell's background would have it; children inherit that."""
    before = signal.getsignal(request.param)
    if before is signal.SIG_IGN:
        signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


@pytest.fixture
def background() -> Iterator[None]:
    """What is started meanwhile ignores the interrupt, as a shell has it for what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def check_that_all_ends(tmp_path: Path, number: signal.Signals) -> None:
    """The case closes what it has open. Its child ignores the interrupt, and has the FIFO open while it lives."""
    command = [*command_of(tmp_path, SLOW), "--software"]
    os.mkfifo(tmp_path / "suites" / "alive")
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running,
        # It is not opened before the other end is.
        (tmp_path / "suites" / "alive").open("rb", buffering=0) as alive,
    ):
        assert alive.read(1) == b"."
        running.send_signal(number)
        assert running.wait(60) == 128 + number
        assert (tmp_path / "suites" / "closed").exists()
        assert select.select([alive], [], [], 10)[0], "what the case has started still lives"
        assert alive.read(1) == b""


@TWINS
@pytest.mark.parametrize("heeded", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], indirect=True)
def test_a_signal_ends_the_case_and_all_that_it_started(tmp_path: Path, heeded: signal.Signals) -> None:
    check_that_all_ends(tmp_path, heeded)


@TWINS
@pytest.mark.parametrize("heeded", [signal.SIGINT, signal.SIGTERM], indirect=True)
def test_interrupted_run_is_reported_as_interrupted(tmp_path: Path, heeded: signal.Signals) -> None:
    command = [*command_of(tmp_path, GOOD + SLOW), "--software", "--seed", "3"]
    os.mkfifo(tmp_path / "suites" / "alive")
    began = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running,
        (tmp_path / "suites" / "alive").open("rb", buffering=0) as alive,
    ):
        assert alive.read(1) == b"."
        running.send_signal(heeded)
        told, _ = running.communicate(timeout=60)
    report = [sys.executable, "-m", "gdrkit", "report"]
    # Its last line is a command that makes the report.
    *_, words, place = told.splitlines()[-1].rpartition("gdrkit report ")
    assert (words, place) == ("gdrkit report ", str(tmp_path / "report"))
    subprocess.run([*report, *shlex.split(place)], check=True, capture_output=True)
    made = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (made["state"], made["exit_code"], made["verdict"]) == ("interrupted", 1, "The run did not end")
    assert (made["seed"], made["profile"] != "", made["host"]) == (3, True, os.uname().nodename)
    assert began <= made["started"] <= dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert any("of 2 cases have no record" in cause for cause in made["causes"]) or made["counts"]["fail"] == 1
    subprocess.run([*report, "--fleet", str(tmp_path)], check=True, capture_output=True)
    assert json.loads((tmp_path / "fleet.json").read_text())["tally"] == {"interrupted": 1}


@TWINS
@pytest.mark.parametrize("heeded", [signal.SIGTERM], indirect=True)
def test_process_that_outlives_sigkill_is_left(tmp_path: Path, heeded: signal.Signals) -> None:
    """As one that hangs in a driver (state D): nobody can collect it while its tracer does not."""
    command = [*command_of(tmp_path, HELD), "--software"]
    for name in ("alive", "end"):
        os.mkfifo(tmp_path / "suites" / name)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert (tmp_path / "suites" / "alive").read_text() == "."
        (tmp_path / "suites" / "alive").write_text("")
        running.send_signal(heeded)
        try:
            told, _ = running.communicate(timeout=60)
        finally:
            (tmp_path / "suites" / "end").write_text("")
    assert running.returncode == 128 + heeded
    assert re.search(r"process \d+ did not end within 5 s of SIGKILL \(state Z\) and was left behind", told)


@TWINS
@pytest.mark.parametrize("heeded", [signal.SIGINT], indirect=True)
def test_run_interrupted_while_collecting_has_no_plan(tmp_path: Path, heeded: signal.Signals) -> None:
    """pytest ends a collection that is interrupted with the cases that it has until then, chosen or not."""
    command = [*command_of(tmp_path, GOOD), "--software"]
    alive = tmp_path / "suites" / "alive"
    os.mkfifo(alive)
    blocked = f"open({str(alive)!r}, 'w').write('.')\nopen({str(alive)!r}).read()"
    (tmp_path / "suites" / "test_later.py").write_text(blocked)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        with alive.open("rb", buffering=0) as opened:
            assert opened.read(1) == b"."
        running.send_signal(heeded)
        assert running.wait(60) == 128 + heeded
    assert not (tmp_path / "report" / "plan.json").exists()
    command = [sys.executable, "-m", "gdrkit", "report", str(tmp_path / "report")]
    subprocess.run(command, check=True, capture_output=True)
    made = json.loads((tmp_path / "report" / "report.json").read_text())
    assert made["causes"] == ["its process ended before all cases had ended"]
    assert made["started"] > "2026"


@TWINS
@pytest.mark.parametrize("heeded", [signal.SIGTERM], indirect=True)
@pytest.mark.usefixtures("background")
def test_a_signal_ends_all_in_the_background_too(tmp_path: Path, heeded: signal.Signals) -> None:
    check_that_all_ends(tmp_path, heeded)
