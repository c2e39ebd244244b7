"""The fixture `allocator`, with which the cases of this folder run on host memory and on device memory."""

from __future__ import annotations

from support.memory_kinds import allocator

__all__ = ["allocator"]
