"""The errors that end the lab if it cannot run on this machine."""

from __future__ import annotations

__all__ = ["BootTimeoutError", "LabError"]


class LabError(Exception):
    """The lab cannot run, and ends with exit code 3. The text of the error names the cause and the remedy."""


class BootTimeoutError(LabError):
    """The virtual machine did not boot in time."""
