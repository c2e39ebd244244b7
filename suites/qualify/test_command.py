"""The command `gdrkit qualify`: its files, its output, its exit code, and its reaction to signals."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
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
from gdrkit.qualify import CasePlan, PlannedCase
from gdrkit.qualify.progress import LineProgress
from gdrkit.report import Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA), verbs.nic(), cuda.device())
# `gdrkit qualify` runs only cases with the mark `qualify`.
PASSING_CASES = '''
import pytest
@pytest.mark.qualify
def test_passes():
    """Passes."""
def test_without_the_mark():
    raise AssertionError
'''
FAILING_CASES = """
import os, pytest
pytestmark = pytest.mark.qualify
def test_before(): ...
def test_aborts():
    os.abort()
def test_after(): ...
def test_fails():
    assert [1] == [2]
"""
# The child of the case ignores SIGINT, writes a dot to the FIFO `alive`, and has the FIFO open until it ends.
SLOW_CASE = """
import pathlib, subprocess, sys, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.fixture
def cleaned_up():
    yield
    time.sleep(0.5)
    (HERE / "cleaned-up").touch()
@pytest.mark.qualify
def test_slow(cleaned_up):
    child_code = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); fifo = open(sys.argv[1], 'w')"
    child_code += "; fifo.write('.'); fifo.flush(); signal.alarm(60); signal.pause()"
    subprocess.Popen([sys.executable, "-c", child_code, HERE / "alive"]).wait()
"""
TRACED_CASE = """
import ctypes, pathlib, subprocess, sys, pytest
HERE = pathlib.Path(__file__).parent
@pytest.mark.qualify
def test_traced():
    # The case starts a process in a new session that traces the process of the case. The kernel reports the end of a
    # traced process to the tracer first. While the tracer lives, wait() of the parent does not see the end.
    # The tracer writes "." to the FIFO `alive` if it traces, else "!". It ends after the test has opened `alive` and
    # `end`.
    # 0x4206 is PTRACE_SEIZE. 0x59616D61 is PR_SET_PTRACER: with -1, any process may trace this process.
    tracer_code = "import ctypes, os, signal, sys; library = ctypes.CDLL(None, use_errno=True)"
    tracer_code += "; traced_id = os.getppid(); failed = library.ptrace(0x4206, traced_id, None, None)"
    tracer_code += "; signal.alarm(120)"
    tracer_code += "; open(sys.argv[1], 'w').write('!' if failed else '.'); open(sys.argv[1]).read()"
    tracer_code += "; open(sys.argv[2]).read()"
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))
    command = [sys.executable, "-c", tracer_code, HERE / "alive", HERE / "end"]
    subprocess.Popen(command, start_new_session=True).wait()
