"""The agent: it registers the memory of client processes, and a storage server moves the bytes of files.

README.md has the order in which to read the modules.
"""

from __future__ import annotations

__all__: list[str] = []
