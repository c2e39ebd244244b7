"""The fixture `allocator`, which allocates the memory of a case: host memory or device memory."""

from __future__ import annotations

from support.memory_kinds import allocator

__all__ = ["allocator"]
