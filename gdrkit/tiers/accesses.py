"""Counts of file accesses that are not written to the catalogue yet.

A read of a file must not wait for the catalogue, and must not fail if the catalogue fails. So accesses are counted in
memory and written to the catalogue in batches. If a process is killed, the counts that it has not written are lost.
The heat of the files (their number of accesses, weighted by age) is then slightly too low, but no data is lost.

While a process counts its accesses, it holds a shared lock (flock) on the file ``users`` in the folder of the
catalogue. ``gdrkit tiers run`` counts the opens of all other programs. It finds the processes with this lock in
/proc/locks and ignores their opens, so that no access counts twice. The kernel releases the lock when a process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError, Reason
from gdrkit.tiers.kernel_errors import convert_os_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.tiers.catalogue import Catalogue

__all__ = ["AccessCounter"]

# Number of counted accesses after which the counts are written to the catalogue.
_FLUSH_THRESHOLD = 256
_log = logging.getLogger(__name__)


class AccessCounter:
    """The access counts of this process. The object is thread-safe.

    Parameters
    ----------
    catalogue : Catalogue
        The catalogue that the counts are written to.
    record_file : callable
        Function that is called with the name of a file that the catalogue does not have, and adds the file. It raises
        :class:`ApiError` if no tier has the file.
    """

    def __init__(self, catalogue: Catalogue, *, record_file: Callable[[str], None]) -> None:
        self._catalogue = catalogue
        self._record_file = record_file
        with convert_os_errors("open catalogue", folder=str(catalogue.folder)):
            self._users_fd = os.open(catalogue.folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._users_fd, fcntl.LOCK_SH)
        self._lock = threading.Lock()
        self._count_by_name: Counter[str] = Counter()
        self._unwritten_access_count = 0
        self._flush_threshold = _FLUSH_THRESHOLD

    def count(self, name: str, access_count: int = 1) -> None:
        """Add `access_count` accesses to the count of a file."""
        with self._lock:
            self._count_by_name[name] += access_count
            self._unwritten_access_count += access_count
            is_flush_due = self._unwritten_access_count >= self._flush_threshold
        if is_flush_due:
            self.flush()

    def flush(self) -> None:
        """Write the counts to the catalogue.

        If another process has locked the catalogue, the counts stay in memory. After any other error, they are dropped.
        """
        with self._lock:
            count_by_name, self._count_by_name, self._unwritten_access_count = self._count_by_name, Counter(), 0
        if not count_by_name:
            return
        unwritten_counts = dict(count_by_name)
        try:
            unknown_names = self._catalogue.add_accesses(unwritten_counts)
            unwritten_counts = {name: count_by_name[name] for name in unknown_names}
            unwritten_counts = {name: count for name, count in unwritten_counts.items() if self._try_record_file(name)}
            if unwritten_counts:
                self._catalogue.add_accesses(unwritten_counts)
        except ApiError as error:
            _log.warning(
                "the accesses to %d files could not be written to the catalogue: %s", len(unwritten_counts), error
            )
            if error.reason is Reason.BUSY:
                with self._lock:
                    self._count_by_name.update(unwritten_counts)
                    # Readers must not wait for the lock at every access, so the next attempt comes later.
                    self._flush_threshold *= 2
        else:
            self._flush_threshold = _FLUSH_THRESHOLD

    def find_counting_process_ids(self) -> frozenset[int]:
        """Return the IDs of the processes that count their own accesses to these tiers, including this process."""
        inode, own_process_id = os.fstat(self._users_fd).st_ino, str(os.getpid())
        lines_of_fields = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        # The fields are: number, type, ADVISORY, READ or WRITE, process ID, MAJOR:MINOR:INODE. The line of a process
        # that still waits for the lock has an arrow (->) in place of the type.
        held_locks = [(fields[4], fields[5]) for fields in lines_of_fields if fields[1] == "FLOCK"]
        # MAJOR:MINOR is not always the st_dev of the file, so it is taken from the line about the lock of this process.
        users_file_ids = {
            locked_file_id
            for holder_id, locked_file_id in held_locks
            if holder_id == own_process_id and locked_file_id.endswith(f":{inode}")
        }
        return frozenset(int(holder_id) for holder_id, locked_file_id in held_locks if locked_file_id in users_file_ids)

    def close(self) -> None:
        """Release the lock of this process. A second close does nothing."""
        descriptor, self._users_fd = self._users_fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _try_record_file(self, name: str) -> bool:
        """Add a file that is not in the catalogue yet. Return whether a tier has the file.

        Raises
        ------
        ApiError
            ``BUSY``: another process has locked the catalogue.
        """
        try:
            self._record_file(name)
        except ApiError as error:
            if error.reason is Reason.BUSY:
                raise
            _log.debug("the accesses to %r are not counted: %s", name, error)
            return False
        return True
