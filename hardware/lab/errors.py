"""The error that ends the lab if it cannot run on this machine."""

from __future__ import annotations

__all__ = ["LabError"]


class LabError(Exception):
    """The lab cannot run, and ends with exit code 3. The text of the error names the cause and the remedy."""
