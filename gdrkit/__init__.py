"""gdrkit proves, measures and provides direct transfers between device memory, RDMA NICs and storage.

Importing this package opens no foreign library; each room opens the one it needs at its first call. See ``docs/`` and
the README of each folder.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
