"""Folder with the state of a domain: the device files that programs see, and the port counters.

All processes of ``gdrkit run`` of one user with the same domain share the folder, because a domain is like one machine.
Each of them holds a shared lock on the folder while its command runs. The last process removes the folder. After a
SIGKILL of ``gdrkit run`` the folder remains, and the next ``gdrkit run`` of the user removes the folder, because no
process holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["enter_domain", "write_devices"]

# Size of the file with the port counters of 16 devices, 32 bytes each, as in native/twins/loader/tree_files.hpp.
_COUNTERS_FILE_BYTES = 512
_DEVICE_COUNT_VARIABLES = ("GDRKIT_TWINS_NICS", "GDRKIT_TWINS_GPUS")
_COMMAND_ONLY_VARIABLES = frozenset({"GDRKIT_TWINS_FAULTS", "GDRKIT_TWINS_RUN", "LD_PRELOAD", "LD_AUDIT"})
_WRITE_TIMEOUT_S = 30


@contextlib.contextmanager
def enter_domain(environment: Mapping[str, str]) -> Iterator[Path]:
    """Create or join the folder of the domain that `environment` names, and leave it at the end.

    Raises
    ------
    OSError
        The folder cannot be created, or another user owns it.
    """
    user_folder = _create_user_folder()
    _remove_unused_domains(user_folder)
    folder, lock_descriptor = _join_domain(user_folder / _make_domain_key(environment))
    try:
        yield folder
    finally:
        _remove_if_unused(folder, lock_descriptor)
        os.close(lock_descriptor)
        with contextlib.suppress(OSError):
            user_folder.rmdir()


def write_devices(folder: Path, program: Path, environment: Mapping[str, str]) -> str | None:
    """Write the tree of device files, unless the domain has one. Return the reason if that fails, otherwise None.

    Parameters
    ----------
    folder : Path
        The folder of the domain.
    program : Path
        The program of the twins that writes the tree. It lists the devices of the verbs twin.
    environment : mapping
        The environment of the command, which decides how many devices there are.
    """
    tree_folder = folder / "tree"
    if tree_folder.is_dir():
        return None
    # Fault plans and the usage file are only for the command, so `program` does not get their variables.
    program_environment = {name: value for name, value in environment.items() if name not in _COMMAND_ONLY_VARIABLES}
    new_tree_folder = folder / f"tree.{os.getpid()}"
    try:
        result = subprocess.run(
            [str(program), str(new_tree_folder)],
            env=program_environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_WRITE_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        # If another process was faster, its tree is the same, and the rename fails because the folder is not empty.
        with contextlib.suppress(OSError):
            new_tree_folder.rename(tree_folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(new_tree_folder, ignore_errors=True)
    return None


def _make_domain_key(environment: Mapping[str, str]) -> str:
    # The key has the numbers of devices, because programs with different numbers cannot share a tree. Without a
    # variable, the twins have 2 devices. The twins check the values, so malformed values need no error here.
    device_counts = ["".join(filter(str.isalnum, environment.get(name, "2")))[:8] for name in _DEVICE_COUNT_VARIABLES]
    domain = environment.get("GDRKIT_TWINS_DOMAIN", "default").replace("/", "_")[:32]
    return "-".join([domain, *device_counts])


def _create_user_folder() -> Path:
    """Create the folder of this user if it does not exist, and return it. Other users cannot enter it."""
    shared_memory_folder = Path("/dev/shm")  # noqa: S108 - the folder below it is checked.
    parent_folder = shared_memory_folder if os.access(shared_memory_folder, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent_folder / f"gdrkit-twins-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    folder_status = folder.lstat()
    if not stat.S_ISDIR(folder_status.st_mode) or folder_status.st_uid != os.getuid():
        message = f"{folder} is not a folder of this user"
        raise PermissionError(message)
    return folder


def _join_domain(folder: Path) -> tuple[Path, int]:
    """Create the folder if it does not exist, lock it, and return it with the descriptor of the lock."""
    while True:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        lock_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock_descriptor, fcntl.LOCK_SH)
        if _is_same_folder(folder, lock_descriptor):
            break
        # Another process has removed the folder before this process got the lock. Start again with a new folder.
        os.close(lock_descriptor)
    counters_descriptor = os.open(folder / "counters", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(counters_descriptor, _COUNTERS_FILE_BYTES)
    os.close(counters_descriptor)
    return folder, lock_descriptor


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_unused(folder: Path, lock_descriptor: int) -> None:
    """Remove the folder if no other process has locked it."""
    try:
        fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    shutil.rmtree(folder, ignore_errors=True)


def _remove_unused_domains(user_folder: Path) -> None:
    """Remove the folders of domains that no process uses any more."""
    for folder in user_folder.iterdir():
        with contextlib.suppress(OSError):
            lock_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _remove_if_unused(folder, lock_descriptor)
            finally:
                os.close(lock_descriptor)
