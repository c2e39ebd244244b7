"""The part of a mount that belongs to its agent: ``<mount>/3fs-virt``.

Level 5. What lies there and in ``/dev/shm`` is all that an agent leaves in the file system, and the next agent of the
mount takes away what one that was killed had left: links, sockets, semaphores, and the shared memory of clients that
have ended. A lock, which the kernel drops with its process, makes a second agent an error.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, SetupMissing, UsageError, errno_name
from gdrkit.handles import ReleaseStack
from gdrkit.host import PrivateFolder, ProcessIdentity, is_running
from gdrkit.usrbio.agent._agent_loop import create_semaphore
from gdrkit.usrbio.agent.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = [
    "AGENT_SOCKET",
    "IOVS",
    "SERVER_LOCK",
    "SERVER_SOCKET",
    "VIRTUAL",
    "LinkFolder",
    "Mount",
    "SharedFile",
    "check_mount",
    "open_shared",
    "take_unnamed",
]

VIRTUAL = "3fs-virt"
IOVS = "iovs"
AGENT_SOCKET = "agent.sock"
SERVER_SOCKET = "server.sock"
SERVER_LOCK = "server.lock"
_LOCK = "agent.lock"
_RECORDS = "publications"
_SHARED = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is.
_SUBMIT = ("submit-ios.ph", "submit-ios", "submit-ios.pl")
_SEMAPHORE = re.compile(r"/dev/shm/sem\.(hf3fs-submit-ios\.[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")  # noqa: S108
_IOV = re.compile(r"hf3fs-iov-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class SharedFile:
    """A file of /dev/shm that a client published, open here.

    Attributes
    ----------
    fd : int
        Its descriptor.
    name : str
        Below /dev/shm.
    length_bytes : int
        Its size when it was opened.
    """

    def __init__(self, fd: int, name: str, found: os.stat_result, *, is_unnamed: bool = False) -> None:
        self.fd = fd
        self.name = name
        self.length_bytes = found.st_size
        self.identity = (found.st_dev, found.st_ino)
        # Its client made it without a name, which the agent gives it.
        self.is_unnamed = is_unnamed

    def give_name(self) -> None:
        """Name memory that has none yet; Refused with EEXIST when there is something of that name."""
        if self.is_unnamed:
            folder = os.open(_SHARED, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # With a folder's descriptor, since without one Python calls link(2), which follows nothing.
                os.link(f"/proc/self/fd/{self.fd}", self.name, dst_dir_fd=folder, follow_symlinks=True)
                # Anew by its name, which then is what the agent's descriptor is called where somebody looks.
                named = os.open(self.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                os.dup2(named, self.fd, inheritable=False)
                os.close(named)
            except OSError as error:
                raise Refused(error.errno or errno.EIO, f"{self.name} cannot be named: {error.strerror}") from error
            finally:
                os.close(folder)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Remove the name of memory that its client made by the contract and can remove no more."""
        if _IOV.fullmatch(self.name):
            _remove_shared(self.name, self.identity)


def open_shared(target: str, *, uid: int) -> SharedFile:
    """Open what a link of host memory says.

    Raises
    ------
    Refused
        EINVAL: no file directly in /dev/shm, not a regular file, or empty. EACCES: another user's. Else the kernel's.
    """
    folder, _, name = target.rpartition("/")
    if folder != str(_SHARED) or name in {"", ".", ".."}:
        raise Refused(errno.EINVAL, f"{target!r} is no shared memory in /dev/shm")
    try:
        fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        number = errno.EINVAL if error.errno == errno.ELOOP else error.errno or errno.EIO
        raise Refused(number, f"{target} cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size <= 0:
        os.close(fd)
        raise Refused(errno.EINVAL, f"{target} is no shared memory with bytes in it")
    if found.st_uid != uid:
        os.close(fd)
        raise Refused(errno.EACCES, f"{target} belongs to user {found.st_uid} and not to {uid}")
    return SharedFile(fd, name, found)


def take_unnamed(target: str, descriptor: int, *, uid: int) -> SharedFile:
    """Memory that its client made without a name; owns the descriptor.

    Raises
    ------
    Refused
        EINVAL: not such memory, or the name is not one of an iov. EACCES: another user's.
    """
    found = os.fstat(descriptor)
    folder, _, name = target.rpartition("/")
    mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH)
    is_memory = stat.S_ISREG(found.st_mode) and found.st_size > 0 and found.st_dev == _SHARED.stat().st_dev
    refusal: Refused | None = None
    if folder != str(_SHARED) or not _IOV.fullmatch(name):
        refusal = Refused(errno.EINVAL, f"{target!r} is no name for memory of an iov")
    elif not is_memory or found.st_nlink or mode != os.O_RDWR:
        refusal = Refused(errno.EINVAL, "the descriptor is no writable memory of /dev/shm without a name")
    elif found.st_uid != uid:
        refusal = Refused(errno.EACCES, f"the memory belongs to user {found.st_uid} and not to {uid}")
    if refusal is not None:
        os.close(descriptor)
        raise refusal
    return SharedFile(descriptor, name, found, is_unnamed=True)