"""
REPORT_FILES = {"facts.json", "index.html", "junit.xml", "plan.json", "records.jsonl", "run.json", "summary.md"}


def make_qualify_command(folder: Path, case_source: str) -> list[str]:
    """Write the cases in the Python text `case_source` to a file, and return the command that runs them."""
    suites_folder = folder / "suites"
    suites_folder.mkdir()
    (suites_folder / "test_cases.py").write_text(case_source)
    return [
        sys.executable,
        "-m",
        "gdrkit",
        "qualify",
        "--suites",
        str(suites_folder),
        "--output",
        str(folder / "report"),
    ]


def run_qualify(folder: Path, case_source: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*make_qualify_command(folder, case_source), *options]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def find_first_result_line(output: str) -> str:
    """Return the first line of the output that is not indented. Indented lines report the progress of the run."""
    return next(line for line in output.splitlines() if not line.startswith("    "))


@NEEDS_TWINS
def test_passing_software_run_exits_with_0(tmp_path: Path) -> None:
    process = run_qualify(tmp_path, PASSING_CASES, "--software", "--seed", "3", "--json")
    assert process.returncode == 0, process.stderr
    printed_object = json.loads(process.stdout)
    assert printed_object["run"]["verdict"] == "The code passed on software twins"
    assert {status["state"] for status in printed_object["routes"]} <= {"unproven", "not_possible"}
    assert find_first_result_line(process.stderr) == "software twins: this proves the code, not this machine"
    report_folder = tmp_path / "report"
    assert {path.name for path in report_folder.iterdir()} >= REPORT_FILES
    (record,) = read_records(report_folder / "records.jsonl")
    assert (record.case, record.title, record.seed) == ("test_cases.py::test_passes", "Passes.", 3)
    assert record.command.startswith("gdrkit qualify --suites")
    assert (
        (report_folder / "summary.md")
        .read_text()
        .startswith("software twins: this proves the code, not this machine\n")
    )


@NEEDS_TWINS
def test_case_that_aborts_fails_and_the_others_still_run(tmp_path: Path) -> None:
    process = run_qualify(tmp_path, FAILING_CASES, "--software")
    assert process.returncode == 1, process.stdout
    assert find_first_result_line(process.stdout) == "software twins: this proves the code, not this machine"
    assert "2 of 4 cases failed" in process.stdout
    records = {record.case.partition("::")[2]: record for record in read_records(tmp_path / "report" / "records.jsonl")}
    assert [record.verdict for record in records.values()] == [
        Verdict.PASS,
        Verdict.FAIL,
        Verdict.PASS,
        Verdict.FAIL,
    ]
    assert "ended by SIGABRT" in records["test_aborts"].reasons[0].text


@NEEDS_TWINS
def test_passing_run_without_a_route_proves_nothing(tmp_path: Path) -> None:
    process = run_qualify(tmp_path, PASSING_CASES)
    assert process.returncode == 4, process.stdout + process.stderr
    assert "Nothing was proven on hardware" in process.stdout
    assert "To do: run it on a machine with a GPU and an RDMA NIC" in process.stdout


@pytest.mark.parametrize(
    "options",
    [
        *(["--profile", "never"], ["--seed", "-1"], ["--suites", "/never"], ["more"], ["-k", "("]),
        # --mpi runs no cases, so it cannot be combined with -k, --json or --suites, which run_qualify() always adds.
        *(["--mpi", "-k", "passes"], ["--mpi", "--json"], ["--mpi"]),
    ],
)
def test_usage_error_exits_with_2(tmp_path: Path, options: list[str]) -> None:
    process = run_qualify(tmp_path, PASSING_CASES, *options)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_missing_twins_exit_with_3(tmp_path: Path) -> None:
    process = run_qualify(tmp_path, PASSING_CASES, "--software", GDRKIT_TWINS_LIB=str(tmp_path))
    assert process.returncode == 3
    assert process.stderr.strip().endswith(", which `nox -s wheels` builds in a checkout")
    assert len(process.stderr.splitlines()) == 1


@NEEDS_TWINS
def test_damaged_twins_exit_with_3_and_write_a_report(tmp_path: Path) -> None:
    soname_by_folder = {
        "ibverbs": "libibverbs.so.1",
        "cuda": "libcuda.so.1",
        "cufile": "libcufile.so.0",
        "hlthunk": "libhl-thunk.so",
    }
    for folder, soname in soname_by_folder.items():
        (tmp_path / "lib" / folder).mkdir(parents=True)
        # A library that has only the ELF magic number cannot be loaded.
        (tmp_path / "lib" / folder / soname).write_bytes(b"\x7fELF")
    variables = {"GDRKIT_TWINS_LIB": str(tmp_path / "lib"), "LD_LIBRARY_PATH": ""}
    process = run_qualify(tmp_path, PASSING_CASES, "--software", "--profile", "any", **variables)
    assert process.returncode == 3, process.stdout + process.stderr
    assert "The set-up of this machine is not complete" in process.stdout
    assert (tmp_path / "report" / "index.html").exists()


@pytest.fixture
def default_signal(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Restore the default action of the signal in the parameter, and return the signal. Children inherit the action.

    Under nohup, this process ignores SIGHUP. Its children would ignore the signal too.
    """
    original_handler = signal.getsignal(request.param)
    if original_handler is signal.SIG_IGN:
        signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, original_handler)


@pytest.fixture
def ignored_sigint() -> Iterator[None]:
    """Ignore SIGINT in this process and its children, as a shell does for background processes."""
    original_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, original_handler)


def check_signal_ends_case_and_child(tmp_path: Path, signal_number: signal.Signals) -> None:
    """Send a signal to a run, and check that its case cleans up and that the child process of the case ends.

    The child ignores SIGINT. It has a FIFO open as long as it lives, so the end of the FIFO shows the end of the child.
    """
    command = [*make_qualify_command(tmp_path, SLOW_CASE), "--software"]
    os.mkfifo(tmp_path / "suites" / "alive")
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
        # Opening a FIFO waits until the child opens the other end.
        (tmp_path / "suites" / "alive").open("rb", buffering=0) as alive_fifo,
    ):
        assert alive_fifo.read(1) == b"."
        process.send_signal(signal_number)
        assert process.wait(60) == 128 + signal_number
        assert (tmp_path / "suites" / "cleaned-up").exists()
        assert select.select([alive_fifo], [], [], 10)[0], "the child of the case still lives"
        assert alive_fifo.read(1) == b""


@NEEDS_TWINS
@pytest.mark.parametrize("default_signal", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], indirect=True)
def test_signal_ends_the_case_and_its_children(tmp_path: Path, default_signal: signal.Signals) -> None:
    check_signal_ends_case_and_child(tmp_path, default_signal)


