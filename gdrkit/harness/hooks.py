"""The pytest hooks of the harness. Both plugins use them: ``plugin.py`` for gdrkit's suites, ``user.py`` for others.

A *need* is what a case requires of the machine, such as a NIC. The hooks check the needs of a case before its set-up,
so that a case with unmet needs opens no device. They turn every other skip into a failure, check for leaks after the
tear-down, and write one record per case.

The *profile* of the machine lists the needs that may be unmet there (foreseen absences). It can also state a *refusal*:
the error with which a registration must fail if a need is unmet. A case with such a need runs anyway, must fail with
exactly this error, and is then reported as refused.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import GdrkitError
from gdrkit.harness import fixtures, leaks, needs, refusal
from gdrkit.harness.case import CASE_KEY, Case, title_of
from gdrkit.harness.fixtures import PEER_POOL_KEY, PeerPool
from gdrkit.harness.session import SESSION_KEY, Session
from gdrkit.report import Verdict, append_record
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

__all__ = ["start_harness"]

# Key of the list of all cases that pytest has processed, including cases that did not run because of an unmet need.
_CASES_KEY: pytest.StashKey[list[Case]] = pytest.StashKey()
# Key of the case that pytest runs now. It is None between two cases.
_RUNNING_CASE_KEY: pytest.StashKey[Case | None] = pytest.StashKey()
# Key of the flag that pytest has collected all cases.
_IS_COLLECTED_KEY: pytest.StashKey[bool] = pytest.StashKey()

# User properties of a pytest report. They say why the harness reported the case as "skipped".
_REFUSED_PROPERTY = ("gdrkit_refused", True)
_NOT_RUN_PROPERTY = ("gdrkit_not_run", True)
_FIXTURE_NAMES = frozenset(name for name in fixtures.__all__ if name.islower())


def start_harness(config: pytest.Config, *, strict: bool) -> None:
    """Create the session of the harness, and register these hooks and the fixtures with pytest.

    Parameters
    ----------
    config : pytest.Config
        Configuration of the run.
    strict : bool
        Whether the harness handles every case. Otherwise (in a run of another project) it handles only the cases that
        declare a need or use a fixture of the harness.
    """
    if strict:
        # The software twins (libraries that emulate the hardware) delay this percentage of the completions by a random
        # time. The default percentage is small. If the twins delay all completions, a case that relies on an order that
        # hardware does not promise fails soon. Peer processes inherit the variable.
        os.environ.setdefault("GDRKIT_TWINS_LATE_SHARE", "100")
    try:
        config.stash[SESSION_KEY] = Session(config, strict=strict)
    except GdrkitError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_CASES_KEY] = []
    config.pluginmanager.register(fixtures, fixtures.__name__)
    config.pluginmanager.register(sys.modules[__name__], __name__)


def pytest_report_header(config: pytest.Config) -> str:
    """Return a line for the header of pytest's output. It contains the seed, which is needed to repeat the run."""
    return f"gdrkit: --seed {config.stash[SESSION_KEY].seed}"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Keep only the cases whose ids are in the file of ``--cases``, and mark the collection as complete."""
    yield
    cases_path = config.stash[SESSION_KEY].cases_path
    if cases_path is not None:
        selected_ids = set(cases_path.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected_ids])
        items[:] = [item for item in items if item.nodeid in selected_ids]
    config.stash[_IS_COLLECTED_KEY] = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the substrates (hardware or twins) and needs, write the file of ``--plan``, and start a peer if needed."""
    harness_session = session.config.stash[SESSION_KEY]
    # pytest calls this hook even after an interrupt of the collection. The list of cases is incomplete then.
    if not session.config.stash.get(_IS_COLLECTED_KEY, False):
        return
    cases = [Case(item, needs.declared(item)) for item in session.items if _is_handled(item)]
    for case in cases:
        case.item.stash[CASE_KEY] = case
    try:
        if harness_session.required_substrates:
            harness_session.check_substrate()
        if any(case.needs for case in cases) or harness_session.plan_path or harness_session.records_path:
            # Load the profile and the facts now, so that an error in them is reported once and not for each case.
            _ = harness_session.profile
            for case in cases:
                case.check_needs(harness_session)
    except GdrkitError as error:
        raise pytest.UsageError(str(error)) from error
    # No plan is written if a file could not be collected, because the plan would lack the cases of that file.
    if harness_session.plan_path is not None and not session.testsfailed:
        _write_plan(harness_session.plan_path, harness_session.profile.name, cases)
    pool = session.config.stash[PEER_POOL_KEY] = PeerPool()
    if not session.config.option.collectonly and any(_uses_peer(case) for case in cases if case.is_runnable):
        pool.start_idle_peer()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the peer processes. Fail the run if a case did not run for an unforeseen reason."""
    pool = session.config.stash.get(PEER_POOL_KEY, None)
    if pool is not None:
        pool.close()
    if session.exitstatus == pytest.ExitCode.OK and _has_unforeseen_absence(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report a module as failed if it skips itself during its import. Otherwise its cases would be lost unnoticed."""
    report = yield
    if report.outcome == "skipped" and collector.config.stash[SESSION_KEY].strict:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skips itself at its import; its cases must declare needs instead"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Create the state of a case. After its tear-down, append its record to the file of ``--records``."""
    harness_session, planned_case = item.config.stash[SESSION_KEY], item.stash.get(CASE_KEY, None)
    if planned_case is None:
        return (yield)
    # A plugin may run an item several times. Each run gets a new state, with the needs that were checked at collection.
    case = item.stash[CASE_KEY] = Case(
        item, planned_case.needs, unmet_needs=planned_case.unmet_needs, expected_refusal=planned_case.expected_refusal
    )
    item.config.stash[_CASES_KEY].append(case)
    item.config.stash[_RUNNING_CASE_KEY] = case
    result = yield
    item.config.stash[_RUNNING_CASE_KEY] = None
    if harness_session.records_path is not None:
        append_record(harness_session.records_path, case.make_record(harness_session))
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a case with unmet needs. For any other case, record which objects are open before it runs."""
    case = item.stash.get(CASE_KEY, None)
    if case is None:
        return
    if not case.is_runnable:
        pytest.skip("; ".join(f"{reason.need}: {reason.text}" for reason in case.unmet_needs))
    item.config.stash[SESSION_KEY].start_apis({need.name.partition(".")[0] for need in case.needs})
    case.baseline = leaks.open_objects(harness_descriptors=item.config.stash[PEER_POOL_KEY].descriptors())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Check for leaks after the tear-down."""
    case = item.stash.get(CASE_KEY, None)
    result = yield
    if case is not None and case.baseline is not None:
        leaks.check(case.baseline, harness_descriptors=item.config.stash[PEER_POOL_KEY].descriptors)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Exclude objects that a fixture of module or session scope opens from the leak check of the running case."""
    case = None if fixturedef.scope == "function" else _find_running_case(request)
    if case is None or case.baseline is None:
        return (yield)
    pool = request.config.stash[PEER_POOL_KEY]
    objects_before = leaks.open_objects(harness_descriptors=pool.descriptors())
    result = yield
    objects_after = leaks.open_objects(harness_descriptors=pool.descriptors())
    case.baseline = leaks.extend_baseline(case.baseline, objects_before, objects_after)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn every skip that does not come from the harness into a failure, and record failures in the case."""
    case = item.stash.get(CASE_KEY, None)
    if case is None:
        return (yield)
    is_expected_refusal = _skip_expected_refusal(case, call)
    report = yield
    if is_expected_refusal:
        report.user_properties.append(_REFUSED_PROPERTY)
    elif report.outcome == "skipped" or hasattr(report, "wasxfail"):
        if not case.is_runnable and call.when == "setup":
            report.user_properties.append(_NOT_RUN_PROPERTY)
            return report
        # pytest sets the attribute wasxfail if a case is marked as an expected failure (xfail).
        misuse = "is marked as an expected failure" if hasattr(report, "wasxfail") else "skipped itself"
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} {misuse}; a case must declare its requirements by @needs"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        if not case.failures:
            case.record_failure("call", f"the case {misuse}", str(report.longrepr))
    elif case.expected_refusal is not None and not case.observed_refusals and call.when != "teardown":
        _report_missing_refusal(case, call, report)
    elif report.outcome == "failed":
        text = report.longreprtext if call.excinfo is None else _describe_error(call.excinfo.value)
        case.record_failure(report.when or "call", text, report.longreprtext)
    elif report.when == "call":
        case.check_hardware_claim(item.config.stash[SESSION_KEY])
    report.user_properties.append(("gdrkit_verdict", case.verdict.value))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Return category, letter and word of an outcome that pytest lacks: not run, refused as expected, or unproven."""
    if report.outcome == "skipped" and _REFUSED_PROPERTY in report.user_properties:
        return "refused as expected", "r", "REFUSED"
    if report.outcome == "skipped" and _NOT_RUN_PROPERTY in report.user_properties:
        return "not run", "n", "NOT RUN"
    if report.when == "call" and report.passed and ("gdrkit_verdict", Verdict.UNPROVEN.value) in report.user_properties:
        return "unproven", "u", "UNPROVEN"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the unmet needs and the unproven cases with their reasons.

    Without this list, a run in which most cases did not run would look complete.
    """
    # The number of cases that did not run, by reason. The key is the name of the need, the text of the reason, and
    # whether the profile foresees this reason.
    case_counts: dict[tuple[str, str, bool], int] = {}
    unproven_reasons: list[tuple[str, str]] = []
    for case in config.stash.get(_CASES_KEY, []):
        if case.verdict is Verdict.NOT_RUN and not case.observed_refusals:
            for reason in case.unmet_needs:
                key = (reason.need or "", reason.text, reason.foreseen is True)
                case_counts[key] = case_counts.get(key, 0) + 1
        elif case.verdict is Verdict.UNPROVEN:
            unproven_reasons += [(case.item.nodeid, reason.text) for reason in case.evidence.missing]
    if case_counts:
        terminalreporter.section("needs that are not met", sep="-")
        for (need_name, reason_text, is_foreseen), count in sorted(case_counts.items()):
            is_failure = not is_foreseen and config.stash[SESSION_KEY].fails_unforeseen
            profile_name = config.stash[SESSION_KEY].profile.name if is_failure else ""
            suffix = f"  NOT FORESEEN by profile {profile_name}: the run fails" if is_failure else ""
            terminalreporter.write_line(f"{count:4d} x {need_name}: {reason_text}{suffix}", red=is_failure)
    if unproven_reasons:
        terminalreporter.section("not proven", sep="-")
        for case_id, reason_text in unproven_reasons:
            terminalreporter.write_line(f"{case_id}: {reason_text}")


