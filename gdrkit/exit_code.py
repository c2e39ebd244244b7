"""Exit codes of the command line.

They are in a module without further imports: a command that only inspects the machine must not load all code of
qualification for one number.
"""

from __future__ import annotations

import enum

from gdrkit.errors import SetupMissing, UsageError

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The exit codes of ``gdrkit qualify``. Help and documents use their meanings."""

    PROVEN = 0
    FAILED = 1
    WRONG_USAGE = 2
    SETUP_MISSING = 3
    NOTHING_PROVEN = 4

    @classmethod
    def of(cls, error: BaseException) -> ExitCode:
        """Return the exit code of a command that ends with this error."""
        if isinstance(error, SetupMissing):
            return cls.SETUP_MISSING
        return cls.WRONG_USAGE if isinstance(error, UsageError) else cls.FAILED

    @property
    def meaning(self) -> str:
        """The meaning in words."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.PROVEN: (
        "every required route is proven on hardware, or a software run was asked for (--software) and passed"
    ),
    ExitCode.FAILED: "a case failed, or a route fell back where direct was required",
    ExitCode.WRONG_USAGE: "wrong usage",
    ExitCode.SETUP_MISSING: "set-up is missing",
    ExitCode.NOTHING_PROVEN: "nothing was proven on hardware",
}
