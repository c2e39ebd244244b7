"""Protection of a file during its migration, against a second migration and against writers.

Three mechanisms protect the file that is copied:

- flock(2) excludes every other process that migrates the file, or writes it through gdrkit. It ends with its process.
- A read lease (fcntl(2), F_SETLEASE): the kernel reports when any program opens the file for writing, and blocks that
  program until the lease is released. The kernel refuses the lease while a writer has the file open or mapped.
- A comparison of the stat(2) results before and after, for file systems without leases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import TYPE_CHECKING

from gdrkit.tiers.names import shown
from gdrkit.tiers.refusal import busy

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Guard", "same_file", "share"]

# Errors by which the kernel says that the file system, or this user, cannot have leases.
_NO_LEASE = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


class Guard:
    """Protection of a file against unnoticed changes; a context manager.

    Parameters
    ----------
    descriptor : int
        Descriptor of the file, open for reading only. The caller still owns it.
    name : str
        Name of the file, for errors.

    Raises
    ------
    ApiError
        ``BUSY``: the file is being migrated, or is open for writing.
    """

    def __init__(self, descriptor: int, *, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        lock_alone(descriptor, name=name)
        self.has_lease = self._lease()
        self.info = os.fstat(descriptor)

    def check(self) -> None:
        """Check that the file has not changed, and that no program waits to write it.

        Raises
        ------
        ApiError
            ``BUSY``: a program has written the file, or is about to write it.
        """
        if self.has_lease and fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise busy("migrate", "a program opens the file to write", name=shown(self._name))
        if not same_file(os.fstat(self.descriptor), self.info):
            raise busy("migrate", "the file was changed meanwhile", name=shown(self._name))

    def close(self) -> None:
        """Release the lease and the lock, so that writers can continue."""
        if self.has_lease:
            self.has_lease = False
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _lease(self) -> bool:
        # The kernel sends this signal when a program opens the file. It is ignored by default; check() polls the lease
        # instead.
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EBUSY}:
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
                raise busy("migrate", "the file is open for writing", name=shown(self._name)) from error
            if error.errno not in _NO_LEASE:
                raise
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lock_alone(descriptor: int, *, name: str) -> None:
    """Lock the file exclusively among the processes of gdrkit, until its descriptor is closed.

    Raises
    ------
    ApiError
        ``BUSY``: another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy("migrate", "another process migrates or writes the file", name=shown(name)) from error


def share(descriptor: int) -> None:
    """Lock the file as one of its writers, until its descriptor is closed. Waits for the end of a migration."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def same_file(found: os.stat_result, wanted: os.stat_result) -> bool:
    """Return whether nothing but the name has changed (a change of the name changes st_ctime)."""
    fields = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_nlink", "st_mode", "st_uid", "st_gid")
    return all(getattr(found, field) == getattr(wanted, field) for field in fields)
