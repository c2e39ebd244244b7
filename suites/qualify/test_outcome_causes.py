"""The causes in the outcome of a run: their selection, number and texts. The cases construct the records."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from support.records import make_facts, make_proven_route, make_record, make_route_facts

from gdrkit.errors import Reason
from gdrkit.inventory import ApiFailure, Profile
from gdrkit.inventory.profile import RequiredRoute
from gdrkit.qualify import ExitCode, Outcome, decide
from gdrkit.report import CaseReason, ClaimedRoute, Verdict

if TYPE_CHECKING:
    from gdrkit.report import Record

HARDWARE_SUBSTRATES = {"verbs": "hardware", "cuda": "hardware"}
BARE_PROFILE = Profile(schema_version=1, name="bare", about="")
STRICT_PROFILE = dataclasses.replace(BARE_PROFILE, name="strict", routes=(RequiredRoute(),))
PASSED_RECORD = make_record(substrate=HARDWARE_SUBSTRATES)
PEER_MEMORY_RECORD = make_record(routes=(make_proven_route(0, "mlx5_0", "peer_memory"),), substrate=HARDWARE_SUBSTRATES)
# An outcome lists at most five causes.
CAUSES_MAX = 5


def make_fallback_record(gpu_index: int) -> Record:
    """Return a record of a case in which the route of this GPU fell back to copies through the host."""
    claimed_route = ClaimedRoute(gpu_index, "mlx5_0", "dmabuf", fell_back="through the host")
    return make_record(routes=(claimed_route,), substrate=HARDWARE_SUBSTRATES, case=f"a.py::test_{gpu_index}")


def make_unforeseen_record(need: str) -> Record:
    """Return a record of a case that did not run, because of an unmet need that the profile does not foresee."""
    return make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need=need, foreseen=False),))


def make_failed_record(index: int) -> Record:
    return make_record(Verdict.FAIL, case=f"a.py::test_{index}", reasons=(CaseReason(f"differs {index}"),))


def test_unproven_route_is_listed_with_its_cause() -> None:
    outcome = decide(
        make_facts(routes=[make_route_facts("dmabuf")]), BARE_PROFILE, [PASSED_RECORD], uses_only_twins=False
    )
    assert outcome.causes == ("GPU 0 <- NIC mlx5_0 by dma-buf: no case used this route",)


@pytest.mark.parametrize("route_count", [2, 3])
def test_routes_with_one_cause_are_listed_once(route_count: int) -> None:
    routes = [dataclasses.replace(make_route_facts("dmabuf"), device_index=index) for index in range(route_count)]
    outcome = decide(make_facts(routes=routes), BARE_PROFILE, [PASSED_RECORD], uses_only_twins=False)
    assert outcome.causes == (f"GPU 0 <- NIC mlx5_0 by dma-buf and {route_count - 1} more: no case used this route",)


def test_machine_without_routes_has_a_cause_and_advice() -> None:
    outcome = decide(make_facts(), BARE_PROFILE, [PASSED_RECORD], uses_only_twins=False)
    assert (outcome.code, outcome.causes) == (ExitCode.NOTHING_PROVEN, ("there is no pair of a device and a NIC",))
    assert len(outcome.to_do) == 1
    assert "--software" in outcome.to_do[0]


def test_failed_cases_are_listed_with_their_reason() -> None:
    outcome = decide(make_facts(), BARE_PROFILE, [PASSED_RECORD, make_failed_record(0)], uses_only_twins=True)
    assert outcome.verdict == "1 of 2 cases failed"
    assert outcome.causes == ("a.py::test_0: differs 0",)


def test_failed_case_without_a_reason_is_listed_by_name() -> None:
    outcome = decide(make_facts(), BARE_PROFILE, [make_record(Verdict.FAIL, case="a.py::test_a")], uses_only_twins=True)
    assert outcome.causes == ("a.py::test_a",)


def test_cases_that_did_not_run_are_not_counted_as_run() -> None:
    foreseen_record = make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="x", foreseen=True),))
    assert (
        decide(
            make_facts(), BARE_PROFILE, [make_failed_record(0), PASSED_RECORD, foreseen_record], uses_only_twins=True
        ).verdict
        == "1 of 2 cases failed"
    )


def test_first_five_failures_are_listed() -> None:
    outcome = decide(
        make_facts(), BARE_PROFILE, [make_failed_record(index) for index in range(7)], uses_only_twins=True
    )
    assert outcome.causes == tuple(f"a.py::test_{index}: differs {index}" for index in range(CAUSES_MAX))


def test_first_five_fallbacks_are_listed() -> None:
    outcome = decide(
        make_facts(), STRICT_PROFILE, [make_fallback_record(index) for index in range(7)], uses_only_twins=False
    )
    assert outcome.code is ExitCode.FAILED
    assert outcome.causes == tuple(
        f"GPU {index} <- NIC mlx5_0 by dma-buf: through the host (a.py::test_{index})" for index in range(CAUSES_MAX)
    )


def test_fallback_fails_a_software_run() -> None:
    outcome = decide(make_facts(), BARE_PROFILE, [make_fallback_record(0)], uses_only_twins=True)
    assert outcome.verdict == "A route fell back where a direct transfer was required"


def test_fallback_on_a_route_not_required_is_no_failure() -> None:
    outcome = decide(make_facts(), BARE_PROFILE, [make_fallback_record(0), PASSED_RECORD], uses_only_twins=False)
    assert outcome.code is ExitCode.NOTHING_PROVEN


def test_unforeseen_needs_are_listed_once_each() -> None:
    records = [PASSED_RECORD, *(make_unforeseen_record(need) for need in ("a", "a", "b", "c", "d", "e", "f"))]
    outcome = decide(make_facts(), BARE_PROFILE, records, uses_only_twins=True)
    assert outcome.verdict == "7 cases did not run, and profile bare does not foresee that"
    assert outcome.causes == ("a: none", "b: none", "c: none", "d: none", "e: none")


def test_foreseen_needs_of_a_missed_case_are_not_causes() -> None:
    reasons = (CaseReason("none", need="a", foreseen=True), CaseReason("none", need="b", foreseen=False))
    outcome = decide(
        make_facts(), BARE_PROFILE, [PASSED_RECORD, make_record(Verdict.NOT_RUN, reasons=reasons)], uses_only_twins=True
    )
    assert outcome.causes == ("b: none",)


def test_required_routes_are_listed_as_causes_and_kept() -> None:
    proven_record = make_record(routes=(make_proven_route(0, "mlx5_0"),), substrate=HARDWARE_SUBSTRATES)
    routes = [dataclasses.replace(make_route_facts("dmabuf"), device_index=index) for index in range(7)]
    outcome = decide(make_facts(routes=routes), STRICT_PROFILE, [proven_record], uses_only_twins=False)
    assert outcome.verdict == "6 required routes not proven"
    assert len(outcome.required) == 6
    assert outcome.causes == outcome.required[:CAUSES_MAX]


def test_run_on_software_requires_no_route() -> None:
    outcome = decide(
        make_facts(routes=[make_route_facts("dmabuf")]), STRICT_PROFILE, [PASSED_RECORD], uses_only_twins=True
    )
    assert (outcome.code, outcome.required) == (ExitCode.PROVEN, ())


@pytest.mark.parametrize(
    "reason",
    [
        Reason.LIBRARY_MISSING,
        Reason.LIBRARY_DAMAGED,
        Reason.LIBRARY_WRONG_ABI,
        Reason.NO_PERMISSION,
        Reason.MEMLOCK_TOO_LOW,
    ],
)
def test_set_up_that_can_be_completed_exits_with_3(reason: Reason) -> None:
    failure = ApiFailure(
        api="loader",
        operation="dlopen",
        status=2,
        status_name="ENOENT",
        errno=2,
        reason=reason,
        message="dlopen failed",
        what_to_do="",
    )
    outcome = decide(make_facts(cuda_failure=failure), STRICT_PROFILE, [PASSED_RECORD], uses_only_twins=False)
    assert (outcome.code, outcome.causes, outcome.to_do) == (ExitCode.SETUP_MISSING, ("dlopen failed",), ())
    assert len(outcome.required) == 1


UNPROVEN_ROUTE_TEXT = "GPU 0 <- NIC mlx5_0 by dma-buf: no case used this route"
LIBRARY_MISSING_FAILURE = ApiFailure(
    api="loader",
    operation="dlopen",
    status=2,
    status_name="ENOENT",
    errno=2,
    reason=Reason.LIBRARY_MISSING,
    message="dlopen failed",
    what_to_do="install the driver",
)
HARDWARE_ADVICE = "run it on a machine with a GPU and an RDMA NIC, or add --software to qualify the code alone"


@pytest.mark.parametrize(
    # The arguments of Outcome are exit code, verdict, causes, advice, and the required routes that are not proven.
    ("records", "registration_methods", "failure", "is_software_run", "expected_outcome"),
    [
        ([PASSED_RECORD], [], None, True, Outcome(ExitCode.PROVEN, "The code passed on software twins", (), (), ())),
        (
            [PASSED_RECORD],
            ["dmabuf"],
            LIBRARY_MISSING_FAILURE,
            True,
            Outcome(
                ExitCode.SETUP_MISSING,
                "The set-up of this machine is not complete",
                ("dlopen failed",),
                ("install the driver",),
                (),
            ),
        ),
        (
            [PASSED_RECORD],
            ["dmabuf"],
            LIBRARY_MISSING_FAILURE,
            False,
            Outcome(
                ExitCode.SETUP_MISSING,
                "The set-up of this machine is not complete",
                ("dlopen failed",),
                ("install the driver",),
                (UNPROVEN_ROUTE_TEXT,),
            ),
        ),
        (
            [PASSED_RECORD],
            ["dmabuf"],
            None,
            False,
            Outcome(
                ExitCode.NOTHING_PROVEN,
                "Nothing was proven on hardware",
                (UNPROVEN_ROUTE_TEXT,),
                (HARDWARE_ADVICE,),
                (UNPROVEN_ROUTE_TEXT,),
            ),
        ),
        (
            [PEER_MEMORY_RECORD],
            ["dmabuf"],
            None,
            False,
            Outcome(ExitCode.FAILED, "1 required route not proven", (UNPROVEN_ROUTE_TEXT,), (), (UNPROVEN_ROUTE_TEXT,)),
        ),
        (
            [PEER_MEMORY_RECORD],
            [],
            None,
            False,
            Outcome(ExitCode.PROVEN, "Every required route is proven on hardware", (), (), ()),
        ),
        (
            [make_failed_record(0)],
            ["dmabuf"],
            None,
            False,
            Outcome(ExitCode.FAILED, "1 of 1 case failed", ("a.py::test_0: differs 0",), (), ()),
        ),
        (
            [make_fallback_record(0)],
            [],
            None,
            False,
            Outcome(
                ExitCode.FAILED,
                "A route fell back where a direct transfer was required",
                ("GPU 0 <- NIC mlx5_0 by dma-buf: through the host (a.py::test_0)",),
                (),
                (),
            ),
        ),
        (
            [make_unforeseen_record("a")],
            [],
            None,
            False,
            Outcome(
                ExitCode.FAILED,
                "1 case did not run, and profile strict does not foresee that",
                ("a: none",),
                (),
                (),
            ),
        ),
        ([], [], None, True, Outcome(ExitCode.FAILED, "Only 0 cases ran; profile strict requires 1", (), (), ())),
    ],
)
def test_outcome_has_every_field(
    records: list[Record],
    registration_methods: list[str],
    failure: ApiFailure | None,
    *,
    is_software_run: bool,
    expected_outcome: Outcome,
) -> None:
    facts = make_facts(routes=[make_route_facts(method) for method in registration_methods], cuda_failure=failure)
    profile = dataclasses.replace(STRICT_PROFILE, cases_min=1)
    assert decide(facts, profile, records, uses_only_twins=is_software_run) == expected_outcome


def test_first_five_causes_of_unproven_routes_are_listed() -> None:
    routes = [dataclasses.replace(make_route_facts("dmabuf"), device_index=index) for index in range(7)]
    records = [
        make_record(
            Verdict.UNPROVEN,
            case=f"a.py::test_{index}",
            reasons=(CaseReason(f"no counter of GPU {index} moved"),),
            routes=(ClaimedRoute(index, "mlx5_0", "dmabuf"),),
            substrate=HARDWARE_SUBSTRATES,
        )
        for index in range(7)
    ]
    outcome = decide(make_facts(routes=routes), BARE_PROFILE, records, uses_only_twins=False)
    assert outcome.causes == tuple(
        f"GPU {index} <- NIC mlx5_0 by dma-buf: no counter of GPU {index} moved" for index in range(CAUSES_MAX)
    )


@pytest.mark.parametrize(("passed_count", "is_run_passed"), [(1, False), (2, True), (3, True)])
def test_minimum_number_of_cases_counts(passed_count: int, *, is_run_passed: bool) -> None:
    profile = dataclasses.replace(BARE_PROFILE, cases_min=2)
    foreseen_record = make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="x", foreseen=True),))
    outcome = decide(
        make_facts(), profile, [PASSED_RECORD] * passed_count + [foreseen_record] * 2, uses_only_twins=True
    )
    assert (outcome.code is ExitCode.PROVEN) == is_run_passed
