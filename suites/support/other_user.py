"""Programs that run as another user (uid 65534), for the cases about permissions.

The unprivileged user cannot enter pytest's temporary folder, so a program uses a folder of
:func:`folder_for_all_users`. The user may also be unable to read the checkout, so a program imports all its modules
before it calls :func:`become_unprivileged`.
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

__all__ = [
    "UNPRIVILEGED_DOCTOR",
    "become_unprivileged",
    "folder_for_all_users",
    "make_program_command",
    "run_program",
]

# User id and group id of the unprivileged user.
_UID = _GID = 65534
# A program that runs `gdrkit doctor --read-only` as the unprivileged user. The option omits the checks that allocate or
# register memory or transfer bytes.
UNPRIVILEGED_DOCTOR = """
import sys
import gdrkit.cli, gdrkit.inventory, gdrkit.report.doctor, importlib.metadata
from support.other_user import become_unprivileged
become_unprivileged()
sys.argv = ["gdrkit", "doctor", "--read-only"]
gdrkit.cli.main()
"""


@contextlib.contextmanager
def folder_for_all_users() -> Iterator[Path]:
    """Yield a temporary folder that every user may enter and list."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-") as folder_name:
        folder = Path(folder_name).resolve()
        folder.chmod(0o755)
        yield folder


def become_unprivileged() -> None:
    """Change the user and the group of this process to 65534. This cannot be undone."""
    os.setgroups([])
    os.setgid(_GID)
    os.setuid(_UID)


def make_program_command(program: str, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a Python program, and `environ` with the folder of the suites in PYTHONPATH."""
    return [sys.executable, "-c", program], suites_environ(environ)


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program, and return its exit code and output. The program must call :func:`become_unprivileged`."""
    command, environ = make_program_command(program, os.environ)
    # The unprivileged user may be unable to enter the current folder, so the program runs in /.
    return subprocess.run(
        [*command, *arguments], env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )
