"""The pytest plugin for other projects is off by default, and handles only test cases that declare needs."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from support.records import TWIN_LIBRARY, make_facts, make_library

from gdrkit.inventory import CudaFacts, VerbsFacts
from gdrkit.report import Record, Verdict, read_records

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.inventory import Facts

# Tests of another project. The plugin must not judge the first three, because they declare no needs.
MIXED_TESTS = """
import os, pytest
from gdrkit.harness.needs import cuda, host, needs, verbs

def test_without_needs_leaks():
    os.open("/dev/null", os.O_RDONLY)

def test_without_needs_skips():
    pytest.skip("not today")

@pytest.mark.xfail
def test_without_needs_fails():
    assert False

@needs(verbs.nic(), cuda.device(count_min=4))
def test_with_needs(nic): ...

@needs(host.module("json"))
def test_whose_needs_are_met(evidence, seed):
    evidence.number("time_ms", 1.5)
    assert seed >= 0
"""
# Tests that fail with the plugin, but not with pytest alone: one skips itself, the other leaves a file open.
FAILING_TESTS = """
import os, pytest
from gdrkit.harness.needs import host, needs

@needs(host.module("json"))
def test_with_needs_skips():
    pytest.skip("hides something")

@needs(host.module("json"))
def test_with_needs_leaks():
    os.open("/dev/null", os.O_RDONLY)
"""


def run_pytest(
    project: Path, source: str, *options: str, facts: Facts | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a project outside of the checkout. Only the plugin of gdrkit is loaded."""
    (project / "test_project.py").write_text(textwrap.dedent(source))
    (project / "facts.json").write_text((facts or make_facts()).to_json())
    command = [sys.executable, "-m", "pytest", "-p", "gdrkit.harness.user", "-p", "no:cacheprovider", "-v", *options]
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=project, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def run_pytest_with_plugin(
    project: Path, source: str, *options: str, facts: Facts | None = None
) -> tuple[subprocess.CompletedProcess[str], dict[str, Record]]:
    """Enable the plugin in the settings, run pytest, and return its result and the records by the name of the test."""
    settings = "[tool.pytest.ini_options]\ngdrkit = true\naddopts = '--strict-markers --strict-config'\n"
    (project / "pyproject.toml").write_text(settings)
    options = ("--gdrkit-facts", "facts.json", "--gdrkit-records", "records.jsonl", *options)
    completed = run_pytest(project, source, *options, facts=facts)
    records_file = project / "records.jsonl"
    record_list = read_records(records_file) if records_file.exists() else ()
    records = {record.case.partition("::")[2]: record for record in record_list}
    return completed, records


def test_plugin_handles_only_cases_with_needs(tmp_path: Path) -> None:
    completed, records = run_pytest_with_plugin(tmp_path, MIXED_TESTS)
    assert completed.returncode == 0, completed.stdout
    outcome_counts = re.findall(r"(\d+) (passed|skipped|xfailed|not run|failed)", completed.stdout.splitlines()[-1])
    assert sorted(outcome_counts) == [("1", "not run"), ("1", "skipped"), ("1", "xfailed"), ("2", "passed")]
    assert "verbs.nic(count_min=1): verbs was not queried" in completed.stdout
    assert {name: record.verdict for name, record in records.items()} == {
        "test_with_needs": Verdict.NOT_RUN,
        "test_whose_needs_are_met": Verdict.PASS,
    }
    assert records["test_whose_needs_are_met"].numbers == {"time_ms": 1.5}