@NEEDS_TWINS
@pytest.mark.parametrize("default_signal", [signal.SIGINT, signal.SIGTERM], indirect=True)
def test_interrupted_run_is_reported_as_interrupted(tmp_path: Path, default_signal: signal.Signals) -> None:
    command = [*make_qualify_command(tmp_path, PASSING_CASES + SLOW_CASE), "--software", "--seed", "3"]
    os.mkfifo(tmp_path / "suites" / "alive")
    earliest_start_time = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process,
        (tmp_path / "suites" / "alive").open("rb", buffering=0) as alive_fifo,
    ):
        assert alive_fifo.read(1) == b"."
        process.send_signal(default_signal)
        output, _ = process.communicate(timeout=60)
    report_command = [sys.executable, "-m", "gdrkit", "report"]
    # The last line of the output contains the command that writes the report.
    *_, command_name, argument = output.splitlines()[-1].rpartition("gdrkit report ")
    assert (command_name, argument) == ("gdrkit report ", str(tmp_path / "report"))
    subprocess.run([*report_command, *shlex.split(argument)], check=True, capture_output=True)
    report_data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report_data["state"], report_data["exit_code"]) == ("interrupted", 1)
    assert report_data["verdict"] == "The run did not end"
    assert (report_data["seed"], report_data["profile"] != "", report_data["host"]) == (3, True, os.uname().nodename)
    assert earliest_start_time <= report_data["started"] <= dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The case that was interrupted has no record, or a record with the verdict fail.
    assert (
        any(re.search(r"no record of \d of 2 cases", cause) for cause in report_data["causes"])
        or report_data["counts"]["fail"] == 1
    )
    subprocess.run([*report_command, "--fleet", str(tmp_path)], check=True, capture_output=True)
    assert json.loads((tmp_path / "fleet.json").read_text())["tally"] == {"interrupted": 1}


@NEEDS_TWINS
@pytest.mark.parametrize("default_signal", [signal.SIGTERM], indirect=True)
def test_process_that_outlives_sigkill_is_abandoned(tmp_path: Path, default_signal: signal.Signals) -> None:
    """The process of the case has a tracer, so it stays a zombie after SIGKILL.

    The zombie stands for a process that hangs in a driver, which survives SIGKILL too.
    """
    command = [*make_qualify_command(tmp_path, TRACED_CASE), "--software"]
    for fifo_name in ("alive", "end"):
        os.mkfifo(tmp_path / "suites" / fifo_name)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert (tmp_path / "suites" / "alive").read_text() == "."
        # This second opening of `alive` lets the tracer go on. It then waits until the test opens `end`.
        (tmp_path / "suites" / "alive").write_text("")
        process.send_signal(default_signal)
        try:
            output, _ = process.communicate(timeout=60)
        finally:
            (tmp_path / "suites" / "end").write_text("")
    assert process.returncode == 128 + default_signal
    assert re.search(r"process \d+ did not end within 5 s of SIGKILL \(state Z\) and was left behind", output)


@NEEDS_TWINS
@pytest.mark.parametrize("default_signal", [signal.SIGINT], indirect=True)
def test_run_interrupted_while_collecting_has_no_plan(tmp_path: Path, default_signal: signal.Signals) -> None:
    """Pytest collects the cases before it runs them. The list of an interrupted collection must not become the plan.

    The list lacks cases, and -k has not been applied to it.
    """
    command = [*make_qualify_command(tmp_path, PASSING_CASES), "--software"]
    fifo_path = tmp_path / "suites" / "alive"
    os.mkfifo(fifo_path)
    # At its import, this module writes to the FIFO. It then blocks, because nothing else opens the FIFO for writing.
    blocking_source = f"open({str(fifo_path)!r}, 'w').write('.')\nopen({str(fifo_path)!r}).read()"
    (tmp_path / "suites" / "test_later.py").write_text(blocking_source)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        with fifo_path.open("rb", buffering=0) as fifo:
            assert fifo.read(1) == b"."
        process.send_signal(default_signal)
        assert process.wait(60) == 128 + default_signal
    assert not (tmp_path / "report" / "plan.json").exists()
    report_command = [sys.executable, "-m", "gdrkit", "report", str(tmp_path / "report")]
    subprocess.run(report_command, check=True, capture_output=True)
    report_data = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report_data["causes"] == ["its process ended before all cases had completed"]
    assert report_data["started"] > "2026"


@NEEDS_TWINS
@pytest.mark.parametrize("default_signal", [signal.SIGTERM], indirect=True)
@pytest.mark.usefixtures("ignored_sigint")
def test_signal_ends_all_processes_of_a_background_run(tmp_path: Path, default_signal: signal.Signals) -> None:
    check_signal_ends_case_and_child(tmp_path, default_signal)


def test_log_is_not_silent_while_a_case_runs() -> None:
    log = io.StringIO()
    progress = LineProgress(log, period_s=0.01)
    with contextlib.closing(progress):
        while "    querying the APIs of this machine (0 s)\n" not in log.getvalue():
            assert progress.is_reporting
        case = PlannedCase(case="a.py::test_slow", title="", needs=(), unmet=())
        progress.begin_cases(CasePlan(profile="any", cases=(case,)))
        while "    a.py::test_slow (0 s)\n" not in log.getvalue():
            assert progress.is_reporting
    assert not progress.is_reporting
