"""Functions that run commands for the nox sessions, and that end nox with the exit codes that the README lists."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import nox

__all__ = [
    "NOTHING_PROVEN",
    "PYTEST_BAD_OPTION",
    "ROOT",
    "SETUP_MISSING",
    "WRONG_USAGE",
    "call",
    "exit_unless_zero",
    "exit_with_pytest_code",
    "exit_with_setup_error",
    "fail_unless_zero",
    "get_output",
    "prepend_to_path",
    "prepend_to_pythonpath",
    "print_line",
    "run_or_exit",
]

ROOT = Path(__file__).resolve().parents[1]

# Exit codes of nox.
WRONG_USAGE, SETUP_MISSING, NOTHING_PROVEN = 2, 3, 4
# While a set-up command runs, a progress line is printed at this interval, in seconds.
_PROGRESS_PERIOD_S = 4.5
# The time that a command has to end after Ctrl-C, in seconds.
_INTERRUPT_TIMEOUT_S = 10.0
# Exit codes of pytest.
PYTEST_BAD_OPTION, PYTEST_NO_CASE = 4, 5


def print_line(line: str) -> None:
    """Print a line and flush it, so that it is printed before the output of the next child process."""
    print(line, flush=True)


def exit_with_setup_error(line: str) -> NoReturn:
    """Print what is missing or wrong, and exit from nox with code 3."""
    print_line(line)
    sys.exit(SETUP_MISSING)


def call(
    command: Sequence[str],
    *,
    environ: dict[str, str] | None = None,
    folder: Path = ROOT,
    printed_words_max: int = 1000,
    progress_period_s: float | None = None,
) -> int:
    """Print the first `printed_words_max` words of a command, run it and return its exit code.

    The command runs in `folder`, with the environment variables of nox and of `environ`. If `progress_period_s` is set,
    for a command that prints nothing itself, this function prints at that interval how long the command has been
    running.
    """
    shown_command = [os.path.relpath(word, ROOT) if word.startswith(f"{ROOT}/") else word for word in command]
    print_line(
        "> " + " ".join(shown_command[:printed_words_max]) + (" ..." if len(shown_command) > printed_words_max else "")
    )
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, **(environ or {})})
    start_s = time.monotonic()
    try:
        while True:
            try:
                return process.wait(progress_period_s)
            except subprocess.TimeoutExpired:
                print_line(f"  {Path(command[0]).name} is running ({time.monotonic() - start_s:.0f} s)")
    except BaseException:
        # Ctrl-C sends SIGINT to the command too. A command that ignores the signal is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_INTERRUPT_TIMEOUT_S)
        process.kill()
        process.wait()
        raise


def run_or_exit(command: Sequence[str], *, environ: dict[str, str] | None = None, folder: Path = ROOT) -> None:
    """Run a command of the set-up, and exit from nox with code 3 if it fails."""
    if call(command, environ=environ, folder=folder, progress_period_s=_PROGRESS_PERIOD_S) != 0:
        exit_with_setup_error("The set-up failed; the output above says why.")


def get_output(command: Sequence[str]) -> str:
    """Return what a command prints on standard output, or an empty string if the command cannot be started."""
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def prepend_to_path(folder: Path) -> dict[str, str]:
    """Return a PATH for child processes on which the programs in `folder` are found first."""
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def prepend_to_pythonpath(folder: Path) -> dict[str, str]:
    """Return a PYTHONPATH with which Python child processes can import the modules in `folder`."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))}


def exit_unless_zero(code: int) -> None:
    """Exit from nox with `code` unless it is 0.

    A session that fails without this function makes nox exit with code 1, whatever `code` is.
    """
    if code:
        sys.exit(code)


def exit_with_pytest_code(session: nox.Session, code: int) -> None:
    """End a session that ran pytest with exit code `code`.

    For the codes 4 (bad option) and 5 (no case was selected), nox exits with 2. For code 3, nox exits with 3. For other
    codes except 0, the session fails, and nox continues with the next session.
    """
    if code == SETUP_MISSING:
        sys.exit(SETUP_MISSING)
    if code in (PYTEST_BAD_OPTION, PYTEST_NO_CASE):
        sys.exit(WRONG_USAGE)
    fail_unless_zero(session, [code])


def fail_unless_zero(session: nox.Session, codes: Sequence[int]) -> None:
    """Fail the session if any of the exit codes is not 0. nox then continues with the next session."""
    if any(codes):
        session.error(f"{sum(map(bool, codes))} of {len(codes)} checks failed")
