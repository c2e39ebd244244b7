"""Programs that run as another user (uid 65534), for the cases about permissions.

Such a user cannot enter pytest's temporary folder, and may not be able to read the checkout. So a program imports all
modules that it needs before it calls :func:`become_unprivileged`, and works in a folder of :func:`open_folder`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from support.python_child import suites_environ

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["UNPRIVILEGED_DOCTOR", "become_unprivileged", "open_folder", "program_command", "run_program"]

_UID = 65534
# `gdrkit doctor` without the checks that act on devices.
UNPRIVILEGED_DOCTOR = """
import sys
import gdrkit.cli, gdrkit.inventory, gdrkit.report.doctor, importlib.metadata
from support.other_user import become_unprivileged
become_unprivileged()
sys.argv = ["gdrkit", "doctor", "--read-only"]
gdrkit.cli.main()
"""


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """Yield a temporary folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder


def become_unprivileged() -> None:
    """Change the user and group of this process to 65534, for good."""
    os.setgroups([])
    os.setgid(_UID)
    os.setuid(_UID)


def program_command(program: str, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a Python program that can import from the suites."""
    return [sys.executable, "-c", program], suites_environ(environ)


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program, which itself calls :func:`become_unprivileged`, and return its output."""
    command, environ = program_command(program, os.environ)
    return subprocess.run(
        [*command, *arguments], env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
