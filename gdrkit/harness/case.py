"""A running case and the record that is made of it afterwards."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from gdrkit import evidence
from gdrkit.harness.evidence import Evidence
from gdrkit.harness.needs import apis
from gdrkit.install_paths import install_paths
from gdrkit.inventory.facts import notable
from gdrkit.report import CaseReason, Record, SeenLibrary, Verdict, substrate_of
from gdrkit.report.record import REFUSED, SCHEMA_VERSION
from gdrkit.report.substrate import combine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.evidence import LoadedLibrary
    from gdrkit.harness.leaks import Snapshot
    from gdrkit.harness.needs import Need
    from gdrkit.harness.refusal import SeenRefusal
    from gdrkit.harness.session import Session
    from gdrkit.inventory import RefusalCause

__all__ = ["CASE", "Case", "title_of"]

_TEXT_CHARACTERS = 1000
_TRACEBACK_CHARACTERS = 20_000


@dataclass
class Case:
    """The state of a running case as known to the harness.

    Attributes
    ----------
    needs : tuple of Need
        The declared needs.
    unmet : tuple of CaseReason
        The reasons of the needs that are not met; empty until the needs were checked.
    refusal : tuple of RefusalCause or None
        The causes of the registration refusal that the profile expects, if one such refusal accounts for every unmet
        need; then the case runs.
    refused : tuple of SeenRefusal
        The expected refusal, once it occurred.
    evidence : Evidence
        The evidence that the case keeps.
    before : Snapshot or None
        The descriptors and handles that were open before the case.
    failures : list of CaseReason
        The failures of the phases of the case.
    nics : list of str
        The NICs that the fixtures opened.
    peers : list
        Name and libraries of each peer process that took part.
    """

    item: pytest.Item
    needs: tuple[Need, ...]
    unmet: tuple[CaseReason, ...] = ()
    refusal: tuple[RefusalCause, ...] | None = None
    refused: tuple[SeenRefusal, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    before: Snapshot | None = None
    failures: list[CaseReason] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    peers: list[tuple[str, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    began: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def runs(self) -> bool:
        """Whether the body runs: every need is met, or the unmet needs must show themselves as a refusal."""
        return not self.unmet or self.refusal is not None

    @property
    def verdict(self) -> Verdict:
        """The verdict of the case until now."""
        if self.failures:
            return Verdict.FAIL
        if self.unmet:
            return Verdict.NOT_RUN
        return Verdict.UNPROVEN if self.evidence.missing else Verdict.PASS

    def look(self, session: Session) -> None:
        """Check all needs of the case."""
        unmet = [(need, reason) for need in self.needs if (reason := need.check(session.facts)) is not None]
        refusals = {session.profile.refusal(need.name) for need, _ in unmet}
        # This is one refusal that accounts for every unmet need.
        self.refusal = refusals.pop() if len(refusals) == 1 else None
        self.unmet = tuple(
            CaseReason(
                text=reason,
                need=need.name,
                foreseen=self.refusal is not None or session.profile.foresees(need.name, reason),
            )
            for need, reason in unmet
        )

    def refuse(self, seen: tuple[SeenRefusal, ...]) -> None:
        """Keep the expected refusal."""
        self.refused = seen
        self.evidence[REFUSED] = seen

    def fail(self, when: str, text: str, details: str) -> None:
        """Keep the reason why a phase failed."""
        first = text.strip().partition("\n")[0][:_TEXT_CHARACTERS]
        self.failures.append(CaseReason(text=first if when == "call" else f"{when}: {first}"))
        earlier = str(self.evidence.kept.get("traceback", ""))
        both = f"{earlier}\n\n{details}".strip()
        self.evidence.kept["traceback"] = both[-_TRACEBACK_CHARACTERS:]

    def record(self, session: Session) -> Record:
        """Return the record of the case."""
        processes = [("case", tuple(notable(evidence.libraries()))), *self.peers]
        is_unrun = self.verdict is Verdict.NOT_RUN
        if is_unrun and not self.refused:
            processes = []
        judged = [substrate_of(libraries, session.facts, nics=self.nics) for _, libraries in processes]
        on = {api: substrate.value for api, substrate in sorted(combine(judged).items())}
        reasons = {
            Verdict.FAIL: tuple(self.failures),
            Verdict.NOT_RUN: (
                *self.unmet,
                *(replace(self.unmet[0], text=f"refused as expected: {seen}") for seen in self.refused),
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
            substrate=on,
            libraries=tuple(SeenLibrary.of(name, library) for name, members in processes for library in members),
            seed=session.seed,
            evidence={key: _portable(value) for key, value in self.evidence.kept.items()},
            # Numbers of a failed case are not valid. A refused case shows nothing but the refusal.
            numbers={} if self.failures or is_unrun else self.evidence.numbers,
            routes=() if is_unrun else tuple(self.evidence.routes),
            duration_ms=round((time.monotonic() - self.started) * 1000, 3),
            started=self.began.strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=session.commit,
            version=session.version,
            command=session.command,
            files=() if is_unrun else tuple(self.evidence.files),
            uses=self._used(on),
        )

    def _used(self, loaded: Iterable[str]) -> tuple[str, ...]:
        """Return the APIs among `loaded` that the case declares to need, as in ``cuda.vmm`` or ``software(verbs)``."""
        return tuple(sorted({api for need in self.needs for api in apis(need)} & set(loaded)))


CASE: pytest.StashKey[Case] = pytest.StashKey()


def _portable(value: object) -> object:
    """Return `value` with local paths replaced, which mean nothing on another machine. `value` has a JSON form."""
    if isinstance(value, dict):
        return {key: _portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return install_paths().portable(value) if isinstance(value, str) and "/" in value else value


def title_of(item: pytest.Item) -> str:
    """Return the first line of the docstring of a case; empty if there is none."""
    text = getattr(getattr(item, "function", None), "__doc__", None) or ""
    return str(text).strip().partition("\n")[0]
