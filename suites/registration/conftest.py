"""The fixture that gives these cases host memory or device memory."""

from __future__ import annotations

from support.memory_kinds import allocator

__all__ = ["allocator"]
