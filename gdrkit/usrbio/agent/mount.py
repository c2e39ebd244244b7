"""The folder ``3fs-virt`` of a mount: its lock, sockets, links and semaphores.

An agent creates files only in this folder and in ``/dev/shm``. If an agent is killed, the next agent of the mount
removes the links, sockets and semaphores of the killed agent, and the shared memory of clients that have ended. A mount
can have only one agent: the agent holds a lock, which the kernel releases when the process ends.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, SetupMissing, UsageError, errno_name
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder, ProcessIdentity, is_running
from gdrkit.usrbio.agent._agent_loop import create_semaphore
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.shared_memory import IOV_NAME, SHM_FOLDER, unlink_shared

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from gdrkit.usrbio.agent.shared_memory import SharedFile

__all__ = [
    "AGENT_SOCKET",
    "IOVS_FOLDER",
    "SERVER_LOCK",
    "SERVER_SOCKET",
    "VIRTUAL_FOLDER",
    "AgentMount",
    "LinkFolder",
    "check_mount",
]

VIRTUAL_FOLDER = "3fs-virt"
IOVS_FOLDER = "iovs"
AGENT_SOCKET = "agent.sock"
SERVER_SOCKET = "server.sock"
SERVER_LOCK = "server.lock"
_AGENT_LOCK = "agent.lock"
_RECORDS_FOLDER = "publications"
# Mode of the folders that the clients of a shared agent use. A client can open a file in them whose name it knows, but
# only the agent can list them.
_SHARED_FOLDER_MODE = 0o711
_MAY_WRITE = "give this user the right to write to the mount"
# The reason of an error and the advice to the user, by the errno with which the agent cannot create or lock its folder.
_REASON_AND_ADVICE_BY_ERRNO = {
    errno.EBUSY: (Reason.BUSY, "end the agent that serves this mount"),
    errno.ENOENT: (Reason.OTHER, "create the folder {mount}"),
    errno.ENOTDIR: (Reason.OTHER, "name a folder that has no file with the name 3fs-virt"),
    errno.EACCES: (Reason.NO_PERMISSION, _MAY_WRITE),
    errno.EPERM: (Reason.NO_PERMISSION, _MAY_WRITE),
    errno.EROFS: (Reason.NO_PERMISSION, _MAY_WRITE),
    errno.ENOSPC: (Reason.NO_SPACE, "free space in the file system"),
    errno.EDQUOT: (Reason.NO_SPACE, "free space in the quota of this user"),
    errno.EIO: (Reason.IO_ERROR, "see the kernel log"),
}
# Names of the links to the submit semaphores, high priority first.
_SEMAPHORE_LINKS = ("submit-ios.ph", "submit-ios", "submit-ios.pl")
_SEMAPHORE_PATH = re.compile(r"/dev/shm/sem\.(hf3fs-submit-ios\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")  # noqa: S108


class LinkFolder:
    """The links of publications, and a record of the owner of each link.

    If an agent is killed, the next agent of the mount uses the records to clean up.

    Parameters
    ----------
    links_folder : PrivateFolder
        ``<mount>/3fs-virt/iovs``. The caller still owns it.
    records_folder : PrivateFolder
        ``<mount>/3fs-virt/publications``. The caller still owns it.
    """

    def __init__(self, links_folder: PrivateFolder, records_folder: PrivateFolder) -> None:
        self._links_folder = links_folder
        self._records_folder = records_folder

    @property
    def fd(self) -> int:
        """A descriptor of the folder of the links."""
        return self._links_folder.fd

    def has(self, name: str, target: str) -> bool:
        """Return whether a link exists and has this target."""
        return self._read_target(name) == target

    def add(self, name: str, target: str, *, owner: ProcessIdentity | None, shared_file: SharedFile | None) -> None:
        """Create a link and its record. If the client has already created a link with this target, use that link.

        Raises
        ------
        AgentError
            EEXIST: the name exists with another target. Other errors have the errno of symlink(2) or link(2).
        """
        self._write_record(name, owner, shared_file)
        try:
            if shared_file is not None:
                # The record is written before the memory gets its name. In the reverse order, an agent that is killed
                # between the two steps would leave memory that the next agent does not remove.
                shared_file.give_name()
            self._create_link(name, target)
        except AgentError:
            if shared_file is not None and shared_file.is_unnamed:
                shared_file.remove()
            self._records_folder.unlink(name)
            raise

    def remove(self, name: str, target: str, *, with_record: bool = True) -> None:
        """Remove the link if it still has this target, and its record if `with_record`."""
        if self._read_target(name) == target:
            self._links_folder.unlink(name)
        if with_record:
            self._records_folder.unlink(name)

    def remove_record(self, name: str) -> None:
        """Remove the record that :meth:`remove` has left because of ``with_record=False``."""
        self._records_folder.unlink(name)

    def clean(self) -> None:
        """Remove the links and semaphores of a killed agent, and the shared memory of its clients that have ended."""
        for name in _list_names(self._links_folder, is_wanted=os.DirEntry[str].is_symlink):
            if name in _SEMAPHORE_LINKS:
                _remove_semaphore(self._links_folder, name)
            else:
                self._links_folder.unlink(name)
        for name in _list_names(self._records_folder):
            if self._clean_up_after_owner(name):
                self._records_folder.unlink(name)

    def _create_link(self, name: str, target: str) -> None:
        try:
            os.symlink(target, name, dir_fd=self._links_folder.fd)
        except FileExistsError as error:
            if self._read_target(name) != target:
                raise AgentError(errno.EEXIST, f"{name} is already published with another target") from error
        except OSError as error:
            raise AgentError(error.errno or errno.EIO, f"symlink({name}) failed: {error.strerror}") from error

    def _read_target(self, name: str) -> str | None:
        with suppress(OSError):
            # A Path would merge the two slashes of gdr://.
            return os.readlink(name, dir_fd=self._links_folder.fd)
        return None

    def _write_record(self, name: str, owner: ProcessIdentity | None, shared_file: SharedFile | None) -> None:
        """Record the owner of shared memory, if the next agent may have to remove the name of the memory."""
        if shared_file is None or owner is None or not IOV_NAME.fullmatch(shared_file.name):
            return
        record = {
            "boot_id": owner.boot_id.hex(),
            "process_id": owner.process_id,
            "namespace": owner.pid_namespace,
            "started_ticks": owner.started_ticks,
            "shared": shared_file.name,
            "device": shared_file.identity[0],
            "inode": shared_file.identity[1],
        }
        self._records_folder.write_text(name, json.dumps(record))

    def _clean_up_after_owner(self, record_name: str) -> bool:
        """If the owner in a record has ended, remove its shared memory. Return whether the record can be removed."""
        try:
            record = json.loads(self._records_folder.read_text(record_name))
            owner = ProcessIdentity(
                boot_id=bytes.fromhex(record["boot_id"]),
                process_id=record["process_id"],
                pid_namespace=record["namespace"],
                started_ticks=record["started_ticks"],
            )
            shared_name, identity = str(record["shared"]), (record["device"], record["inode"])
        except (SetupMissing, ValueError, KeyError, TypeError):
            return True  # The agent was killed while it wrote the record, or another program wrote the record.
        if is_running(owner) is not False:  # None: this process cannot see whether the owner runs.
            return False
        if IOV_NAME.fullmatch(shared_name):
            unlink_shared(shared_name, identity)
        return True


class AgentMount:
    """The folder ``3fs-virt`` of a mount, locked by its agent. Use it as a context manager.

    Parameters
    ----------
    path : Path
        The mount. In plain mode it is the store's folder.
    agent_folder : Path or None
        The folder in which ``3fs-virt`` is created. With None, it is the mount itself.
    is_shared : bool
        Whether all users of the machine may connect. They can then use the files in ``3fs-virt`` whose names they know,
        but cannot list them.

    Attributes
    ----------
    path : Path
        The mount.
    virtual_folder : Path
        The path of ``3fs-virt``.
    virtual_folder_fd : int
        A descriptor of ``3fs-virt``.
    links : LinkFolder
        The links of publications.
    is_shared : bool
        Whether all users of the machine may connect.

    Raises
    ------
    SetupMissing, ApiError
        EBUSY: another agent serves the mount. EPERM or ELOOP: another user can change ``3fs-virt`` or created it. Other
        errors have the errno of mkdir(2).
    """

    def __init__(self, path: Path, *, agent_folder: Path | None = None, is_shared: bool = False) -> None:
        self.path = path
        self.is_shared = is_shared
        self._agent_folder = agent_folder
        self.virtual_folder = (path if agent_folder is None else agent_folder) / VIRTUAL_FOLDER
        self._on_close = ReleaseStack()
        try:
            self._open()
        except BaseException as error:
            self._on_close.run_after(error)
            raise

    @property
    def socket_path(self) -> Path:
        """The path of the socket to which clients connect."""
        return self.virtual_folder / AGENT_SOCKET

    @property
    def semaphore_names(self) -> tuple[str, str, str]:
        """Names of the submit semaphores, high priority first."""
        high, normal, low = self._semaphore_names
        return high, normal, low

    def open(self, name: str, flags: int) -> int:
        """Open a file of the agent in ``3fs-virt``; see :meth:`PrivateFolder.open`."""
        return self._private_folder.open(name, flags)

    def close(self) -> None:
        """Remove the agent's files and release the lock. A second call does nothing."""
        self._on_close.run()

    def _open(self) -> None:
        """Open and lock the folder, remove the files of a killed agent, and create the semaphores."""
        try:
            # The folder is private because other users must not open the agent's socket, nor read the IPC handles in
            # the links to device memory.
            private_folder = self._private_folder = self._close_at_end(PrivateFolder.below(self.virtual_folder))
            links_folder = self._close_at_end(private_folder.folder(IOVS_FOLDER))
            records_folder = self._close_at_end(private_folder.folder(_RECORDS_FOLDER))
        except SetupMissing:
            raise
        except OSError as error:
            raise _make_mount_error("mkdir", error, self.virtual_folder) from error
        self.virtual_folder_fd = private_folder.fd
        try:
            lock_fd = private_folder.lock(_AGENT_LOCK)
        except BlockingIOError as error:
            raise _make_mount_error("flock", error, self.virtual_folder / _AGENT_LOCK) from error
        self._on_close.push(lambda: os.close(lock_fd))
        if self.is_shared:
            # Without the right to read the folders, no user sees the names of the publications of other users.
            for folder in (private_folder, links_folder):
                os.fchmod(folder.fd, _SHARED_FOLDER_MODE)
        if self._agent_folder is not None:
            self._on_close.push(self._remove_agent_folder)
        self.links = LinkFolder(links_folder, records_folder)
        self.links.clean()
        for name in (AGENT_SOCKET, SERVER_SOCKET):
            private_folder.unlink(name)
        self._semaphore_names: list[str] = []
        for name in _SEMAPHORE_LINKS:
            self._add_semaphore(links_folder, name)

    def _remove_agent_folder(self) -> None:
        """Remove `agent_folder`, which only this agent uses, unless it has other files. The caller has the lock."""
        assert self._agent_folder is not None  # noqa: S101 - the caller checked it.
        for name in (_AGENT_LOCK, SERVER_LOCK):
            self._private_folder.unlink(name)
        with suppress(OSError):
            for name in (IOVS_FOLDER, _RECORDS_FOLDER):
                os.rmdir(name, dir_fd=self._private_folder.fd)
            self.virtual_folder.rmdir()
            self._agent_folder.rmdir()

    def _close_at_end(self, folder: PrivateFolder) -> PrivateFolder:
        self._on_close.push(folder.close)
        return folder

    def _add_semaphore(self, links_folder: PrivateFolder, link_name: str) -> None:
        # The link is created first. If the agent is killed between the two steps, the next agent finds the semaphore by
        # the link, and removes it.
        semaphore_name = f"hf3fs-submit-ios.{uuid.uuid4()}"
        os.symlink(SHM_FOLDER / f"sem.{semaphore_name}", link_name, dir_fd=links_folder.fd)
        self._on_close.push(lambda: _remove_semaphore(links_folder, link_name))
        create_semaphore(f"/{semaphore_name}", mode=0o600)
        if self.is_shared:
            # The mode is set here because sem_open(3) applies the umask. A user who overwrites the semaphore delays the
            # operations of other users, and does no more harm.
            (SHM_FOLDER / f"sem.{semaphore_name}").chmod(0o666)
        self._semaphore_names.append(f"/{semaphore_name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def check_mount(path: Path) -> Path:
    """Return the path of the mount's folder with all symbolic links resolved.

    Raises
    ------
    UsageError
        `path` is not a folder.
    """
    folder = path.resolve()
    if not folder.is_dir():
        message = f"{path} is not a folder"
        raise UsageError(message, what_to_do="create it, or pass the store's folder")
    return folder


def _list_names(
    folder: PrivateFolder, *, is_wanted: Callable[[os.DirEntry[str]], bool] = lambda _entry: True
) -> list[str]:
    with os.scandir(folder.fd) as entries:
        return [entry.name for entry in entries if is_wanted(entry)]


def _remove_semaphore(links_folder: PrivateFolder, link_name: str) -> None:
    with suppress(FileNotFoundError):
        match = _SEMAPHORE_PATH.fullmatch(os.readlink(link_name, dir_fd=links_folder.fd))
        if match:
            (SHM_FOLDER / f"sem.{match[1]}").unlink(missing_ok=True)
    links_folder.unlink(link_name)


def _make_mount_error(operation: str, error: OSError, path: Path) -> GdrkitError:
    """Return the error of a call on the mount.

    It is SetupMissing if the mount is missing, not writable or used by another agent, otherwise ApiError.
    """
    error_number = errno.EBUSY if isinstance(error, BlockingIOError) else error.errno or errno.EIO
    is_setup_problem = error_number in {errno.EBUSY, errno.EACCES, errno.EROFS, errno.ENOENT}
    error_type = SetupMissing if is_setup_problem else ApiError
    reason, advice = _REASON_AND_ADVICE_BY_ERRNO.get(error_number, (Reason.OTHER, ""))
    return error_type(
        api=Api.KERNEL,
        operation=operation,
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments={"path": str(path)},
        reason=reason,
        what_to_do=advice.format(mount=path.parent),
    )
