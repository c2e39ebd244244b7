"""Protection of a file during its migration, against a second migration and against writers.

Three mechanisms protect the file that is copied:

- flock(2) excludes every other process that migrates the file, or writes it through gdrkit. The kernel releases the
  lock when the process ends.
- A read lease (fcntl(2), F_SETLEASE): the kernel reports when any program opens the file for writing, and blocks that
  program until the lease is released. The kernel refuses the lease while a writer has the file open or mapped.
- The stat(2) results before and after the copy are compared. This also works on file systems without leases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import TYPE_CHECKING

from gdrkit.tiers.kernel_errors import busy_error
from gdrkit.tiers.names import printable

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Guard", "is_unchanged", "lock_exclusive", "lock_shared"]

# F_SETLEASE fails with these errors if the file system does not support leases, or this user may not take one.
_NO_LEASE_ERRNOS = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


class Guard:
    """Protection of a file against unnoticed changes; a context manager.

    Parameters
    ----------
    descriptor : int
        Descriptor of the file, open for reading only. The caller closes it.
    name : str
        Name of the file, for errors.

    Raises
    ------
    ApiError
        ``BUSY``: another process migrates the file, or has it open for writing.

    Attributes
    ----------
    has_lease : bool
        Whether this process holds a read lease on the file.
    initial_status : os.stat_result
        The stat(2) result when the protection began.
    """

    def __init__(self, descriptor: int, *, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        lock_exclusive(descriptor, name=name)
        self.has_lease = self._take_lease()
        self.initial_status = os.fstat(descriptor)

    def check(self) -> None:
        """Check that the file has not changed, and that no program waits to write it.

        Raises
        ------
        ApiError
            ``BUSY``: a program has written the file, or is about to write it.
        """
        if self.has_lease and fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise busy_error("migrate", "a program opens the file for writing", name=printable(self._name))
        if not is_unchanged(os.fstat(self.descriptor), self.initial_status):
            raise busy_error("migrate", "the file has changed during the migration", name=printable(self._name))

    def close(self) -> None:
        """Release the lease and the lock, so that writers can continue."""
        if self.has_lease:
            self.has_lease = False
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _take_lease(self) -> bool:
        """Take a read lease on the file. Return False if leases are not possible here (see `_NO_LEASE_ERRNOS`)."""
        # With F_SETSIG, the kernel sends SIGURG when a program opens the file for writing, and processes ignore SIGURG
        # by default. (SIGIO, which the kernel sends without F_SETSIG, would end the process.) check() polls the lease.
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EBUSY}:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
                raise busy_error("migrate", "the file is open for writing", name=printable(self._name)) from error
            if error.errno not in _NO_LEASE_ERRNOS:
                raise
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def lock_exclusive(descriptor: int, *, name: str) -> None:
    """Take the exclusive lock of the file, until its descriptor is closed. Only processes of gdrkit take this lock.

    Raises
    ------
    ApiError
        ``BUSY``: another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy_error("migrate", "another process migrates or writes the file", name=printable(name)) from error


def lock_shared(descriptor: int) -> None:
    """Take the shared lock of a writer, until the descriptor is closed. The call waits for the end of a migration."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_unchanged(status_now: os.stat_result, status_before: os.stat_result) -> bool:
    """Return whether two stat(2) results are equal.

    The access time and the change time are ignored: a migration reads and renames the file, which may change them.
    """
    fields = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_nlink", "st_mode", "st_uid", "st_gid")
    return all(getattr(status_now, field) == getattr(status_before, field) for field in fields)
