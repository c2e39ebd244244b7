"""Comparison of a registration error with the refusal that a profile expects.

Only codes are compared, never texts. The error of a manager that tried several devices has one refusal per device. Each
of them must equal the expected one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, errno_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.inventory import RefusalCause

__all__ = ["ObservedCause", "ObservedRefusal", "describe", "matching_refusals"]


@dataclass(frozen=True, slots=True)
class ObservedCause:
    """The error of one registration method."""

    api: str
    operation: str
    status: int | None
    status_name: str
    errno: int | None


@dataclass(frozen=True, slots=True)
class ObservedRefusal:
    """A refused registration, with the error of each method that was tried, in order."""

    reason: str
    causes: tuple[ObservedCause, ...]

    def __str__(self) -> str:
        return ", ".join(f"{cause.operation} failed: {cause.status_name} ({cause.status})" for cause in self.causes)


def matching_refusals(error: BaseException | None, expected: Sequence[RefusalCause]) -> tuple[ObservedRefusal, ...]:
    """Return the refusals in `error` if each of them equals the expected one, else an empty tuple."""
    if type(error) is not RegistrationFailed:
        return ()
    refusals = tuple(_refusals_of_devices(error))
    is_match = bool(refusals) and all(_is_expected(refusal, expected) for refusal in refusals)
    return tuple(map(_observed, refusals)) if is_match else ()


def describe(expected: Sequence[RefusalCause]) -> str:
    """Return the expected causes as a text."""
    return " and ".join(map(str, expected))


def _refusals_of_devices(error: RegistrationFailed) -> Iterator[RegistrationFailed]:
    nested = [cause for cause in error.causes if isinstance(cause, RegistrationFailed)]
    # An error of several devices has only causes of this type. An error with mixed causes is returned as it is, and
    # does not equal the expected refusal.
    if nested and len(nested) == len(error.causes):
        for cause in nested:
            yield from _refusals_of_devices(cause)
    else:
        yield error


def _is_expected(error: RegistrationFailed, expected: Sequence[RefusalCause]) -> bool:
    if error.reason is not Reason.NO_ROUTE or len(error.causes) != len(expected):
        return False
    return all(
        isinstance(cause, ApiError)
        and cause.api is Api.VERBS
        and cause.operation == expected_cause.operation
        and cause.errno is not None
        and errno_name(cause.errno) == expected_cause.errno
        for cause, expected_cause in zip(error.causes, expected, strict=True)
    )


def _observed(error: RegistrationFailed) -> ObservedRefusal:
    causes = tuple(
        ObservedCause(cause.api.value, cause.operation, cause.status, cause.status_name, cause.errno)
        for cause in error.causes
        if isinstance(cause, ApiError)
    )
    return ObservedRefusal(error.reason.value, causes)
