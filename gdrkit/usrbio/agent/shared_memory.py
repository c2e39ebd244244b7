"""The shared memory of clients: files of ``/dev/shm``, which a client publishes by name or sends as a descriptor."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from gdrkit.usrbio.agent.agent_error import AgentError

__all__ = ["IOV_NAME", "SHM_FOLDER", "SharedFile", "adopt_unnamed", "open_shared", "unlink_shared"]

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - the folder of POSIX shared memory.
IOV_NAME = re.compile(r"hf3fs-iov-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class SharedFile:
    """An open file of /dev/shm that a client published.

    Attributes
    ----------
    fd : int
        Descriptor of the file.
    name : str
        Name of the file in /dev/shm.
    length_bytes : int
        Size of the file when it was opened, in bytes.
    identity : tuple of (int, int)
        Device and inode of the file.
    is_unnamed : bool
        Whether the client created the file without a name. Then the agent has to call :meth:`give_name`.
    """

    def __init__(self, fd: int, name: str, status: os.stat_result, *, is_unnamed: bool = False) -> None:
        self.fd = fd
        self.name = name
        self.length_bytes = status.st_size
        self.identity = (status.st_dev, status.st_ino)
        self.is_unnamed = is_unnamed

    def give_name(self) -> None:
        """Create the name of memory that the client created without a name. Do nothing for other memory.

        Raises
        ------
        AgentError
            EEXIST: a file with this name exists. ESTALE: the client has replaced the file meanwhile. Other errors
            have the errno of link(2).
        """
        if not self.is_unnamed:
            return
        folder_fd = os.open(SHM_FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # With dst_dir_fd, Python calls linkat(2), which follows the link in /proc. link(2) would not follow it.
            os.link(f"/proc/self/fd/{self.fd}", self.name, dst_dir_fd=folder_fd, follow_symlinks=True)
            # The file is opened again by its name, so that /proc shows the name for the agent's descriptor.
            named_fd = os.open(self.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
            try:
                status = os.fstat(named_fd)
                if (status.st_dev, status.st_ino) != self.identity:
                    raise OSError(errno.ESTALE, "the client has replaced the file")
                os.dup2(named_fd, self.fd, inheritable=False)
            finally:
                os.close(named_fd)
        except OSError as error:
            message = f"link({SHM_FOLDER / self.name}) failed: {error.strerror}"
            raise AgentError(error.errno or errno.EIO, message) from error
        finally:
            os.close(folder_fd)

    def mark_published(self) -> None:
        """Lock the file, so that other publications of the same file notice this publication."""
        # If a client holds a lock of its own, this call fails. The only effect is that the agent does not keep the
        # memory for the next publication.
        with suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def is_published_elsewhere(self) -> bool:
        """Return whether the file was also opened for another publication, or a client has locked it.

        Each publication holds the shared lock of :meth:`mark_published`. So an exclusive lock is possible only if this
        publication is the only one.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        self.mark_published()
        return False

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Remove the file's name from /dev/shm, if the client library made this name for an iov.

        Call this method only if the client has ended, or does not need the memory any more.
        """
        if IOV_NAME.fullmatch(self.name):
            unlink_shared(self.name, self.identity)


def open_shared(target: str, *, uid: int) -> SharedFile:
    """Open the shared memory that a link to host memory names.

    Raises
    ------
    AgentError
        EINVAL: the target is not a regular file directly in /dev/shm, the file is empty, or another file system is
        mounted on its name. EACCES: the file belongs to another user. Other errors have the errno of open(2).
    """
    folder, _, name = target.rpartition("/")
    if folder != str(SHM_FOLDER) or name in {"", ".", ".."}:
        raise AgentError(errno.EINVAL, f"the target must be a file in {SHM_FOLDER}, not {target!r}")
    try:
        fd = os.open(target, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        error_number = errno.EINVAL if error.errno == errno.ELOOP else error.errno or errno.EIO
        raise AgentError(error_number, f"open({target}) failed: {error.strerror}") from error
    status = os.fstat(fd)
    if not _is_in_memory(status):
        os.close(fd)
        raise AgentError(errno.EINVAL, f"{target} is empty, or not a regular file of the file system of {SHM_FOLDER}")
    if status.st_uid != uid:
        os.close(fd)
        raise AgentError(errno.EACCES, f"{target} belongs to user {status.st_uid}, not to user {uid}")
    return SharedFile(fd, name, status)


def adopt_unnamed(target: str, descriptor: int, *, uid: int) -> SharedFile:
    """Return shared memory that a client created without a name and sent as a descriptor.

    The returned object owns the descriptor. If this function raises AgentError, it has closed the descriptor.

    Raises
    ------
    AgentError
        EINVAL: the descriptor is not writable memory of /dev/shm without a name, or the target is not a name of an iov.
        EACCES: the memory belongs to another user.
    """
    status = os.fstat(descriptor)
    folder, _, name = target.rpartition("/")
    access_mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_PATH)
    refusal: AgentError | None = None
    if folder != str(SHM_FOLDER) or not IOV_NAME.fullmatch(name):
        refusal = AgentError(errno.EINVAL, f"the target must be {SHM_FOLDER}/hf3fs-iov-UUID, not {target!r}")
    elif not _is_in_memory(status) or status.st_nlink or access_mode != os.O_RDWR:
        refusal = AgentError(errno.EINVAL, f"the descriptor is not writable memory of {SHM_FOLDER} without a name")
    elif status.st_uid != uid:
        refusal = AgentError(errno.EACCES, f"the memory belongs to user {status.st_uid}, not to user {uid}")
    if refusal is not None:
        os.close(descriptor)
        raise refusal
    return SharedFile(descriptor, name, status, is_unnamed=True)


def _is_in_memory(status: os.stat_result) -> bool:
    """Return whether a file is in memory, so that an access to its bytes cannot wait for a disk or for a process.

    A user can mount a FUSE file system on the name of a file in /dev/shm, and then delay each access to the file.
    """
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_dev == SHM_FOLDER.stat().st_dev


def unlink_shared(name: str, identity: tuple[int, int]) -> None:
    """Remove shared memory, unless another file has the name now."""
    path = SHM_FOLDER / name
    with suppress(FileNotFoundError):
        status = path.lstat()
        if (status.st_dev, status.st_ino) == identity:
            path.unlink()
