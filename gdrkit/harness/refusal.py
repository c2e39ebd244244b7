"""Comparison of a registration error with the refusal that the profile of a machine expects.

A refusal is the error with which a registration fails on a machine whose NICs cannot register device memory. Only error
codes are compared, never texts. If the registration was tried with several devices, each of them must have failed with
the expected refusal.
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
    """The error with which one registration method failed."""

    api: str
    operation: str
    status: int | None
    status_name: str
    errno: int | None


@dataclass(frozen=True, slots=True)
class ObservedRefusal:
    """A refused registration, with the error of each tried registration method, in order."""

    reason: str
    causes: tuple[ObservedCause, ...]

    def __str__(self) -> str:
        return ", ".join(f"{cause.operation} failed: {cause.status_name} ({cause.status})" for cause in self.causes)


def matching_refusals(
    error: BaseException | None, expected_causes: Sequence[RefusalCause]
) -> tuple[ObservedRefusal, ...]:
    """Return the refusal of each device in `error` if each refusal has the expected causes, else an empty tuple."""
    if type(error) is not RegistrationFailed:
        return ()
    refusals = tuple(_list_device_refusals(error))
    is_match = bool(refusals) and all(_is_expected(refusal, expected_causes) for refusal in refusals)
    return tuple(map(_make_observed_refusal, refusals)) if is_match else ()


def describe(expected_causes: Sequence[RefusalCause]) -> str:
    """Return the expected causes as a text."""
    return " and ".join(map(str, expected_causes))


def _list_device_refusals(error: RegistrationFailed) -> Iterator[RegistrationFailed]:
    """Yield the error of each device with which the registration was tried."""
    nested_failures = [cause for cause in error.causes if isinstance(cause, RegistrationFailed)]
    # If the registration was tried with several devices, each cause of the error is the RegistrationFailed of one
    # device. An error with other causes is the refusal of a single device.
    if nested_failures and len(nested_failures) == len(error.causes):
        for cause in nested_failures:
            yield from _list_device_refusals(cause)
    else:
        yield error


def _is_expected(error: RegistrationFailed, expected_causes: Sequence[RefusalCause]) -> bool:
    if error.reason is not Reason.NO_ROUTE or len(error.causes) != len(expected_causes):
        return False
    return all(
        isinstance(cause, ApiError)
        and cause.api is Api.VERBS
        and cause.operation == expected_cause.operation
        and cause.errno is not None
        and errno_name(cause.errno) == expected_cause.errno
        for cause, expected_cause in zip(error.causes, expected_causes, strict=True)
    )


def _make_observed_refusal(error: RegistrationFailed) -> ObservedRefusal:
    causes = tuple(
        ObservedCause(cause.api.value, cause.operation, cause.status, cause.status_name, cause.errno)
        for cause in error.causes
        if isinstance(cause, ApiError)
    )
    return ObservedRefusal(error.reason.value, causes)
