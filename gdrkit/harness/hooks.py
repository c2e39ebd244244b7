"""The pytest hooks of the harness, used by both of its plugins.

The hooks check the needs of a case before its set-up, so that all reasons of a case that does not run are known before
anything was opened. They turn every other skip into a failure, look for leaks after the tear-down, and write one record
per case.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import GdrkitError
from gdrkit.harness import fixtures, leaks, needs, refusal
from gdrkit.harness.case import CASE, Case, title_of
from gdrkit.harness.fixtures import POOL, PeerPool
from gdrkit.harness.session import SESSION, Session
from gdrkit.report import Verdict, append_record
from gdrkit.serialization import to_json_data

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

__all__ = ["begin"]

_REPORTS: pytest.StashKey[list[Case]] = pytest.StashKey()
# The case that runs now.
_NOW: pytest.StashKey[Case | None] = pytest.StashKey()
_COLLECTED: pytest.StashKey[bool] = pytest.StashKey()

_REFUSED = ("gdrkit_refused", True)

_UNRUN = ("gdrkit_unrun", True)
_FIXTURES = frozenset(name for name in fixtures.__all__ if name.islower())


def begin(config: pytest.Config, *, strict: bool) -> None:
    """Create the session, and register these hooks and the fixtures in a pytest run.

    Parameters
    ----------
    config : pytest.Config
        Configuration of the run.
    strict : bool
        Whether every case belongs to the harness. In a run of a user's project, a case belongs to the harness if it
        declares a need or uses a fixture of the harness. The hooks ignore all other cases.
    """
    try:
        config.stash[SESSION] = Session(config, strict=strict)
    except GdrkitError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_REPORTS] = []
    config.pluginmanager.register(fixtures, fixtures.__name__)
    config.pluginmanager.register(sys.modules[__name__], __name__)


def pytest_report_header(config: pytest.Config) -> str:
    """Return the header line with the seed, by which a run can be repeated."""
    return f"gdrkit: --seed {config.stash[SESSION].seed}"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Keep the cases of ``--cases``, and note that the collection is complete."""
    yield
    path = config.stash[SESSION].cases
    if path is not None:
        wanted = set(path.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]
    config.stash[_COLLECTED] = True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the substrate, write the plan, and start a peer before anything else is opened."""
    state = session.config.stash[SESSION]
    # pytest calls this also after an interrupt. `items` then has a part of the cases, and none is deselected.
    if not session.config.stash.get(_COLLECTED, False):
        return
    cases = [Case(item, needs.declared(item)) for item in session.items if _is_ours(item)]
    for case in cases:
        case.item.stash[CASE] = case
    try:
        if state.wanted:
            state.check_substrate()
        if any(case.needs for case in cases) or state.plan or state.records:
            # The cases need facts and profile. Loading them here reports their errors once.
            _ = state.profile
            for case in cases:
                case.look(state)
    except GdrkitError as error:
        raise pytest.UsageError(str(error)) from error
    # If files could not be collected, no plan is written: it would lack their cases as if they did not exist.
    if state.plan is not None and not session.testsfailed:
        _write_plan(state.plan, state.profile.name, cases)
    pool = session.config.stash[POOL] = PeerPool()
    if not session.config.option.collectonly and any(_wants_peer(case) for case in cases if case.runs):
        pool.start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the peers. Fail the run if a case did not run and the profile does not foresee that."""
    pool = session.config.stash.get(POOL, None)
    if pool is not None:
        pool.close()
    if session.exitstatus == pytest.ExitCode.OK and _unforeseen(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Report a test file that skips itself at import as failed, because it hides its cases."""
    report = yield
    if report.outcome == "skipped" and collector.config.stash[SESSION].strict:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} skips itself while it is read; its cases must declare needs instead"
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Begin and end the record of a case."""
    state, planned = item.config.stash[SESSION], item.stash.get(CASE, None)
    if planned is None:
        return (yield)
    # A new object is used, as an item may run again. Its needs were checked at collection.
    case = item.stash[CASE] = Case(item, planned.needs, unmet=planned.unmet, refusal=planned.refusal)
    item.config.stash[_REPORTS].append(case)
    item.config.stash[_NOW] = case
    result = yield
    item.config.stash[_NOW] = None
    if state.records is not None:
        append_record(state.records, case.record(state))
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a case with unmet needs, else record what is open before it."""
    case = item.stash.get(CASE, None)
    if case is None:
        return
    if not case.runs:
        pytest.skip("; ".join(f"{reason.need}: {reason.text}" for reason in case.unmet))
    item.config.stash[SESSION].start({need.name.partition(".")[0] for need in case.needs})
    case.before = leaks.take(own=item.config.stash[POOL].descriptors())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Check for leaks after the tear-down."""
    case = item.stash.get(CASE, None)
    result = yield
    if case is not None and case.before is not None:
        leaks.check(case.before, own=item.config.stash[POOL].descriptors)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Exclude from the leak check of a case what a fixture of wider scope opens, because it belongs to that scope."""
    case = None if fixturedef.scope == "function" else _running(request)
    if case is None or case.before is None:
        return (yield)
    pool = request.config.stash[POOL]
    before = leaks.take(own=pool.descriptors())
    result = yield
    case.before = leaks.moved(case.before, before, leaks.take(own=pool.descriptors()))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn every skip that is not from the harness into a failure, and keep failures for the record."""
    case = item.stash.get(CASE, None)
    if case is None:
        return (yield)
    is_refused = _take_refusal(case, call)
    report = yield
    if is_refused:
        report.user_properties.append(_REFUSED)
    elif report.outcome == "skipped" or hasattr(report, "wasxfail"):
        if not case.runs and call.when == "setup":
            report.user_properties.append(_UNRUN)
            return report
        how = "is marked as an expected failure" if hasattr(report, "wasxfail") else "skipped itself"
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} {how}; what a case cannot do without must be declared by @needs"
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        if not case.failures:
            case.fail("call", f"the case {how}", str(report.longrepr))
    elif case.refusal is not None and not case.refused and call.when != "teardown":
        _miss_refusal(case, call, report)
    elif report.outcome == "failed":
        text = report.longreprtext if call.excinfo is None else _said(call.excinfo.value)
        case.fail(report.when or "call", text, report.longreprtext)
    report.user_properties.append(("gdrkit_verdict", case.verdict.value))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Return the category of outcomes that pytest does not know: not run, refused as expected, unproven."""
    if report.outcome == "skipped" and _REFUSED in report.user_properties:
        return "refused as expected", "r", "REFUSED"
    if report.outcome == "skipped" and _UNRUN in report.user_properties:
        return "not run", "n", "NOT RUN"
    if report.when == "call" and report.passed and ("gdrkit_verdict", Verdict.UNPROVEN.value) in report.user_properties:
        return "unproven", "u", "UNPROVEN"
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print unmet needs and what was not proven, with every reason, so that an empty run cannot look good."""
    counted: dict[tuple[str, str, bool], int] = {}
    unproven: list[tuple[str, str]] = []
    for case in config.stash.get(_REPORTS, []):
        if case.verdict is Verdict.NOT_RUN and not case.refused:
            for reason in case.unmet:
                key = (reason.need or "", reason.text, reason.foreseen is True)
                counted[key] = counted.get(key, 0) + 1
        elif case.verdict is Verdict.UNPROVEN:
            unproven += [(case.item.nodeid, reason.text) for reason in case.evidence.missing]
    if counted:
        terminalreporter.section("needs that are not met", sep="-")
        for (need, text, foreseen), count in sorted(counted.items()):
            fails = not foreseen and config.stash[SESSION].fails_unforeseen
            tail = "" if not fails else f"  NOT FORESEEN by profile {config.stash[SESSION].profile.name}: the run fails"
            terminalreporter.write_line(f"{count:4d} x {need}: {text}{tail}", red=fails)
    if unproven:
        terminalreporter.section("not proven", sep="-")
        for name, text in unproven:
            terminalreporter.write_line(f"{name}: {text}")


