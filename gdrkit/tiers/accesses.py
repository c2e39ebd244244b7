"""Counts of file accesses that are not written to the catalogue yet.

A read of a file must not wait for the catalogue, and must not fail if the catalogue fails. So accesses are counted in
memory and written to the catalogue in batches. If a process is killed, the counts that it has not written are lost.
Files then have a little less heat, but no data is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError, Reason

if TYPE_CHECKING:
    from gdrkit.tiers.catalogue import Catalogue

__all__ = ["Accesses"]

# Number of accesses after which the counts are written to the catalogue.
_FLUSH_THRESHOLD = 256
_log = logging.getLogger(__name__)


class Accesses:
    """The access counts of this process. The object is thread-safe.

    Parameters
    ----------
    catalogue : Catalogue
        The catalogue that the counts are written to.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._flush_threshold = _FLUSH_THRESHOLD

    def count(self, name: str) -> None:
        """Count one access to a file."""
        with self._lock:
            self._counts[name] += 1
            self._total += 1
            is_flush_due = self._total >= self._flush_threshold
        if is_flush_due:
            self.flush()

    def flush(self) -> None:
        """Write the counts to the catalogue. If another process has locked the catalogue, the counts stay in memory."""
        with self._lock:
            counts, self._counts, self._total = self._counts, Counter(), 0
        if not counts:
            return
        try:
            self._catalogue.add_accesses(counts)
        except ApiError as error:
            _log.warning("the accesses of %d files are not in the catalogue yet: %s", len(counts), error)
            if error.reason is Reason.BUSY:
                with self._lock:
                    self._counts.update(counts)
                    # Readers must not wait for the lock at every access, so the next attempt comes later.
                    self._flush_threshold *= 2
        else:
            self._flush_threshold = _FLUSH_THRESHOLD
