"""All sessions that run cases treat their arguments in the same way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automation.commands import ROOT
from automation.gdrkit_commands import cases

SESSIONS = pytest.mark.parametrize("session", ["bench", "direct", "suites"])
USUAL = ["suites", "--ignore=suites/meta"]
# Arguments that are existing folders, but values of options, name no cases.
OPTIONS = ["-k", "readmes", "--ignore", "docs"]


@pytest.mark.parametrize("options", [[], OPTIONS, ["--ignore=suites/rdma", "--records", "."]])
def test_where_no_cases_are_named_the_usual_ones_are_meant(options: list[str]) -> None:
    assert cases(options, *USUAL) == [*USUAL, *options]


NAMED = [
    "suites",
    "suites/rdma/test_first_light.py::test_x[a/b]",
    "./hardware/throughput",
    str(ROOT / "suites" / "gds"),
]


@pytest.mark.parametrize("named", NAMED)
def test_cases_that_are_named_are_the_only_ones(named: str) -> None:
    for given in ([named], [*OPTIONS, named], [named, *OPTIONS]):
        assert cases(given, *USUAL) == given


def collected(session: str, *arguments: str) -> int:
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", session, "--"]
    return subprocess.run([*command, "--collect-only", "-q", *arguments], capture_output=True, check=False).returncode


@SESSIONS
def test_options_alone_do_not_bring_the_cases_about_the_house(session: str) -> None:
    assert collected(session, *OPTIONS) == 2  # There is no such case.


@SESSIONS
def test_options_are_for_the_cases_that_are_named(session: str) -> None:
    assert collected(session, *OPTIONS, "suites/meta/test_readmes.py") == 0
