"""Needs about the host and this process.

Level 7.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.house import house
from gdrkit.units import format_bytes
from gdrkit.usrbio.fuse import fuse_obstacle

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
    """RLIMIT_MEMLOCK of at least `bytes_min`, or CAP_IPC_LOCK, which lifts it."""
    return _Memlock(bytes_min)


@dataclass(frozen=True, slots=True)
class _Module:
    module_name: str

    @property
    def name(self) -> str:
        return f"host.module({self.module_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - what Python can import is no fact of the host.
        absent = f"the Python module {self.module_name} is not installed"
        try:
            return absent if importlib.util.find_spec(self.module_name) is None else None
        except ModuleNotFoundError:
            return absent  # Of a name with dots: what stands before the last of them.


def module(name: str) -> Need:
    """A Python module that is no dependency of gdrkit, such as torch."""
    return _Module(name)


@dataclass(frozen=True, slots=True)
class _Variable:
    variable: str

    @property
    def name(self) -> str:
        return f"host.variable({self.variable})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - what was said to this run is no fact of the host.
        return None if os.environ.get(self.variable) else f"{self.variable} is not set"


def variable(name: str) -> Need:
    """A variable of the environment by which a nox session names a tool that is no dependency of gdrkit."""
    return _Variable(name)


@dataclass(frozen=True, slots=True)
class _Compiler:
    name = "host.compiler"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - what is on the PATH is no fact of the host.
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

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - what is on the PATH is no fact of the host.
        if not shutil.which(self.program_name):
            return f"there is no {self.program_name}"
        return _silence(self.program_name, *self.question) if self.question else None


@functools.cache
def _silence(*command: str) -> str | None:
    """Why a program does not answer, such as a library that it cannot be loaded with; None when it does."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not start: {error}"
    # Some end with another code than 0 after they have said their version.
    if done.stdout.strip():
        return None
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode} and said nothing"]
    return f"{command[0]} does not start: {house().portable(said[-1])}"


def program(name: str, *question: str) -> Need:
    """A program on the PATH, such as mpirun; with options to which it must answer with something, it starts as well."""
    return _Program(name, question)


@dataclass(frozen=True, slots=True)
class _Fuse:
    name = "host.fuse"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - asked of this process, which would mount.
        return fuse_obstacle()


fuse: Need = _Fuse()
"""This user may mount by FUSE, and libfuse3 and its binding are here."""


# Where the programs of root are, which a user need not have on the PATH.
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
    """A file system that this process may make in a file and mount: ext4, xfs."""
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
    """A right of Linux, by its name there: CAP_SYS_ADMIN to mount, CAP_SETUID to be another user."""
    return _Capability(name)


@dataclass(frozen=True, slots=True)
class _Captures:
    name = "host.captures"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - files beside the suites are no fact of the host.
        folder = os.environ.get("GDRKIT_CAPTURES")
        return None if folder and Path(folder).is_dir() else "GDRKIT_CAPTURES names no folder"


captures: Need = _Captures()
"""Captures of real machines, in the folder that GDRKIT_CAPTURES names."""