def _skip_expected_refusal(case: Case, call: pytest.CallInfo[None]) -> bool:
    """If the error of this phase is the refusal that the profile expects, record it and replace the error by a skip.

    Return whether the error was replaced.
    """
    if case.expected_refusal is None or case.observed_refusals or call.excinfo is None or call.when == "teardown":
        return False
    error = call.excinfo.value
    observed_refusals = refusal.matching_refusals(error, case.expected_refusal)
    if not observed_refusals:
        return False
    case.record_refusal(observed_refusals)
    # The error is replaced before pytest formats it, because formatting is slow and the text would not be used.
    skip_error = pytest.skip.Exception("; ".join(map(str, observed_refusals))).with_traceback(error.__traceback__)
    call.excinfo = pytest.ExceptionInfo.from_exception(skip_error)
    return True


def _report_missing_refusal(case: Case, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Report a case as failed if the expected refusal did not occur.

    After a set-up that passed, report nothing yet, because the refusal may still occur in the body of the case.
    """
    if report.outcome == "failed" or call.when == "call":
        observed_text = "nothing was refused" if call.excinfo is None else _describe_error(call.excinfo.value)
        text = f"expected one RegistrationFailed by {refusal.describe(case.expected_refusal or ())}: {observed_text}"
        details = f"{text}\n\n{report.longreprtext}".strip()
        report.outcome = "failed"
        report.longrepr = details
        case.record_failure(report.when or "call", text, details)


def _describe_error(error: BaseException) -> str:
    """Return the name of the class of an error, and its text."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _write_plan(path: Path, profile_name: str, cases: Sequence[Case]) -> None:
    plan_json = (
        json.dumps({"profile": profile_name, "cases": [_make_plan_data(case) for case in cases]}, indent=2) + "\n"
    )
    # Another process may wait for the plan. The file gets its name when it is complete, so that an incomplete plan is
    # never read.
    temporary_path = path.with_suffix(".new")
    temporary_path.write_text(plan_json, encoding="utf-8")
    temporary_path.replace(path)


def _make_plan_data(case: Case) -> dict[str, object]:
    return {
        "case": case.item.nodeid,
        "title": title_of(case.item),
        "needs": [need.name for need in case.needs],
        "unmet": to_json_data(case.unmet_needs),
        "refused": case.expected_refusal is not None,
    }


def _uses_peer(case: Case) -> bool:
    return bool({"peer", "peers"} & set(getattr(case.item, "fixturenames", ())))


def _is_handled(item: pytest.Item) -> bool:
    """Return whether the harness handles this case.

    In strict mode it handles every case, otherwise only a case that declares a need or uses a fixture of the harness.
    """
    if item.config.stash[SESSION_KEY].strict or item.get_closest_marker(needs.MARK) is not None:
        return True
    return bool(_FIXTURE_NAMES & set(getattr(item, "fixturenames", ())))


def _has_unforeseen_absence(config: pytest.Config) -> bool:
    """Return whether the run fails because a case did not run for a reason that the profile does not foresee."""
    return config.stash[SESSION_KEY].fails_unforeseen and any(
        reason.foreseen is not True
        for case in config.stash[_CASES_KEY]
        if case.verdict is Verdict.NOT_RUN
        for reason in case.unmet_needs
    )


def _find_running_case(request: pytest.FixtureRequest) -> Case | None:
    # The request of a fixture of module or session scope does not refer to a case, so this function returns the case
    # that pytest_runtest_protocol has stored in the configuration.
    return request.config.stash.get(_RUNNING_CASE_KEY, None)
