"""One migration at a time for a file, and none while it changes.

Level 4. Three things watch over the file that is copied:

- flock(2) keeps out whoever else migrates it or writes it by gdrkit, in any process; it goes with its process.
- A read lease (fcntl(2), F_SETLEASE) has the kernel say when any program opens the file to write, and make that
  program wait until the lease is given back. It cannot be had while a writer has the file open or mapped.
- What stat(2) says of it before and after, for file systems that have no leases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import TYPE_CHECKING

from gdrkit.gds.tiers.names import shown
from gdrkit.gds.tiers.refusal import busy

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Guard", "same_file", "share"]

# By these the kernel says that a file system, or this user, has no leases.
_NO_LEASE = frozenset({errno.EINVAL, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


class Guard:
    """A file of which nobody may change a byte unnoticed; use it as a context manager.

    Parameters
    ----------
    descriptor : int
        Of the file, open for reading alone; it stays its owner's.
    name : str
        For errors.

    Raises
    ------
    ApiError
        ``BUSY``: it is migrated, or open for writing.
    """

    def __init__(self, descriptor: int, *, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        lock_alone(descriptor, name=name)
        self.has_lease = self._lease()
        self.info = os.fstat(descriptor)

    def check(self) -> None:
        """See that nothing has changed, and that nobody waits to change it.

        Raises
        ------
        ApiError
            ``BUSY``: somebody has written, or is about to.
        """
        if self.has_lease and fcntl.fcntl(self.descriptor, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise busy("migrate", "a program opens the file to write", name=shown(self._name))
        if not same_file(os.fstat(self.descriptor), self.info):
            raise busy("migrate", "the file was changed meanwhile", name=shown(self._name))

    def close(self) -> None:
        """Let writers in."""
        if self.has_lease:
            self.has_lease = False
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def _lease(self) -> bool:
        # Whoever opens it makes the kernel send this signal, which by itself does nothing; we look for ourselves.
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
    """Be the only one of gdrkit with this file, until its descriptor is closed.

    Raises
    ------
    ApiError
        ``BUSY``.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy("migrate", "another process migrates or writes the file", name=shown(name)) from error


def share(descriptor: int) -> None:
    """Be one of those who write a file, until its descriptor is closed; waits for the end of a migration."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def same_file(found: os.stat_result, wanted: os.stat_result) -> bool:
    """Whether nobody has written, linked or changed anything but its name (which changes st_ctime)."""
    fields = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_nlink", "st_mode", "st_uid", "st_gid")
    return all(getattr(found, field) == getattr(wanted, field) for field in fields)
