"""The fixture that gives these cases host memory or device memory."""

from __future__ import annotations

from support.reach import space

__all__ = ["space"]
