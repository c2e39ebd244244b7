"""Access to the native engine of the storage service. The engine is imported at its first use, not with this file.

``_engine`` is the native module (``native/storage``). It needs libibverbs. Packing and parsing of frames must also work
on a machine without libibverbs, so the import of this file does not load the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.loader import NEEDS_LIBIBVERBS, LazyModule

if TYPE_CHECKING:
    from gdrkit.storage import _engine as engine
else:
    engine = LazyModule("gdrkit.storage._engine", what_to_do=NEEDS_LIBIBVERBS)

__all__ = ["engine"]
