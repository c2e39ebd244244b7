"""Needs about the host and this process."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.install_paths import install_paths
from gdrkit.units import format_bytes
from gdrkit.usrbio.fuse.mount import fuse_obstacle

if TYPE_CHECKING:
    from gdrkit.harness.needs.base import Need
    from gdrkit.inventory import Facts

__all__ = ["capability", "captures", "compiler", "file_system", "fuse", "memlock", "module", "program", "variable"]

_ANSWER_S = 30


@dataclass(frozen=True, slots=True)
class _Memlock:
    bytes_min: int

    @property
    def name(self) -> str:
        return f"host.memlock(bytes_min={self.bytes_min})"

    def check(self, facts: Facts) -> str | None:
        limits = facts.limits
        if "CAP_IPC_LOCK" in limits.capabilities:
            return None
        if not limits.memlock_known:
            return "the limit of locked memory cannot be read"
        if limits.memlock_bytes is None or limits.memlock_bytes >= self.bytes_min:
            return None
        return (
            f"{format_bytes(self.bytes_min)} of locked memory needed, the limit is {format_bytes(limits.memlock_bytes)}"
        )


def memlock(bytes_min: int) -> Need:
    """Return the need of an RLIMIT_MEMLOCK of at least `bytes_min`, or of CAP_IPC_LOCK, which lifts the limit."""
    return _Memlock(bytes_min)


@dataclass(frozen=True, slots=True)
class _Module:
    module_name: str

    @property
    def name(self) -> str:
        return f"host.module({self.module_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the modules of Python are not a fact of the host.
        absent = f"the Python module {self.module_name} is not installed"
        try:
            return absent if importlib.util.find_spec(self.module_name) is None else None
        except ModuleNotFoundError:
            return absent  # The parent package of a dotted name is not installed.


def module(name: str) -> Need:
    """Return the need of a Python module that is not a dependency of gdrkit, such as torch."""
    return _Module(name)


@dataclass(frozen=True, slots=True)
class _Variable:
    variable: str

    @property
    def name(self) -> str:
        return f"host.variable({self.variable})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the environment is not a fact of the host.
        return None if os.environ.get(self.variable) else f"{self.variable} is not set"


def variable(name: str) -> Need:
    """Return the need of an environment variable by which a nox session names a tool that gdrkit does not depend on."""
    return _Variable(name)


@dataclass(frozen=True, slots=True)
class _Compiler:
    name = "host.compiler"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the PATH is not a fact of the host.
        missing = [program for program in ("cc", "c++", "pkg-config") if shutil.which(program) is None]
        return f"there is no {' and no '.join(missing)}" if missing else None


compiler: Need = _Compiler()
"""What a C program that uses the client library is built with: cc, c++ and pkg-config."""


@dataclass(frozen=True, slots=True)
class _Program:
    program_name: str
    question: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"host.program({self.program_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the PATH is not a fact of the host.
        if not shutil.which(self.program_name):
            return f"there is no {self.program_name}"
        return _silence(self.program_name, *self.question) if self.question else None


@functools.cache
def _silence(*command: str) -> str | None:
    """Return why a program does not start, e.g. because of a missing library; None if it prints an answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not start: {error}"
    # Some programs print their version and end with a code other than 0.
    if done.stdout.strip():
        return None
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode} and said nothing"]
    return f"{command[0]} does not start: {install_paths().portable(said[-1])}"


def program(name: str, *question: str) -> Need:
    """Return the need of a program on the PATH, such as mpirun. With options, it must also run and print something."""
    return _Program(name, question)


@dataclass(frozen=True, slots=True)
class _Fuse:
    name = "host.fuse"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - this process is checked, because it would mount.
        return fuse_obstacle()


fuse: Need = _Fuse()
"""This user may mount by FUSE, and libfuse3 and its binding are here."""


# The folders of root's programs, which are not always on the PATH of a user.
_ROOTS_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True, slots=True)
class _FileSystem:
    kind: str

    @property
    def name(self) -> str:
        return f"host.file_system({self.kind})"

    def check(self, facts: Facts) -> str | None:
        lacking = []
        if "CAP_SYS_ADMIN" not in facts.limits.capabilities:
            lacking.append("this process has no CAP_SYS_ADMIN")
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            lacking.append("there is no loop device for this user")
        if self.kind not in Path("/proc/filesystems").read_text(encoding="ascii").split():
            lacking.append(f"this kernel has no {self.kind}")
        if shutil.which(f"mkfs.{self.kind}", path=_ROOTS_PATH) is None:
            lacking.append(f"there is no mkfs.{self.kind}")
        return "; ".join(lacking) or None


def file_system(kind: str) -> Need:
    """Return the need of a file system type (ext4, xfs) that this process may make in a file and mount."""
    return _FileSystem(kind)


@dataclass(frozen=True, slots=True)
class _Capability:
    capability: str

    @property
    def name(self) -> str:
        return f"host.capability({self.capability})"

    def check(self, facts: Facts) -> str | None:
        return None if self.capability in facts.limits.capabilities else f"this process has no {self.capability}"


def capability(name: str) -> Need:
    """Return the need of a Linux capability by its name: CAP_SYS_ADMIN to mount, CAP_SETUID to be another user."""
    return _Capability(name)


@dataclass(frozen=True, slots=True)
class _Captures:
    name = "host.captures"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - files beside the suites are not a fact of the host.
        folder = os.environ.get("GDRKIT_CAPTURES")
        return None if folder and Path(folder).is_dir() else "GDRKIT_CAPTURES names no folder"


captures: Need = _Captures()
"""Captures of real machines, in the folder that GDRKIT_CAPTURES names."""
