"""The state of a test case while pytest runs it. The record of the case is made from this state."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from gdrkit import evidence
from gdrkit.harness.evidence import Evidence
from gdrkit.harness.needs import possible_apis
from gdrkit.install_paths import install_paths
from gdrkit.inventory.facts import select_substrate_libraries
from gdrkit.report import CaseReason, Record, SeenLibrary, Verdict, substrate_of
from gdrkit.report.record import REFUSED, SCHEMA_VERSION
from gdrkit.report.routes import why_not_hardware
from gdrkit.report.substrate import combine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.evidence import LoadedLibrary
    from gdrkit.harness.leaks import OpenObjects
    from gdrkit.harness.needs import Need
    from gdrkit.harness.refusal import ObservedRefusal
    from gdrkit.harness.session import Session
    from gdrkit.inventory import RefusalCause

__all__ = ["CASE_KEY", "Case", "title_of"]

# A record contains at most this many characters of the first line of an error, and of the end of the tracebacks.
_REASON_CHARACTERS_MAX = 1000
_TRACEBACK_CHARACTERS_MAX = 20_000


@dataclass
class Case:
    """The state of a case.

    A *refusal* is the error with which a registration fails on a machine that does not meet a need of the case. If the
    profile states a refusal for this need, the case runs anyway and must fail with exactly this error.

    Attributes
    ----------
    item : Item
        The item of pytest.
    needs : tuple of Need
        The declared needs.
    unmet_needs : tuple of CaseReason
        The needs that are not met, with reasons. It is empty until the needs were checked.
    expected_refusal : tuple of RefusalCause or None
        The causes of the refusal that the profile expects. None: the profile does not expect the same refusal for all
        unmet needs.
    observed_refusals : tuple of ObservedRefusal
        The refusals that occurred as expected, one for each device that the registration tried; else empty.
    evidence : Evidence
        The evidence that the case records.
    baseline : OpenObjects or None
        The objects that were open before the case.
    failures : list of CaseReason
        The failures of the case, each in one phase (setup, call, teardown).
    nic_names : list of str
        Names of the NICs that the fixtures have opened.
    peer_libraries : list
        The name of each peer process that the case has used, and the libraries that the peer had loaded.
    clock_start_s : float
        Start of the case on the monotonic clock.
    start_time_utc : datetime
        Date and time of the start of the case, in UTC.
    """

    item: pytest.Item
    needs: tuple[Need, ...]
    unmet_needs: tuple[CaseReason, ...] = ()
    expected_refusal: tuple[RefusalCause, ...] | None = None
    observed_refusals: tuple[ObservedRefusal, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    baseline: OpenObjects | None = None
    failures: list[CaseReason] = field(default_factory=list)
    nic_names: list[str] = field(default_factory=list)
    peer_libraries: list[tuple[str, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    clock_start_s: float = field(default_factory=time.monotonic)
    start_time_utc: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def is_runnable(self) -> bool:
        """Whether pytest runs the case: all needs are met, or the profile expects a refusal."""
        return not self.unmet_needs or self.expected_refusal is not None

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        if self.failures:
            return Verdict.FAIL
        if self.unmet_needs:
            return Verdict.NOT_RUN
        return Verdict.UNPROVEN if self.evidence.missing else Verdict.PASS

    def check_needs(self, session: Session) -> None:
        """Check all needs against the facts and the profile of the session."""
        needs_and_reasons = [(need, reason) for need in self.needs if (reason := need.check(session.facts)) is not None]
        expected_refusals = {session.profile.refusal(need.name) for need, _ in needs_and_reasons}
        # A case with unmet needs runs only if the profile states the same refusal for all of them.
        self.expected_refusal = expected_refusals.pop() if len(expected_refusals) == 1 else None
        self.unmet_needs = tuple(
            CaseReason(
                text=reason,
                need=need.name,
                foreseen=self.expected_refusal is not None or session.profile.foresees(need.name, reason),
            )
            for need, reason in needs_and_reasons
        )

    def record_refusal(self, observed_refusals: tuple[ObservedRefusal, ...]) -> None:
        """Record that the expected refusal has occurred."""
        self.observed_refusals = observed_refusals
        self.evidence[REFUSED] = observed_refusals

    def record_failure(self, phase: str, text: str, traceback_text: str) -> None:
        """Record the failure of a phase (``setup``, ``call``, ``teardown``).

        Parameters
        ----------
        phase : str
            The phase.
        text : str
            The text of the error. The record contains its first line.
        traceback_text : str
            The traceback.
        """
        first_line = text.strip().partition("\n")[0][:_REASON_CHARACTERS_MAX]
        self.failures.append(CaseReason(text=first_line if phase == "call" else f"{phase}: {first_line}"))
        earlier_tracebacks = str(self.evidence.values.get("traceback", ""))
        tracebacks = f"{earlier_tracebacks}\n\n{traceback_text}".strip()
        self.evidence.values["traceback"] = tracebacks[-_TRACEBACK_CHARACTERS_MAX:]

    def check_hardware_claim(self, session: Session) -> None:
        """If the case claims something about hardware, and an API of the claim did not run there, record the cause."""
        if self.evidence.hardware_apis:
            api_names = [api.value for api in self.evidence.hardware_apis]
            cause = why_not_hardware(self._find_substrates(session, self._list_processes()), api_names)
            if cause:
                self.evidence.unproven(cause)

    def _list_processes(self) -> list[tuple[str, tuple[LoadedLibrary, ...]]]:
        """Return the name and the libraries of this process and of each peer process."""
        return [("case", tuple(select_substrate_libraries(evidence.libraries()))), *self.peer_libraries]

    def _find_substrates(
        self, session: Session, processes: Iterable[tuple[str, tuple[LoadedLibrary, ...]]]
    ) -> dict[str, str]:
        """Return the substrate of each API that these processes have loaded."""
        substrates = combine(
            substrate_of(libraries, session.facts, used_nics=self.nic_names) for _, libraries in processes
        )
        return {api: substrate.value for api, substrate in sorted(substrates.items())}

    def make_record(self, session: Session) -> Record:
        """Return the record of the case."""
        is_not_run = self.verdict is Verdict.NOT_RUN
        # A case that was refused as expected has run, although its verdict is "not run".
        processes = [] if is_not_run and not self.observed_refusals else self._list_processes()
        substrates = self._find_substrates(session, processes)
        reasons = {
            Verdict.FAIL: tuple(self.failures),
            Verdict.NOT_RUN: (
                *self.unmet_needs,
                *(
                    replace(self.unmet_needs[0], text=f"refused as expected: {refusal}")
                    for refusal in self.observed_refusals
                ),
            ),
            Verdict.UNPROVEN: tuple(self.evidence.missing),
            Verdict.PASS: (),
        }
        return Record(
            schema_version=SCHEMA_VERSION,
            case=self.item.nodeid,
            title=title_of(self.item),
            verdict=self.verdict,
            reasons=reasons[self.verdict],
            profile=session.profile.name,
            facts_digest=session.facts_digest,
            substrate=substrates,
            libraries=tuple(SeenLibrary.of(name, library) for name, libraries in processes for library in libraries),
            seed=session.seed,
            evidence={key: _make_portable(value) for key, value in self.evidence.values.items()},
            # The numbers of a failed case are not valid, and a refused case has measured nothing.
            numbers={} if self.failures or is_not_run else self.evidence.numbers,
            routes=() if is_not_run else tuple(self.evidence.routes),
            duration_ms=round((time.monotonic() - self.clock_start_s) * 1000, 3),
            started=self.start_time_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=session.commit,
            version=session.version,
            command=session.command,
            files=() if is_not_run else tuple(self.evidence.files),
            uses=self._list_declared_apis(substrates),
        )

    def _list_declared_apis(self, loaded_apis: Iterable[str]) -> tuple[str, ...]:
        """Return the loaded APIs that a need of the case names, as in ``cuda.vmm`` or ``software(verbs)``."""
        return tuple(sorted({api for need in self.needs for api in possible_apis(need)} & set(loaded_apis)))


# Key of the case in the stash of its pytest item.
CASE_KEY: pytest.StashKey[Case] = pytest.StashKey()


def _make_portable(value: object) -> object:
    """Return JSON data with the paths of this machine replaced by portable names."""
    if isinstance(value, dict):
        return {key: _make_portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_make_portable(item) for item in value]
    return install_paths().portable(value) if isinstance(value, str) and "/" in value else value


def title_of(item: pytest.Item) -> str:
    """Return the first line of the docstring of a case, or an empty string."""
    docstring = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return str(docstring).strip().partition("\n")[0]
