"""The virtual environments in `.nox/`, each made again only when its requirements have changed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from automation.commands import ROOT, call, require, say, stop
from automation.machine import python_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["BUILD_CONSTRAINTS", "ENVIRONMENTS", "digest", "ensure_environment", "lock_environments"]

ENVIRONMENTS = ROOT / ".nox"
# pyverbs 59.0 does not build with a newer Cython. pip 25.3 reads PIP_BUILD_CONSTRAINT, an older one PIP_CONSTRAINT.
BUILD_CONSTRAINTS = dict.fromkeys(
    ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(ROOT / ".ci" / "build-constraints.txt")
)


def ensure_environment(
    name: str,
    *,
    python: str,
    requirements: Sequence[str],
    made_from: Iterable[Path] = (),
    without_dependencies: Sequence[str] = (),
) -> Path:
    """Make the virtual environment `name` if its requirements have changed, and return its bin folder.

    The requirements in `without_dependencies` are optional: pip installs them without their dependencies, and the
    environment is usable if there is no wheel of them for this machine.
    """
    folder = ENVIRONMENTS / name
    stamp = folder / "made-from"
    expected_digest = digest([python, str(python_version(python)), *requirements, *without_dependencies], made_from)
    with lock_environments():
        if stamp.exists() and stamp.read_text() == expected_digest:
            return folder / "bin"
        say(f"making the environment {folder.relative_to(ROOT)}")
        if Path(sys.prefix) == folder:
            stop("This nox runs from that very environment. Use another nox.")
        require([sys.executable, "-m", "virtualenv", "--quiet", "--clear", "--python", python, str(folder)])
        pip_install = [str(folder / "bin" / "pip"), "install", "--quiet"]
        require([*pip_install, *requirements], environ=BUILD_CONSTRAINTS)
        if without_dependencies and call([*pip_install, "--no-deps", *without_dependencies]) != 0:
            say(f"Going on without {without_dependencies[0]}: its cases will not run.")
        stamp.write_text(expected_digest)
    return folder / "bin"


@contextlib.contextmanager
def lock_environments() -> Iterator[None]:
    """Hold the lock that lets only one nox at a time change the environments and builds of this tree."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """Return the SHA-256 of these words and of the paths and contents of these files."""
    total = hashlib.sha256("\0".join(words).encode())
    for path in files:
        total.update(f"\0{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