def test_unforeseen_unmet_need_fails_a_run_with_a_profile(tmp_path: Path) -> None:
    # Both APIs run on twins without devices. The profile `bare` describes such a machine, but it does not foresee that
    # a twin has no device.
    facts = dataclasses.replace(
        make_facts(),
        verbs=VerbsFacts(nics=(), libraries=(TWIN_LIBRARY,)),
        cuda=CudaFacts(
            driver_version="13.0", devices=(), libraries=(make_library("libcuda.so.1", notes=TWIN_LIBRARY.notes),)
        ),
    )
    completed, records = run_pytest_with_plugin(tmp_path, MIXED_TESTS, "--gdrkit-profile", "bare", facts=facts)
    assert completed.returncode == 1, completed.stdout
    expected_line = (
        "cuda.device(count_min=4): 4 CUDA devices needed, 0 found  NOT FORESEEN by profile bare: the run fails"
    )
    assert expected_line in completed.stdout
    assert [(reason.need, reason.foreseen) for reason in records["test_with_needs"].reasons] == [
        ("verbs.nic(count_min=1)", False),
        ("cuda.device(count_min=4)", False),
    ]
    # Without --gdrkit-profile, the plugin itself selects the profile `bare`. Then an unmet need does not fail the run.
    (tmp_path / "records.jsonl").unlink()
    completed, records = run_pytest_with_plugin(tmp_path, MIXED_TESTS, facts=facts)
    assert completed.returncode == 0, completed.stdout
    assert {record.profile for record in records.values()} == {"bare"}


def test_profile_any_foresees_every_unmet_need(tmp_path: Path) -> None:
    completed, records = run_pytest_with_plugin(tmp_path, MIXED_TESTS, "--gdrkit-profile", "any")
    assert completed.returncode == 0, completed.stdout
    assert [reason.foreseen for reason in records["test_with_needs"].reasons] == [True, True]


@pytest.mark.parametrize(
    ("profile", "expected_text"), [("bare", "profile bare does not describe this machine"), ("never", "not 'never'")]
)
def test_profile_that_does_not_fit_is_an_error(tmp_path: Path, profile: str, expected_text: str) -> None:
    completed, _ = run_pytest_with_plugin(tmp_path, MIXED_TESTS, "--gdrkit-profile", profile)
    # pytest exits with 4 after a usage error.
    assert completed.returncode == 4
    assert expected_text in completed.stderr


def test_case_with_needs_fails_if_it_skips_or_leaks(tmp_path: Path) -> None:
    completed, records = run_pytest_with_plugin(tmp_path, FAILING_TESTS)
    assert completed.returncode == 1
    assert {record.verdict for record in records.values()} == {Verdict.FAIL}
    assert "the case skipped itself" in records["test_with_needs_skips"].reasons[0].text
    assert "still open" in records["test_with_needs_leaks"].reasons[0].text


@pytest.mark.parametrize("is_enabled", [True, False], ids=["--gdrkit", "None"])
def test_disabled_plugin_is_an_error_for_a_case_with_needs(tmp_path: Path, *, is_enabled: bool) -> None:
    options = ["--gdrkit", "--gdrkit-facts=facts.json"] if is_enabled else []
    completed = run_pytest(tmp_path, MIXED_TESTS, *options)
    if is_enabled:
        assert completed.returncode == 0, completed.stdout
        return
    assert completed.returncode == 4
    assert "declares needs of gdrkit, but its pytest plugin is disabled" in completed.stderr
    assert "gdrkit = true" in completed.stderr


def test_disabled_plugin_changes_nothing_for_other_projects(tmp_path: Path) -> None:
    # The other project has its own mark `needs`, and no fixture `device`. gdrkit has both.
    source = "import pytest\n@pytest.mark.needs('coffee')\ndef test_a(): ...\ndef test_b(device): ...\n"
    completed = run_pytest(tmp_path, source)
    assert completed.returncode == 1
    assert "fixture 'device' not found" in completed.stdout
    assert "1 passed, 1 error" in completed.stdout


def test_disabled_plugin_loads_only_the_harness(tmp_path: Path) -> None:
    source = """
        import sys
        def test_loaded():
            packages = {name.split(".")[1] for name in sys.modules if name.startswith("gdrkit.")}
            assert packages == {"harness"}
    """
    completed = run_pytest(tmp_path, source)
    assert completed.returncode == 0, completed.stdout
