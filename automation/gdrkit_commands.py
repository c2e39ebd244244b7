"""The beginnings of the commands that sessions run in the environment of the suites."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automation.commands import ROOT, output_of, stop

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cases", "on_twins", "plan_sessions", "pytest"]


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


def on_twins(run: Path, *options: str) -> list[str]:
    """Return the first words of a command that runs on the software twins, apart from all other processes on twins."""
    return [str(run / "gdrkit"), "run", "--software", "--isolated", *options, "--"]