class LinkFolder:
    """The links of publications, and a record of whose each is, for an agent that comes after a kill.

    Parameters
    ----------
    links : PrivateFolder
        ``<mount>/3fs-virt/iovs``; borrowed.
    records : PrivateFolder
        ``<mount>/3fs-virt/publications``; borrowed.
    """

    def __init__(self, links: PrivateFolder, records: PrivateFolder) -> None:
        self._links = links
        self._records = records

    def add(self, name: str, target: str, *, owner: ProcessIdentity | None, shared: SharedFile | None) -> None:
        """Make a link; one that says the same is taken, as a client that wraps memory has made it before.

        Raises
        ------
        Refused
            EEXIST: the name is taken.
        """
        self._record(name, owner, shared)
        try:
            if shared is not None:
                # Only now: of a name without a record nobody would know that it is to be removed.
                shared.give_name()
            self._link(name, target)
        except Refused:
            if shared is not None and shared.is_unnamed:
                shared.remove()
            self._records.unlink(name)
            raise

    def remove(self, name: str, target: str) -> None:
        """Remove a link if it is still this one."""
        if self._target(name) == target:
            self._links.unlink(name)
        self._records.unlink(name)

    def clean(self) -> None:
        """Remove what a killed agent left: every link, and the memory of clients that have ended."""
        for name in _names(self._links, is_wanted=os.DirEntry[str].is_symlink):
            if name in _SUBMIT:
                _remove_semaphore(self._links, name)
            else:
                self._links.unlink(name)
        for name in _names(self._records):
            if self._is_over(name):
                self._records.unlink(name)

    def _link(self, name: str, target: str) -> None:
        try:
            os.symlink(target, name, dir_fd=self._links.fd)
        except FileExistsError as error:
            if self._target(name) != target:
                raise Refused(errno.EEXIST, f"{name} is published already") from error
        except OSError as error:
            raise Refused(error.errno or errno.EIO, f"the link {name} cannot be made: {error.strerror}") from error

    def _target(self, name: str) -> str | None:
        with suppress(OSError):
            # As it stands there: a Path would make one slash of the two in gdr://.
            return os.readlink(name, dir_fd=self._links.fd)
        return None

    def _record(self, name: str, owner: ProcessIdentity | None, shared: SharedFile | None) -> None:
        if shared is None or owner is None or not _IOV.fullmatch(shared.name):
            return
        said = {
            "boot_id": owner.boot_id.hex(),
            "process_id": owner.process_id,
            "namespace": owner.namespace,
            "started_ticks": owner.started_ticks,
            "shared": shared.name,
            "device": shared.identity[0],
            "inode": shared.identity[1],
        }
        self._records.write_text(name, json.dumps(said))

    def _is_over(self, record: str) -> bool:
        """Whether nothing is left of what a record is about; the memory of an owner that has ended is removed."""
        try:
            said = json.loads(self._records.read_text(record))
            owner = ProcessIdentity(
                boot_id=bytes.fromhex(said["boot_id"]),
                process_id=said["process_id"],
                namespace=said["namespace"],
                started_ticks=said["started_ticks"],
            )
            name, identity = str(said["shared"]), (said["device"], said["inode"])
        except (SetupMissing, ValueError, KeyError, TypeError):
            return True  # Cut off by a kill before its link was made, or not written by an agent.
        if is_running(owner) is not False:
            return False
        if _IOV.fullmatch(name):
            _remove_shared(name, identity)
        return True


