"""The FUSE mount of an agent: mounting, serving and unmounting.

FUSE mode needs a mount because the store is on another machine, or because the client library supports only the mount
of 3FS. Plain mode needs no FUSE mount, because its mount is the store's folder. The kernel refuses other users access
to the mount, unless it is shared.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, Reason, SetupMissing, UsageError, errno_name
from gdrkit.handles import Handle
from gdrkit.remedies import system_install
from gdrkit.usrbio.fuse._mfusepy import FuseSession, missing_dependency
from gdrkit.usrbio.fuse.ioctls import MountOperations
from gdrkit.usrbio.fuse.virtual_folder import VirtualFolder

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.usrbio.fuse.link_clients import LinkClients
    from gdrkit.usrbio.fuse.store import StoreFiles

__all__ = ["FuseMount", "fuse_obstacle", "unmount_stale"]

_FUSE_DEVICE = Path("/dev/fuse")
_FILE_SYSTEM_TYPE = "fuse.hf3fs"
_MOUNT_SOURCE = "gdrkit-agent"
_UNMOUNT_TIMEOUT_S = 10


def fuse_obstacle() -> str | None:
    """Return why this user cannot mount by FUSE on this machine and what to do, or None if no obstacle is known."""
    obstacle = _find_obstacle()
    return None if obstacle is None else obstacle[1]


def _find_obstacle() -> tuple[int, str] | None:
    """Return an errno and the sentence of :func:`fuse_obstacle`, or None if no obstacle is known."""
    if (missing_text := missing_dependency()) is not None:
        return errno.ENOENT, missing_text
    if not _FUSE_DEVICE.exists():
        return errno.ENODEV, "/dev/fuse does not exist: load the kernel module fuse, or give the container the device"
    if not os.access(_FUSE_DEVICE, os.R_OK | os.W_OK):
        return errno.EACCES, "/dev/fuse cannot be opened: give this user read and write access to it"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return errno.EPERM, f"only root can mount without fusermount3: {system_install('fuse3')}"
    return None


_REASON_BY_ERRNO = {errno.ENOENT: Reason.LIBRARY_MISSING, errno.ENODEV: Reason.NO_DEVICE}


class FuseMount:
    """The FUSE mount of an agent. Use it as a context manager.

    Parameters
    ----------
    mount : Path
        An empty folder.
    store : StoreFiles
        The files of the mount.
    link_clients : LinkClients
        The processes that publish iovs and rings by links in ``3fs-virt/iovs``.
    agent_folder : Path
        The real folder ``3fs-virt`` of the agent, with ``iovs`` and ``agent.sock``.
    is_shared : bool
        Whether all users of the machine may use the mount.

    Attributes
    ----------
    path : Path
        The mounted folder, without symbolic links.

    Raises
    ------
    SetupMissing
        This machine has no FUSE, or this user may not use it.
    UsageError
        The folder does not exist or is not empty, or a file system is mounted on it.
    """

    def __init__(
        self, mount: Path, *, store: StoreFiles, link_clients: LinkClients, agent_folder: Path, is_shared: bool = False
    ) -> None:
        if (obstacle := _find_obstacle()) is not None:
            error_number, sentence = obstacle
            detail, _, what_to_do = sentence.partition(": ")
            raise SetupMissing(
                api=Api.FUSE,
                operation="open /dev/fuse",
                status=error_number,
                status_name=errno_name(error_number),
                errno=error_number,
                reason=_REASON_BY_ERRNO.get(error_number, Reason.NO_PERMISSION),
                what_to_do=what_to_do,
                detail=detail,
            )
        unmount_stale(mount)
        self.path = _check_empty_folder(mount)
        virtual_folder = VirtualFolder(agent_folder, link_clients, store, mount=str(self.path), is_shared=is_shared)
        self._operations = MountOperations(store, virtual_folder, link_clients, mount=str(self.path))
        self._session: FuseSession | None = FuseSession(
            self.path, self._operations, source=_MOUNT_SOURCE, is_shared=is_shared
        )
        self._handle = Handle("usrbio.fuse_mount")

    def close(self) -> None:
        """Unmount even if files are open. A second call does nothing.

        If the method raises, the caller may call it again.

        Raises
        ------
        ApiError
            The unmount failed, or the thread of the mount did not end.
        """
        session = self._session
        if session is None:
            return
        if session.is_running:
            _unmount(self.path)
        if not session.join(_UNMOUNT_TIMEOUT_S):
            raise ApiError(
                api=Api.FUSE,
                operation="umount",
                status=errno.EBUSY,
                status_name=errno_name(errno.EBUSY),
                errno=errno.EBUSY,
                arguments={"path": str(self.path)},
                reason=Reason.BUSY,
                what_to_do="end the processes that use the mount, also in other mount namespaces (containers)",
            )
        self._session = None
        self._operations.close()
        self._handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def unmount_stale(mount: Path) -> bool:
    """Unmount the mount that a killed agent left on a folder, and return whether there was one.

    A mount that an agent still serves is not unmounted: its stat(2) succeeds.
    """
    # If no process serves the mount, lstat(2) of its path fails. realpath() ignores this error.
    path = Path(os.path.realpath(mount))
    if (str(path), _MOUNT_SOURCE) not in _list_mounts():
        return False
    try:
        path.stat()
    except OSError as error:
        if error.errno not in {errno.ENOTCONN, errno.ECONNABORTED}:
            raise
    else:
        return False
    _unmount(path)
    return True


def _list_mounts() -> list[tuple[str, str]]:
    """Return path and source of every mount with the file system type of an agent."""
    # A line of mountinfo (see proc(5)) has the mount point in its fifth field, with octal escapes such as \040. The
    # file system type and the source follow the separator " - ".
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount_fields, _, source_fields = line.partition(" - ")
        file_system_type, source, *_ = source_fields.split()
        if file_system_type == _FILE_SYSTEM_TYPE:
            escaped_path = mount_fields.split()[4]
            mounts.append((escaped_path.encode().decode("unicode_escape").encode("latin-1").decode(), source))
    return mounts


def _unmount(path: Path) -> None:
    """Unmount. A mount that is in use is detached at once, and operations on its open files fail.

    With -f, the kernel ends the FUSE connection even if another mount namespace, for example of a container, has a copy
    of the mount. FUSE writes dirty pages when a file is closed or unmapped, so no written data is lost.
    """
    if os.geteuid() == 0:
        command, fallback_command = ["umount", "-i", "-f", "-l", str(path)], ["umount", "-i", "-l", str(path)]
    else:
        command, fallback_command = ["fusermount3", "-u", str(path)], ["fusermount3", "-u", "-z", str(path)]
    result = _run_command(command)
    if result.returncode != 0:
        result = _run_command(fallback_command)
    if result.returncode != 0 and any(mount_path == str(path) for mount_path, _ in _list_mounts()):
        raise ApiError(
            api=Api.FUSE,
            operation=fallback_command[0],
            status=result.returncode,
            status_name=f"exit code {result.returncode}",
            arguments={"path": str(path)},
            reason=Reason.BUSY,
            what_to_do=f"unmount it by hand: {' '.join(fallback_command)}",
            detail=result.stderr.strip(),
        )


def _run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command for at most 10 s. A command that is not installed or does not end counts as failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_UNMOUNT_TIMEOUT_S)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(command, errno.ENOENT, "", str(error))
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, errno.ETIMEDOUT, "", f"it did not end within {_UNMOUNT_TIMEOUT_S} s"
        )


def _check_empty_folder(mount: Path) -> Path:
    path = mount.resolve()
    if not path.is_dir():
        message = f"{mount} is not a folder"
        raise UsageError(message, what_to_do="create the folder")
    if os.path.ismount(path) or any(path.iterdir()):
        message = f"{mount} is not empty, or a file system is mounted on it"
        raise UsageError(
            message, reason=Reason.BUSY, what_to_do="use an empty folder on which no file system is mounted"
        )
    return path
