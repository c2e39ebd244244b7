"""Comparison of a registration error with the refusal that a profile states.

Only codes are compared, never text. The error of a manager that tried several devices has one refusal for each of them.
Every one must be the stated one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, errno_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import RefusalCause

__all__ = ["SeenCause", "SeenRefusal", "refusals", "stated"]


@dataclass(frozen=True, slots=True)
class SeenCause:
    """The result of one registration method that failed."""

    api: str
    operation: str
    status: int | None
    status_name: str
    errno: int | None


@dataclass(frozen=True, slots=True)
class SeenRefusal:
    """A refused registration, with the failure of each method that was tried, in order."""

    reason: str
    causes: tuple[SeenCause, ...]

    def __str__(self) -> str:
        return ", ".join(f"{cause.operation} failed: {cause.status_name} ({cause.status})" for cause in self.causes)


def refusals(error: BaseException | None, expected: Sequence[RefusalCause]) -> tuple[SeenRefusal, ...]:
    """Return the refusals in `error` if each equals the expected one, else an empty tuple."""
    if type(error) is not RegistrationFailed:
        return ()
    found = tuple(_leaves(error))
    return tuple(map(_seen, found)) if found and all(_is_stated(leaf, expected) for leaf in found) else ()


def stated(expected: Sequence[RefusalCause]) -> str:
    """Return the expected causes as text."""
    return " and ".join(map(str, expected))


def _leaves(error: RegistrationFailed) -> Iterator[RegistrationFailed]:
    nested = [cause for cause in error.causes if isinstance(cause, RegistrationFailed)]
    # An error that has both kinds of causes is not split, and does not equal the stated refusal.
    if nested and len(nested) == len(error.causes):
        for cause in nested:
            yield from _leaves(cause)
    else:
        yield error


def _is_stated(error: RegistrationFailed, expected: Sequence[RefusalCause]) -> bool:
    if error.reason is not Reason.NO_ROUTE or len(error.causes) != len(expected):
        return False
    return all(
        isinstance(cause, ApiError)
        and cause.api is Api.VERBS
        and cause.operation == wanted.operation
        and cause.errno is not None
        and errno_name(cause.errno) == wanted.errno
        for cause, wanted in zip(error.causes, expected, strict=True)
    )


def _seen(error: RegistrationFailed) -> SeenRefusal:
    causes = tuple(
        SeenCause(cause.api.value, cause.operation, cause.status, cause.status_name, cause.errno)
        for cause in error.causes
        if isinstance(cause, ApiError)
    )
    return SeenRefusal(error.reason.value, causes)
