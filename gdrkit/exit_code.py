"""Exit codes of the gdrkit commands.

The codes are in a module of their own, so that a command that only inspects the machine does not import all of
``gdrkit.qualify``.
"""

from __future__ import annotations

import enum

from gdrkit.errors import SetupMissing, UsageError

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """The exit codes of the commands. :attr:`meaning` describes what they mean for ``gdrkit qualify``.

    A command that proves nothing, such as ``gdrkit compare``, ends with 0 if it finds no problem.
    """

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
        """The meaning of the code, for people."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.PROVEN: (
        "every required route is proven on hardware, or a software run was requested (--software) and passed"
    ),
    ExitCode.FAILED: "a case failed, or a route fell back where a direct transfer was required",
    ExitCode.WRONG_USAGE: "wrong usage",
    ExitCode.SETUP_MISSING: "set-up is missing",
    ExitCode.NOTHING_PROVEN: "nothing was proven on hardware",
}
