"""The agent: it registers the memory of client processes, and has a storage server move the bytes of files.

README.md has the order in which to read the modules.
"""

from __future__ import annotations

__all__: list[str] = []
