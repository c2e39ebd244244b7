"""Child processes that run a module of the suites, or a program text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["module_command", "run_python", "run_sweep", "suites_environ"]

_SUITES = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of the suites, such as ``usrbio.borrower``, as a program."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def suites_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` with the folder of the suites first in PYTHONPATH."""
    python_path = os.pathsep.join(filter(None, (str(_SUITES), environ.get("PYTHONPATH", ""))))
    return {**environ, "PYTHONPATH": python_path}


def run_python(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and additional variables, and return its output and its exit code."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**suites_environ(), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def run_sweep(module: str, *arguments: object, points_min: int, **environ: str) -> None:
    """Run a module that interrupts a call at each point and prints the number of points.

    Require exit code 0 and at least `points_min` points.
    """
    completed = run_python("-m", module, *arguments, **environ)
    assert completed.returncode == 0, completed.stderr
    output_match = re.fullmatch(r"(\d+) points\n", completed.stdout)
    assert output_match, completed.stdout
    assert int(output_match[1]) >= points_min
