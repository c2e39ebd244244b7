"""Derivation of the outcome of a qualification from its records: exit code, verdict in one sentence, and causes.

The module performs no I/O. ``gdrkit qualify`` calls :func:`decide` after the last case. A *route* is the path of bytes
between a GPU and a NIC. The *profile* of the machine states which routes must be proven, and which needs of a case may
be unmet (foreseen absences). Cases can run on hardware or on software twins, libraries that emulate the hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gdrkit.errors import Reason
from gdrkit.exit_code import ExitCode
from gdrkit.inventory import link_shortfalls
from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteOutcome, is_required, route_statuses, unmet_requirements
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import Facts, Profile
    from gdrkit.report.record import Record
    from gdrkit.report.routes import RouteStatus

__all__ = ["Outcome", "decide"]

# If a query of an API failed for one of these reasons, an administrator can repair the set-up. Other reasons, such as
# missing hardware, cannot be repaired.
_REPAIRABLE_REASONS = frozenset(
    {
        Reason.LIBRARY_MISSING,
        Reason.LIBRARY_DAMAGED,
        Reason.LIBRARY_WRONG_ABI,
        Reason.NO_PERMISSION,
        Reason.MEMLOCK_TOO_LOW,
    }
)
# Largest number of causes that an outcome lists.
_CAUSES_MAX = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes
    ----------
    code : ExitCode
        The exit code of the command.
    verdict : str
        The result of the run, as one sentence without a full stop.
    causes : tuple of str
        The most important causes of the verdict, at most five.
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
    facts: Facts, profile: Profile, records: Sequence[Record], *, uses_only_twins: bool, is_part: bool = False
) -> Outcome:
    """Decide the outcome of a run.

    Parameters
    ----------
    facts, profile, records
        The facts, profile and records of the run.
    uses_only_twins : bool
        Whether the user requested to run all cases on software twins (``--software``).
    is_part : bool
        Whether the user selected only a part of the cases. Then at least one case must have run. Otherwise the profile
        states how many cases must have run.
    """
    statuses = route_statuses(facts, records)
    unproven_required_routes = () if uses_only_twins else unmet_requirements(profile, statuses)
    failed_outcome = _decide_on_failures(profile, records, statuses, uses_only_twins=uses_only_twins)
    if failed_outcome is not None:
        return failed_outcome
    set_up_failures = [failure for failure in facts.failures if failure.reason in _REPAIRABLE_REASONS]
    if set_up_failures:
        return Outcome(
            code=ExitCode.SETUP_MISSING,
            verdict="The set-up of this machine is not complete",
            causes=tuple(dict.fromkeys(failure.message for failure in set_up_failures)),
            to_do=tuple(dict.fromkeys(failure.what_to_do for failure in set_up_failures if failure.what_to_do)),
            required=unproven_required_routes,
        )
    incomplete_outcome = _decide_on_missing_cases(profile, records, is_part=is_part)
    if incomplete_outcome is not None and not incomplete_outcome.causes:
        # Too few cases ran. The cases that need an API do not run if it failed, so the error of the API is the cause.
        incomplete_outcome = replace(
            incomplete_outcome,
            causes=tuple(dict.fromkeys(failure.message for failure in facts.failures))[:_CAUSES_MAX],
            to_do=tuple(dict.fromkeys(failure.what_to_do for failure in facts.failures if failure.what_to_do)),
        )
    if incomplete_outcome is None and uses_only_twins:
        return Outcome(code=ExitCode.PROVEN, verdict="The code passed on software twins")
    return (
        incomplete_outcome
        or _decide_on_links(facts, profile, unproven_required_routes)
        or _decide_on_routes(statuses, unproven_required_routes)
    )


def _decide_on_links(facts: Facts, profile: Profile, unproven_required_routes: tuple[str, ...]) -> Outcome | None:
    """Return a failed outcome if the machine lacks a link that the profile expects, else None."""
    shortfalls = link_shortfalls(profile.links, facts)
    if not shortfalls:
        return None
    return Outcome(
        code=ExitCode.FAILED,
        verdict=f"The links differ from the links in profile {profile.name}",
        causes=shortfalls[:_CAUSES_MAX],
        to_do=("look for the slow or missing link with nvidia-smi nvlink -s, lspci -vv (LnkSta) and ibstat",),
        required=unproven_required_routes,
    )


def _decide_on_routes(statuses: Sequence[RouteStatus], unproven_required_routes: tuple[str, ...]) -> Outcome:
    proven_statuses = [status for status in statuses if status.state is RouteOutcome.PROVEN]
    if not proven_statuses:
        return Outcome(
            code=ExitCode.NOTHING_PROVEN,
            verdict="Nothing was proven on hardware",
            causes=_list_unproven_causes(statuses),
            to_do=("run it on a machine with a GPU and an RDMA NIC, or add --software to qualify the code alone",),
            required=unproven_required_routes,
        )
    if unproven_required_routes:
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"{format_count(len(unproven_required_routes), 'required route')} not proven",
            causes=unproven_required_routes[:_CAUSES_MAX],
            required=unproven_required_routes,
        )
    return Outcome(code=ExitCode.PROVEN, verdict="Every required route is proven on hardware")


def _decide_on_failures(
    profile: Profile, records: Sequence[Record], statuses: Sequence[RouteStatus], *, uses_only_twins: bool
) -> Outcome | None:
    failed_records = [record for record in records if record.verdict is Verdict.FAIL]
    fallback_statuses = [
        status
        for status in statuses
        if status.state is RouteOutcome.FELL_BACK and (uses_only_twins or is_required(profile, status))
    ]
    if failed_records:
        ran_count = sum(record.verdict is not Verdict.NOT_RUN for record in records)
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"{len(failed_records)} of {format_count(ran_count, 'case')} failed",
            causes=tuple(_describe_first_reason(record) for record in failed_records[:_CAUSES_MAX]),
        )
    if fallback_statuses:
        return Outcome(
            code=ExitCode.FAILED,
            verdict="A route fell back where a direct transfer was required",
            causes=tuple(f"{status.name}: {status.cause}" for status in fallback_statuses[:_CAUSES_MAX]),
        )
    return None


def _decide_on_missing_cases(profile: Profile, records: Sequence[Record], *, is_part: bool) -> Outcome | None:
    """Return a failed outcome if cases that the profile requires did not run, else None."""
    unforeseen_records = [record for record in records if record.verdict is Verdict.NOT_RUN and record.is_failure]
    if unforeseen_records:
        reasons = [reason for record in unforeseen_records for reason in record.reasons if reason.foreseen is not True]
        return Outcome(
            code=ExitCode.FAILED,
            verdict=(
                f"{format_count(len(unforeseen_records), 'case')} did not run, "
                f"and profile {profile.name} does not foresee that"
            ),
            causes=tuple(dict.fromkeys(f"{reason.need}: {reason.text}" for reason in reasons))[:_CAUSES_MAX],
        )
    ran_count = sum(record.verdict is not Verdict.NOT_RUN for record in records)
    required_count = 1 if is_part else profile.cases_min
    if ran_count < required_count:
        return Outcome(
            code=ExitCode.FAILED,
            verdict=f"Only {format_count(ran_count, 'case')} ran; profile {profile.name} requires {required_count}",
        )
    return None


def _list_unproven_causes(statuses: Sequence[RouteStatus]) -> tuple[str, ...]:
    if not statuses:
        return ("there is no pair of a device and a NIC",)
    route_names_by_cause: dict[str, list[str]] = {}
    for status in statuses:
        route_names_by_cause.setdefault(status.cause, []).append(status.name)
    cause_texts = [
        f"{route_names[0]}{f' and {len(route_names) - 1} more' if len(route_names) > 1 else ''}: {cause}"
        for cause, route_names in route_names_by_cause.items()
    ]
    return tuple(cause_texts[:_CAUSES_MAX])


def _describe_first_reason(record: Record) -> str:
    return f"{record.case}: {record.reasons[0].text}" if record.reasons else record.case
