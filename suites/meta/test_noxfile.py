"""The nox sessions that run cases add their default cases only if the arguments name no cases."""

from __future__ import annotations

import subprocess
import sys

import pytest

from automation.commands import ROOT
from automation.gdrkit_commands import add_default_cases

FOR_EACH_SESSION = pytest.mark.parametrize("session", ["bench", "direct", "suites"])
DEFAULT_CASES = ["suites", "--ignore=suites/meta"]
# These arguments name no cases: `docs` is the value of an option, although it is an existing folder.
OPTIONS = ["-k", "readmes", "--ignore", "docs"]


@pytest.mark.parametrize("options", [[], OPTIONS, ["--ignore=suites/rdma", "--records", "."]])
def test_default_cases_are_added_if_none_are_named(options: list[str]) -> None:
    assert add_default_cases(options, *DEFAULT_CASES) == [*DEFAULT_CASES, *options]


NAMED_CASES = [
    "suites",
    "suites/rdma/test_first_light.py::test_x[a/b]",
    "./hardware/throughput",
    str(ROOT / "suites" / "gds"),
]


@pytest.mark.parametrize("named_case", NAMED_CASES)
def test_named_cases_replace_the_default(named_case: str) -> None:
    for arguments in ([named_case], [*OPTIONS, named_case], [named_case, *OPTIONS]):
        assert add_default_cases(arguments, *DEFAULT_CASES) == arguments


def run_collection(session: str, *arguments: str) -> int:
    """Collect the cases of a nox session with these arguments, run none of them, and return the exit code."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", session, "--"]
    return subprocess.run([*command, "--collect-only", "-q", *arguments], capture_output=True, check=False).returncode


@FOR_EACH_SESSION
def test_options_alone_do_not_select_meta(session: str) -> None:
    # `-k readmes` matches only cases of suites/meta, which are not default cases, so no case is selected.
    assert run_collection(session, *OPTIONS) == 2


@FOR_EACH_SESSION
def test_options_apply_to_named_cases(session: str) -> None:
    assert run_collection(session, *OPTIONS, "suites/meta/test_readmes.py") == 0
