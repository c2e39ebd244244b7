"""The error of a lab that cannot run."""

from __future__ import annotations

__all__ = ["LabError"]


class LabError(Exception):
    """The lab cannot run, and ends with exit code 3. The text is one sentence with cause and remedy."""
