"""Counts of file accesses that are not written to the catalogue yet.

A read must neither wait for the catalogue nor fail because of it. So accesses are counted here and written to the
catalogue in batches. If a process is killed, its unwritten counts are lost: a little heat, but no data.
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

_DUE = 256
_log = logging.getLogger(__name__)


class Accesses:
    """The access counts of this process. They are thread-safe.

    Parameters
    ----------
    catalogue : Catalogue
        The catalogue that the counts are written to.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sum = 0
        self._due = _DUE

    def count(self, name: str) -> None:
        """Count one access to a file."""
        with self._lock:
            self._counts[name] += 1
            self._sum += 1
            is_due = self._sum >= self._due
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Write the counts to the catalogue. If it is locked by another process, they stay here."""
        with self._lock:
            counts, self._counts, self._sum = self._counts, Counter(), 0
        if not counts:
            return
        try:
            self._catalogue.used(counts)
        except ApiError as error:
            _log.warning("accesses of %d files are not in the catalogue yet: %s", len(counts), error)
            if error.reason is Reason.BUSY:
                with self._lock:
                    self._counts.update(counts)
                    # Readers must not wait for the lock at every access, so the next attempt comes later.
                    self._due *= 2
        else:
            self._due = _DUE
