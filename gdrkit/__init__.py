"""gdrkit provides, verifies and measures direct transfers between device memory, RDMA NICs and storage.

Importing this package opens no foreign library. Each subpackage opens the library that it needs at its first call. See
``docs/`` and the README of each folder.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