def _take_refusal(case: Case, call: pytest.CallInfo[None]) -> bool:
    """Keep the error of this phase as the end of a case that did not run, if it is the expected refusal."""
    if case.refusal is None or case.refused or call.excinfo is None or call.when == "teardown":
        return False
    error = call.excinfo.value
    seen = refusal.refusals(error, case.refusal)
    if not seen:
        return False
    case.refuse(seen)
    # This runs before pytest formats the error: the text is not used, and formatting takes long on a slow machine.
    ended = pytest.skip.Exception("; ".join(map(str, seen))).with_traceback(error.__traceback__)
    call.excinfo = pytest.ExceptionInfo.from_exception(ended)
    return True


def _miss_refusal(case: Case, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Report a phase without the expected refusal as failed, unless the refusal can still come in a later phase."""
    if report.outcome == "failed" or call.when == "call":
        how = "nothing was refused" if call.excinfo is None else _said(call.excinfo.value)
        text = f"one RegistrationFailed by {refusal.stated(case.refusal or ())} was expected: {how}"
        details = f"{text}\n\n{report.longreprtext}".strip()
        report.outcome = "failed"
        report.longrepr = details
        case.fail(report.when or "call", text, details)


def _said(error: BaseException) -> str:
    """Return the text of an error for the user: the class without its module, or an assertion as pytest explains it."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _write_plan(path: Path, profile: str, cases: Sequence[Case]) -> None:
    text = json.dumps({"profile": profile, "cases": [_planned(case) for case in cases]}, indent=2) + "\n"
    # The file is moved into place, so that a process that waits for it finds it complete.
    whole = path.with_suffix(".new")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)


def _planned(case: Case) -> dict[str, object]:
    return {
        "case": case.item.nodeid,
        "title": title_of(case.item),
        "needs": [need.name for need in case.needs],
        "unmet": to_json_data(case.unmet),
        "refused": case.refusal is not None,
    }


def _wants_peer(case: Case) -> bool:
    return bool({"peer", "peers"} & set(getattr(case.item, "fixturenames", ())))


def _is_ours(item: pytest.Item) -> bool:
    """Return whether the harness handles this case."""
    if item.config.stash[SESSION].strict or item.get_closest_marker(needs.MARK) is not None:
        return True
    return bool(_FIXTURES & set(getattr(item, "fixturenames", ())))


def _unforeseen(config: pytest.Config) -> bool:
    return config.stash[SESSION].fails_unforeseen and any(
        reason.foreseen is not True
        for case in config.stash[_REPORTS]
        if case.verdict is Verdict.NOT_RUN
        for reason in case.unmet
    )


def _running(request: pytest.FixtureRequest) -> Case | None:
    # The request of a fixture with a wider scope has no item of its own.
    return request.config.stash.get(_NOW, None)
