"""Creation of the virtual environments in `.nox/`. An environment is created again only if its inputs change."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from automation.commands import ROOT, call, exit_with_setup_error, print_line, run_or_exit
from automation.machine import python_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["BUILD_CONSTRAINT_VARIABLES", "ENVIRONMENTS", "compute_digest", "ensure_environment", "lock_environments"]

ENVIRONMENTS = ROOT / ".nox"
# Environment variables that name a file of constraints for pip. The file limits the version of Cython, because pyverbs
# 59.0 does not build with later releases. pip since 25.3 reads PIP_BUILD_CONSTRAINT, and an older pip reads
# PIP_CONSTRAINT.
BUILD_CONSTRAINT_VARIABLES = dict.fromkeys(
    ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(ROOT / ".ci" / "build-constraints.txt")
)


def ensure_environment(
    name: str,
    *,
    python: str,
    requirements: Sequence[str],
    input_files: Iterable[Path] = (),
    optional_requirements: Sequence[str] = (),
) -> Path:
    """Create the virtual environment `name`, unless it exists and is up to date. Return its bin folder.

    The environment is created again if the interpreter, a requirement or one of the `input_files` has changed. The
    requirements in `optional_requirements` are installed without their dependencies. If pip cannot install them, for
    example because no wheel fits this machine, the environment is used without them, and the next call tries to install
    them again.
    """
    folder = ENVIRONMENTS / name
    digest_file, optional_digest_file = folder / "made-from", folder / "made-from-optional"
    expected_digest = compute_digest(
        [python, str(python_version(python)), *requirements, *optional_requirements], input_files
    )
    with lock_environments():
        pip_install = [str(folder / "bin" / "pip"), "install", "--quiet"]
        if not _has_digest(digest_file, expected_digest):
            print_line(f"making the environment {folder.relative_to(ROOT)}")
            if Path(sys.prefix) == folder:
                exit_with_setup_error(
                    f"nox runs in {folder.relative_to(ROOT)} and cannot replace that environment. "
                    "Start nox from another environment."
                )
            run_or_exit([sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", python, str(folder)])
            run_or_exit([*pip_install, *requirements], environ=BUILD_CONSTRAINT_VARIABLES)
            digest_file.write_text(expected_digest)
        if optional_requirements and not _has_digest(optional_digest_file, expected_digest):
            if call([*pip_install, "--no-deps", *optional_requirements]) == 0:
                optional_digest_file.write_text(expected_digest)
            else:
                print_line(f"Continuing without {', '.join(optional_requirements)}: their cases will not run.")
    return folder / "bin"


def _has_digest(digest_file: Path, expected_digest: str) -> bool:
    return digest_file.exists() and digest_file.read_text() == expected_digest


@contextlib.contextmanager
def lock_environments() -> Iterator[None]:
    """Hold the lock that lets only one nox at a time change the environments and builds of this tree."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield


def compute_digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """Return the SHA-256 of the words, and of the paths and contents of the files."""
    sha256 = hashlib.sha256("\0".join(words).encode())
    for path in files:
        sha256.update(f"\0{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return sha256.hexdigest()
