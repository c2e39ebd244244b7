"""The FUSE mount of an agent: the files of a store, and the folder ``3fs-virt`` in which clients of 3FS publish iovs.

README.md has the order in which to read the modules.
"""

from __future__ import annotations

__all__: list[str] = []
