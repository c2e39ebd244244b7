"""One case while it runs, and its record afterwards.

Level 7.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from gdrkit import witness
from gdrkit.harness.evidence import Evidence
from gdrkit.inventory.facts import notable
from gdrkit.report import CaseReason, Record, SeenLibrary, Verdict, substrate_of
from gdrkit.report.record import SCHEMA_VERSION
from gdrkit.report.substrate import combined

if TYPE_CHECKING:
    from gdrkit.harness.leaks import Snapshot
    from gdrkit.harness.needs import Need
    from gdrkit.harness.session import Session
    from gdrkit.witness import LoadedLibrary

__all__ = ["CASE", "Case", "title_of"]

_TEXT_CHARACTERS = 1000
_TRACEBACK_CHARACTERS = 20_000


@dataclass
class Case:
    """What the harness knows about a running case.

    Attributes
    ----------
    needs : tuple of Need
        As declared.
    unmet : tuple of CaseReason
        Those not met; nothing until they were looked at.
    evidence : Evidence
        What the case keeps.
    before : Snapshot or None
        What was open before.
    failures : list of CaseReason
        Of its phases.
    nics : list of str
        The NICs that the fixtures opened.
    peers : list
        Name and libraries of each process that took part.
    """

    item: pytest.Item
    needs: tuple[Need, ...]
    unmet: tuple[CaseReason, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    before: Snapshot | None = None
    failures: list[CaseReason] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    peers: list[tuple[str, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    began: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def verdict(self) -> Verdict:
        """What it showed until now."""
        if self.failures:
            return Verdict.FAIL
        if self.unmet:
            return Verdict.NOT_RUN
        return Verdict.UNPROVEN if self.evidence.missing else Verdict.PASS

    def look(self, session: Session) -> None:
        """Look at all its needs."""
        found = []
        for need in self.needs:
            reason = need.check(session.facts)
            if reason is not None:
                foreseen = session.profile.foresees(need.name, reason)
                found.append(CaseReason(text=reason, need=need.name, foreseen=foreseen))
        self.unmet = tuple(found)

    def fail(self, when: str, text: str, details: str) -> None:
        """Keep why a phase failed."""
        first = text.strip().partition("\n")[0][:_TEXT_CHARACTERS]
        self.failures.append(CaseReason(text=first if when == "call" else f"{when}: {first}"))
        earlier = str(self.evidence.kept.get("traceback", ""))
        both = f"{earlier}\n\n{details}".strip()
        self.evidence.kept["traceback"] = both[-_TRACEBACK_CHARACTERS:]

    def record(self, session: Session) -> Record:
        """What is written about it."""
        processes = [("case", tuple(notable(witness.libraries()))), *self.peers]
        if self.verdict is Verdict.NOT_RUN:
            processes = []
        judged = [substrate_of(libraries, session.facts, nics=self.nics) for _, libraries in processes]
        reasons = {
            Verdict.FAIL: tuple(self.failures),
            Verdict.NOT_RUN: self.unmet,
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
            substrate={api: substrate.value for api, substrate in sorted(combined(judged).items())},
            libraries=tuple(SeenLibrary.of(name, library) for name, members in processes for library in members),
            seed=session.seed,
            evidence=self.evidence.kept,
            # Numbers of a case that failed are no numbers.
            numbers={} if self.failures else self.evidence.numbers,
            routes=tuple(self.evidence.routes),
            duration_ms=round((time.monotonic() - self.started) * 1000, 3),
            started=self.began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=session.commit,
            version=session.version,
            command=session.command,
        )


CASE: pytest.StashKey[Case] = pytest.StashKey()


def title_of(item: pytest.Item) -> str:
    """The first line of the docstring of a case; empty when it has none."""
    text = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return str(text).strip().partition("\n")[0]
