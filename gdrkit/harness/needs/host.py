"""Needs about the host and this process: limits, capabilities, programs, Python modules, file systems."""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.host import OpenReports, open_by_handle
from gdrkit.install_paths import install_paths
from gdrkit.units import format_bytes
from gdrkit.usrbio.fuse.mount import fuse_obstacle

if TYPE_CHECKING:
    from gdrkit.harness.needs.base import Need
    from gdrkit.inventory import Facts

__all__ = [
    "capability",
    "captures",
    "compiler",
    "device_file",
    "file_system",
    "fuse",
    "memlock",
    "module",
    "open_files",
    "open_reports",
    "package_for_all_users",
    "program",
    "variable",
]

# Longest run time of a program that is started to find out whether it starts.
_PROBE_TIMEOUT_S = 30


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
class _OpenFiles:
    count_min: int

    @property
    def name(self) -> str:
        return f"host.open_files(count_min={self.count_min})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the facts have only the soft limit.
        _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard_limit == resource.RLIM_INFINITY or hard_limit >= self.count_min:
            return None
        return f"{self.count_min} open files needed, the hard limit (ulimit -Hn) is {hard_limit}"


def open_files(count_min: int) -> Need:
    """Return the need of a hard RLIMIT_NOFILE of at least `count_min`. The case itself raises the soft limit."""
    return _OpenFiles(count_min)


@dataclass(frozen=True, slots=True)
class _Module:
    module_name: str

    @property
    def name(self) -> str:
        return f"host.module({self.module_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - Python modules are not in the facts.
        not_installed_text = f"the Python module {self.module_name} is not installed"
        try:
            return not_installed_text if importlib.util.find_spec(self.module_name) is None else None
        except ModuleNotFoundError:
            return not_installed_text  # The parent package of a dotted name is not installed.


def module(name: str) -> Need:
    """Return the need of a Python module that is not a dependency of gdrkit, such as torch."""
    return _Module(name)


@dataclass(frozen=True, slots=True)
class _Variable:
    variable_name: str

    @property
    def name(self) -> str:
        return f"host.variable({self.variable_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the environment is not in the facts.
        return None if os.environ.get(self.variable_name) else f"{self.variable_name} is not set"


def variable(name: str) -> Need:
    """Return the need that an environment variable is set. nox sessions pass paths of optional tools by variables."""
    return _Variable(name)


@dataclass(frozen=True, slots=True)
class _Compiler:
    name = "host.compiler"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the PATH is not a fact of the host.
        missing_programs = [name for name in ("cc", "c++", "pkg-config") if shutil.which(name) is None]
        return f"there is no {' and no '.join(missing_programs)}" if missing_programs else None


compiler: Need = _Compiler()
"""The programs that build a C program with the client library: cc, c++ and pkg-config."""


@dataclass(frozen=True, slots=True)
class _Program:
    program_name: str
    probe_options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"host.program({self.program_name})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the PATH is not a fact of the host.
        if not shutil.which(self.program_name):
            return f"there is no {self.program_name}"
        return _find_start_failure(self.program_name, *self.probe_options) if self.probe_options else None


