"""What keeps the lab from running."""

from __future__ import annotations

__all__ = ["LabError"]


class LabError(Exception):
    """One sentence that says what is missing or broken and what to do; the lab ends with 3."""
