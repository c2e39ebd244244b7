"""The FUSE mount of an agent: the files of a store, and the folder ``3fs-virt`` that 3FS clients publish in.

Only ``_mfusepy.py`` imports the foreign library.
"""

from __future__ import annotations

__all__: list[str] = []