@functools.cache
def _find_start_failure(*command: str) -> str | None:
    """Run a program. Return None if it prints something to standard output, else the reason why it does not start."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not start: {error}"
    # Some programs print their version and exit with a code other than 0.
    if completed.stdout.strip():
        return None
    error_lines = completed.stderr.strip().splitlines() or [
        f"it exited with code {completed.returncode} without output"
    ]
    return f"{command[0]} does not start: {install_paths().portable(error_lines[-1])}"


def program(name: str, *probe_options: str) -> Need:
    """Return the need of a program on the PATH, such as mpirun.

    If `probe_options` are given, the program must also start with them and print something.
    """
    return _Program(name, probe_options)


@dataclass(frozen=True, slots=True)
class _DeviceFile:
    path: str

    @property
    def name(self) -> str:
        return f"host.device_file({self.path})"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the rights of this process are not facts of the host.
        if not Path(self.path).is_char_device():
            return f"there is no {self.path}"
        return None if os.access(self.path, os.R_OK | os.W_OK) else f"this process may not open {self.path}"


def device_file(path: str) -> Need:
    """Return the need of a character device that this process may open, such as /dev/udmabuf."""
    return _DeviceFile(path)


@dataclass(frozen=True, slots=True)
class _Fuse:
    name = "host.fuse"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the check is about this process, not the machine.
        return fuse_obstacle()


fuse: Need = _Fuse()
"""This user may mount FUSE file systems, and libfuse3 and its Python binding are installed."""


# The PATH, extended by the folders of administration programs such as mkfs. The PATH of a user may lack them.
_ADMIN_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True, slots=True)
class _FileSystem:
    type_name: str

    @property
    def name(self) -> str:
        return f"host.file_system({self.type_name})"

    def check(self, facts: Facts) -> str | None:
        obstacles = []
        if "CAP_SYS_ADMIN" not in facts.limits.capabilities:
            obstacles.append("this process has no CAP_SYS_ADMIN")
        if not os.access("/dev/loop-control", os.R_OK | os.W_OK):
            obstacles.append("there is no loop device for this user")
        if self.type_name not in Path("/proc/filesystems").read_text(encoding="ascii").split():
            obstacles.append(f"this kernel has no {self.type_name}")
        if shutil.which(f"mkfs.{self.type_name}", path=_ADMIN_PATH) is None:
            obstacles.append(f"there is no mkfs.{self.type_name}")
        return "; ".join(obstacles) or None


def file_system(type_name: str) -> Need:
    """Return the need that this process can create a file system (ext4, xfs) in a file and mount it."""
    return _FileSystem(type_name)


@dataclass(frozen=True, slots=True)
class _Capability:
    capability_name: str

    @property
    def name(self) -> str:
        return f"host.capability({self.capability_name})"

    def check(self, facts: Facts) -> str | None:
        return (
            None if self.capability_name in facts.limits.capabilities else f"this process has no {self.capability_name}"
        )


def capability(name: str) -> Need:
    """Return the need of a Linux capability by its name, such as CAP_SYS_ADMIN to mount."""
    return _Capability(name)


# A file handle of a valid size, which belongs to no file: handle_bytes, handle_type and f_handle of struct file_handle.
_UNKNOWN_FILE_HANDLE = struct.pack("=Ii8x", 8, 1)


@dataclass(frozen=True, slots=True)
class _OpenReports:
    name = "host.open_reports"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the check is about this process, not the machine.
        root_descriptor = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with OpenReports() as reports:
                reports.add_file_system(root_descriptor)
            os.close(open_by_handle(_UNKNOWN_FILE_HANDLE, mount_descriptor=root_descriptor))
        except OSError as error:
            # ESTALE: the call is permitted, and the handle is unknown, as intended. The `filename` of another error is
            # the name of the function that failed, e.g. fanotify_init.
            return None if error.errno == errno.ESTALE else f"{error.filename} failed: {error.strerror}"
        finally:
            os.close(root_descriptor)
        return None


open_reports: Need = _OpenReports()
"""The kernel reports opened files to this process (fanotify, which needs CAP_SYS_ADMIN and CAP_DAC_READ_SEARCH)."""


@dataclass(frozen=True, slots=True)
class _Captures:
    name = "host.captures"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - captures are not in the facts.
        folder = os.environ.get("GDRKIT_CAPTURES")
        return None if folder and Path(folder).is_dir() else "GDRKIT_CAPTURES names no folder"


captures: Need = _Captures()
"""The environment variable GDRKIT_CAPTURES names a folder with captures (saved facts) of real machines."""


@dataclass(frozen=True, slots=True)
class _PackageForAllUsers:
    name = "host.package_for_all_users"

    def check(self, facts: Facts) -> str | None:  # noqa: ARG002 - the check is about this process, not the machine.
        for path in (Path(__file__), Path(sys.executable)):
            for folder in path.absolute().parents:
                if not folder.stat().st_mode & stat.S_IXOTH:
                    return f"other users cannot enter {folder}: run chmod o+x {folder}, or move the checkout of gdrkit"
        return None


package_for_all_users: Need = _PackageForAllUsers()
"""Every user can enter the folders of this package and of this Python. On Debian, /root is closed to other users."""
