"""Derivation of the outcome of a run from its records: an exit code, a verdict in a sentence, and the causes.

The module performs no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdrkit.errors import Reason
from gdrkit.exit_code import ExitCode
from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteOutcome, is_required, route_statuses, unmet_requirements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import Facts, Profile
    from gdrkit.report.record import Record
    from gdrkit.report.routes import RouteStatus

__all__ = ["Outcome", "decide"]

# Failures that an administrator can fix on this machine, unlike missing hardware.
_SET_UP_REASONS = frozenset(
    {
        Reason.LIBRARY_MISSING,
        Reason.LIBRARY_DAMAGED,
        Reason.LIBRARY_WRONG_ABI,
        Reason.NO_PERMISSION,
        Reason.MEMLOCK_TOO_LOW,
    }
)
# The most causes that an outcome lists.
_CAUSES_MAX = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes
    ----------
    code : ExitCode
        The exit code of the command.
    verdict : str
        One sentence.
    causes : tuple of str
        The first causes of that verdict.
    to_do : tuple of str
        Steps that the user can take.
    required : tuple of str
        The routes that the profile requires and that are not proven.
    """

    code: ExitCode
    verdict: str
    causes: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    required: tuple[str, ...] = field(default=())


def decide(
    facts: Facts, profile: Profile, records: Sequence[Record], *, software_asked: bool, is_part: bool = False
) -> Outcome:
    """Decide the outcome of a run.

    Parameters
    ----------
    facts, profile, records
        The facts, profile and records of the run.
    software_asked : bool
        Whether the user requested a qualification of the code alone (``--software``).
    is_part : bool
        Whether the user selected a part of the cases. Then one case suffices, instead of the minimum of the profile.
    """
    statuses = route_statuses(facts, records)
    required = () if software_asked else unmet_requirements(profile, statuses)
    failed = _failures(profile, records, statuses, software_asked=software_asked)
    if failed is not None:
        return failed
    set_up = [failure for failure in facts.failures if failure.reason in _SET_UP_REASONS]
    if set_up:
        return Outcome(
            code=ExitCode.SETUP_MISSING,
            verdict="The set-up of this machine is not complete",
            causes=tuple(dict.fromkeys(failure.message for failure in set_up)),
            to_do=tuple(dict.fromkeys(failure.what_to_do for failure in set_up if failure.what_to_do)),
            required=required,
        )
    incomplete = _incomplete(profile, records, is_part=is_part)
    if incomplete is None and software_asked:
        return Outcome(code=ExitCode.PROVEN, verdict="The code passed on software twins")
    return incomplete or _on_hardware(statuses, required)


def _on_hardware(statuses: Sequence[RouteStatus], required: tuple[str, ...]) -> Outcome:
    proven = [status for status in statuses if status.state is RouteOutcome.PROVEN]
    if not proven:
        return Outcome(
            code=ExitCode.NOTHING_PROVEN,
            verdict="Nothing was proven on hardware",
            causes=_causes_of_unproven(statuses),
            to_do=("run it where a GPU and an RDMA NIC are, or add --software to qualify the code alone",),
            required=required,
        )
    if required:
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"{_count(len(required), 'required route')} not proven",
            causes=required[:_CAUSES_MAX],
            required=required,
        )
    return Outcome(code=ExitCode.PROVEN, verdict="Every required route is proven on hardware")


def _failures(
    profile: Profile, records: Sequence[Record], statuses: Sequence[RouteStatus], *, software_asked: bool
) -> Outcome | None:
    failed = [record for record in records if record.verdict is Verdict.FAIL]
    fallbacks = [
        status
        for status in statuses
        if status.state is RouteOutcome.FELL_BACK and (software_asked or is_required(profile, status))
    ]
    if failed:
        ran = sum(record.verdict is not Verdict.NOT_RUN for record in records)
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"{len(failed)} of {_count(ran, 'case')} failed",
            causes=tuple(_first_reason(record) for record in failed[:_CAUSES_MAX]),
        )
    if fallbacks:
        return Outcome(
            code=ExitCode.FAILED,
            verdict="A route fell back where direct was required",
            causes=tuple(f"{status.name}: {status.cause}" for status in fallbacks[:_CAUSES_MAX]),
        )
    return None


def _incomplete(profile: Profile, records: Sequence[Record], *, is_part: bool) -> Outcome | None:
    """Return the failed outcome if cases did not run although they had to; else None."""
    missed = [record for record in records if record.verdict is Verdict.NOT_RUN and record.is_failure]
    if missed:
        reasons = [reason for record in missed for reason in record.reasons if reason.foreseen is not True]
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"{_count(len(missed), 'case')} did not run, and profile {profile.name} does not foresee that",
            causes=tuple(dict.fromkeys(f"{reason.need}: {reason.text}" for reason in reasons))[:_CAUSES_MAX],
        )
    ran = sum(record.verdict is not Verdict.NOT_RUN for record in records)
    required = 1 if is_part else profile.cases_min
    if ran < required:
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"Only {_count(ran, 'case')} ran; profile {profile.name} requires {required}",
        )
    return None


def _causes_of_unproven(statuses: Sequence[RouteStatus]) -> tuple[str, ...]:
    if not statuses:
        return ("there is no pair of a device and a NIC",)
    causes: dict[str, list[str]] = {}
    for status in statuses:
        causes.setdefault(status.cause, []).append(status.name)
    texts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {cause}"
        for cause, names in causes.items()
    ]
    return tuple(texts[:_CAUSES_MAX])


def _first_reason(record: Record) -> str:
    return f"{record.case}: {record.reasons[0].text}" if record.reasons else record.case


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
