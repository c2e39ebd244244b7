"""The beginnings of the commands that sessions run in the environment of the suites."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automation.commands import (
    PYTEST_BAD_OPTION,
    ROOT,
    SETUP_MISSING,
    exit_with_pytest_code,
    fail_unless_zero,
    output_of,
    say,
    stop,
)
from automation.side_by_side import Part, call_side_by_side, job_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nox

__all__ = ["cases", "on_twins", "plan_sessions", "pytest", "run_suites", "suite_folders"]

_SLOWEST_FIRST = ("qualify", "usrbio", "gds", "inventory", "storage", "property", "report", "gaudi")


def plan_sessions(run: Path) -> dict[str, dict[str, Any]]:
    """Return what `gdrkit plan` says of each session for hardware: whether it fits, why, and its arguments."""
    plan = output_of([str(run / "gdrkit"), "plan", "--json"])
    if not plan:
        stop(f"`{run / 'gdrkit'} plan --json` printed nothing; run it to see why.")
    sessions: dict[str, dict[str, Any]] = json.loads(plan)["sessions"]
    return {name: entry for name, entry in sessions.items() if entry["hardware"]}


def pytest(run: Path) -> list[str]:
    """Return the first words of a pytest command.

    The settings file is named, because pytest would search for one from any argument that is an existing path.
    """
    return [str(run / "python"), "-m", "pytest", "-c", str(ROOT / "suites" / "pytest.ini")]


def cases(arguments: Sequence[str], *default: str) -> list[str]:
    """Return the arguments of pytest, with the default cases in front if the arguments name none.

    A path below suites/ or hardware/ names cases. ``--ignore=suites/meta`` does not, and neither does another path
    that happens to exist, such as a file of records.
    """
    folders = {Path(os.path.relpath(ROOT / argument, ROOT)).parts[:1] for argument in arguments}
    return [*(() if folders & {("suites",), ("hardware",)} else default), *arguments]


def run_suites(session: nox.Session, run: Path, paths: Sequence[Path], *launcher: str) -> None:
    """Run the cases of each path in a process of its own, side by side, and end the session by their exit codes.

    Arguments of the session mean one process, which gets them: they can name cases, or a file for records.
    """
    beginning = [*launcher, *pytest(run)]
    parts = [Part(os.path.relpath(path, ROOT), (*beginning, "-q", str(path))) for path in paths]
    codes = call_side_by_side(parts, jobs=job_count())
    for name, code in codes.items():
        if code:
            say(f"{name} failed with exit code {code}; its output is above")
    for code in (SETUP_MISSING, PYTEST_BAD_OPTION):
        if code in codes.values():
            exit_with_pytest_code(session, code)
    fail_unless_zero(session, list(codes.values()))


def suite_folders() -> list[Path]:
    """Return the folders of the default suites, those that take longest first."""
    folders = {path.parent for path in (ROOT / "suites").glob("*/test_*.py")} - {ROOT / "suites" / "meta"}
    slow = [ROOT / "suites" / name for name in _SLOWEST_FIRST]
    return [*slow, *sorted(folders - set(slow)), ROOT / "hardware" / "throughput"]


def on_twins(run: Path, *options: str) -> list[str]:
    """Return the first words of a command that runs on the software twins, apart from all other processes on twins."""
    return [str(run / "gdrkit"), "run", "--software", "--isolated", *options, "--"]
