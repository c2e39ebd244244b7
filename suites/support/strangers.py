"""Another user, for the cases about what is refused to one.

The folder of pytest lets nobody else in, so what is refused there shows nothing; and a checkout may lie where another
user cannot read it, so a stranger imports what it needs before it becomes one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["DOCTOR_AS_NOBODY", "become_nobody", "open_folder", "run_stranger", "stranger"]

_SUITES = Path(__file__).resolve().parents[1]
_NOBODY = 65534
# The doctor without its acts.
DOCTOR_AS_NOBODY = """
import sys
import gdrkit.cli, gdrkit.inventory, gdrkit.report.doctor, importlib.metadata
from support.strangers import become_nobody
become_nobody()
sys.argv = ["gdrkit", "doctor", "--read-only"]
gdrkit.cli.main()
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder


def become_nobody() -> None:
    """Be the user nobody from now on."""
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def stranger(program: str, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a Python program that may import from the suites."""
    path = os.pathsep.join(filter(None, (str(_SUITES), environ.get("PYTHONPATH", ""))))
    return [sys.executable, "-c", program], {**environ, "PYTHONPATH": path}


def run_stranger(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run such a program; it calls :func:`become_nobody` itself."""
    command, environ = stranger(program, os.environ)
    return subprocess.run(
        [*command, *arguments], env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
