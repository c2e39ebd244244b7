"""Command and environment of child processes that run modules of the suites."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["module_command", "suites_environ"]

_SUITES = Path(__file__).resolve().parents[1]


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of the suites, such as ``usrbio.borrower``, as a program."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def suites_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` with the folder of the suites first in PYTHONPATH."""
    path = os.pathsep.join(filter(None, (str(_SUITES), environ.get("PYTHONPATH", ""))))
    return {**environ, "PYTHONPATH": path}
