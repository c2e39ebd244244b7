"""Accesses that are not in the catalogue yet.

Level 4. A read must neither wait for the catalogue nor fail because of it, so accesses are counted here and told by and
by. What was not told when a process is killed is lost: a little heat, no byte.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING

from gdrkit.errors import ApiError, Reason

if TYPE_CHECKING:
    from gdrkit.gds.tiers.catalogue import Catalogue

__all__ = ["Accesses"]

_DUE = 256
_log = logging.getLogger(__name__)


class Accesses:
    """The accesses of this process; any thread may count.

    Parameters
    ----------
    catalogue : Catalogue
        Whom they are told.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._sum = 0
        self._due = _DUE

    def count(self, name: str) -> None:
        """One more."""
        with self._lock:
            self._counts[name] += 1
            self._sum += 1
            is_due = self._sum >= self._due
        if is_due:
            self.tell()

    def tell(self) -> None:
        """Tell the catalogue; while another process keeps it locked, or it is damaged, they stay here."""
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
                    # Whoever reads now should not wait for the lock at every access.
                    self._due *= 2
        else:
            self._due = _DUE