class Mount:
    """An agent's hold on a mount; use it as a context manager.

    Parameters
    ----------
    path : Path
        The mount: of a plain mount, the store's folder.
    place : Path or None
        Where ``3fs-virt`` really lies; None: in the mount itself.

    Raises
    ------
    SetupMissing
        EBUSY: another agent serves it. EPERM or ELOOP: another user can change what lies in ``3fs-virt``, or has
        planted it. Else what the kernel says of the folder.
    """

    def __init__(self, path: Path, *, place: Path | None = None) -> None:
        self.path = path
        self._place = place
        self.virtual = (path if place is None else place) / VIRTUAL
        self._parts = ReleaseStack()
        try:
            self._open()
        except BaseException as error:
            self._parts.run_after(error)
            raise

    @property
    def socket(self) -> Path:
        """Where clients come."""
        return self.virtual / AGENT_SOCKET

    @property
    def semaphores(self) -> tuple[str, str, str]:
        """Names of the submit semaphores, high priority first."""
        high, normal, low = self._semaphores
        return high, normal, low

    def open(self, name: str, flags: int) -> int:
        """Open a file of the agent in ``3fs-virt``; see :meth:`PrivateFolder.open`."""
        return self._virtual.open(name, flags)

    def close(self) -> None:
        """Remove what is the agent's; a second close does nothing."""
        self._parts.run()

    def _open(self) -> None:
        try:
            # Only this user may open the agent's socket, and the links of device memory hold IPC handles.
            virtual = self._virtual = self._keep(PrivateFolder.below(self.virtual))
            links, records = self._keep(virtual.folder(IOVS)), self._keep(virtual.folder(_RECORDS))
        except OSError as error:
            raise _setup("mkdir", error, self.virtual, "give this user the right to write to the mount") from error
        self.folder = virtual.fd
        try:
            lock = virtual.lock(_LOCK)
        except BlockingIOError as error:
            raise _setup("flock", error, self.virtual / _LOCK, "end the agent that serves this mount") from error
        self._parts.push(lambda: os.close(lock))
        if self._place is not None:
            self._parts.push(self._remove_place)
        self.links = LinkFolder(links, records)
        self.links.clean()
        for name in (AGENT_SOCKET, SERVER_SOCKET):
            virtual.unlink(name)
        self._semaphores: list[str] = []
        for name in _SUBMIT:
            self._add_semaphore(links, name)

    def _remove_place(self) -> None:
        """Remove the folder that only this agent uses, while its lock is held. A folder that is not empty stays."""
        assert self._place is not None  # noqa: S101 - the caller checked it.
        for name in (_LOCK, SERVER_LOCK):
            self._virtual.unlink(name)
        with suppress(OSError):
            for name in (IOVS, _RECORDS):
                os.rmdir(name, dir_fd=self._virtual.fd)
            self.virtual.rmdir()
            self._place.rmdir()

    def _keep(self, folder: PrivateFolder) -> PrivateFolder:
        self._parts.push(folder.close)
        return folder

    def _add_semaphore(self, links: PrivateFolder, link: str) -> None:
        # The link first: of a semaphore without one nobody would know that it is to be removed.
        name = f"hf3fs-submit-ios.{uuid.uuid4()}"
        os.symlink(_SHARED / f"sem.{name}", link, dir_fd=links.fd)
        self._parts.push(lambda: _remove_semaphore(links, link))
        create_semaphore(f"/{name}", mode=0o600)
        self._semaphores.append(f"/{name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_mount(path: Path) -> Path:
    """The folder of a mount, resolved.

    Raises
    ------
    UsageError
        It is no folder.
    """
    resolved = path.resolve()
    if not resolved.is_dir():
        message = f"{path} is no folder"
        raise UsageError(message, what_to_do="make it, or name the store's folder")
    return resolved


def _names(folder: PrivateFolder, *, is_wanted: Callable[[os.DirEntry[str]], bool] = lambda _entry: True) -> list[str]:
    with os.scandir(folder.fd) as entries:
        return [entry.name for entry in entries if is_wanted(entry)]


def _remove_semaphore(links: PrivateFolder, link: str) -> None:
    with suppress(FileNotFoundError):
        found = _SEMAPHORE.fullmatch(os.readlink(link, dir_fd=links.fd))
        if found:
            (_SHARED / f"sem.{found[1]}").unlink(missing_ok=True)
    links.unlink(link)


def _remove_shared(name: str, identity: tuple[int, int]) -> None:
    """Remove shared memory if the name is still that of the same memory."""
    path = _SHARED / name
    with suppress(FileNotFoundError):
        found = path.lstat()
        if (found.st_dev, found.st_ino) == identity:
            path.unlink()


def _setup(operation: str, error: OSError, path: Path, what_to_do: str) -> GdrkitError:
    number = errno.EBUSY if isinstance(error, BlockingIOError) else error.errno or errno.EIO
    kind = SetupMissing if number in {errno.EBUSY, errno.EACCES, errno.EROFS, errno.ENOENT} else ApiError
    return kind(
        api=Api.KERNEL,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments={"path": str(path)},
        reason=Reason.BUSY if number == errno.EBUSY else Reason.NO_PERMISSION,
        what_to_do=what_to_do,
    )
