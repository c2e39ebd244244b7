"""The fixture by which the cases here take their kind of memory."""

from __future__ import annotations

from support.reach import space

__all__ = ["space"]
