"""Writer of one record for each pair when its measurement ends, whatever the result."""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gdrkit
from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.evidence import LoadedLibrary  # noqa: TC001 - types of fields are read at run time.
from gdrkit.install_paths import install_paths
from gdrkit.qualify.ranks.member import StepFailed
from gdrkit.qualify.ranks.pairs import name_of
from gdrkit.qualify.throughput import is_of_hardware, judge
from gdrkit.report import CaseReason, ClaimedRoute, Record, SeenLibrary, Verdict, append_record, substrate_of
from gdrkit.report.record import SCHEMA_VERSION
from gdrkit.report.substrate import Substrate, combine
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.inventory import Profile
    from gdrkit.qualify.ranks.member import Member
    from gdrkit.qualify.ranks.pairs import Pair, RankFacts
    from gdrkit.qualify.run import Options, Progress

__all__ = ["Rows"]

_AREA_BYTES, _LENGTH_BYTES, _OPERATIONS, _ROUNDS = 64 * MIB, MIB, 1024, 10
# Sizes for a substrate other than hardware, whose numbers are not shown.
_SMALL_AREA_BYTES, _SMALL_LENGTH_BYTES, _SMALL_OPERATIONS = 256 * KIB, 16 * KIB, 32
_APIS = ("cuda", "verbs")


# These classes describe the replies of ranks. Any other reply fails the row.
@dataclass(frozen=True, slots=True)
class _Held:
    endpoint: dict[str, Any]
    remote: dict[str, Any]
    way: str


@dataclass(frozen=True, slots=True)
class _Ran:
    median: float
    spread_percent: float


@dataclass(frozen=True, slots=True)
class _Loaded:
    libraries: tuple[LoadedLibrary, ...]


@dataclass
class _Row:
    """The data of a record before it is written."""

    case: str
    why: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, RankFacts, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    routes: tuple[ClaimedRoute, ...] = ()
    began: float = field(default_factory=time.monotonic)

    @property
    def substrate(self) -> dict[str, Substrate]:
        """The weakest substrate of each API over both sides."""
        return combine(substrate_of(libraries, about.facts) for _, about, libraries in self.seen)


class Rows:
    """The measurement of pairs, one after the other, with a record of each."""

    def __init__(
        self, records: Path, first: RankFacts, *, profile: Profile, options: Options, progress: Progress
    ) -> None:
        self._records = records
        self._first = first
        self._profile = profile
        self._options = options
        self._progress = progress

    def missing(self, rank: int, why: str) -> None:
        """Append a failed record for a rank that did not report."""
        self._append(_Row(f"ranks/{rank}", why))

    def measure(self, pair: Pair, ranks: Mapping[int, Member]) -> None:
        """Measure one pair: WRITE into the GPU and READ from it, with a check of the data of each."""
        target, initiator = ranks[pair.target], ranks[pair.initiator]
        row = _Row(name_of(pair))
        row.evidence |= {"pair": serialization.to_json_data(pair), "measured_apis": list(_APIS)}
        row.evidence["hosts"] = {"initiator": initiator.about.host, "target": target.about.host}
        try:
            self._run(pair, target, initiator, row)
            for name, side in (("target", target), ("initiator", initiator)):
                told = {"libraries": side.ask("libraries", {})}
                row.seen.append((name, side.about, serialization.from_json_data(_Loaded, told, where=name).libraries))
            row.why = self._judge(row)
        except (StepFailed, UsageError) as error:
            row.why = error.message
        # If a peer dies, the other side has an error, too. The end of the peer is the cause.
        row.why = "; ".join(filter(None, [row.why, *dict.fromkeys(map(_dropped, (initiator, target)))]))
        if target.about.host == self._first.host and not row.why:
            # The table of routes is about the machine of rank 0.
            row.routes = (ClaimedRoute(pair.device, pair.target_nic, str(row.evidence["way"])),)
        self._append(row)

    def _run(self, pair: Pair, target: Member, initiator: Member, row: _Row) -> None:
        is_large = all(
            is_of_hardware([api], substrate_of(side.about.facts.api_libraries(api), side.about.facts))
            for side in (target, initiator)
            for api in _APIS
        )
        area_bytes = _AREA_BYTES if is_large else _SMALL_AREA_BYTES
        sizes = {
            "length_bytes": _LENGTH_BYTES if is_large else _SMALL_LENGTH_BYTES,
            "operations": _OPERATIONS if is_large else _SMALL_OPERATIONS,
            "rounds": _ROUNDS,
        }
        seed = self._options.seed or 0
        hold = {"nic": pair.target_nic, "device": pair.device, "length_bytes": area_bytes}
        held = serialization.from_json_data(_Held, target.ask("hold", hold), where="hold")
        row.evidence["way"] = held.way
        begin = {"nic": pair.initiator_nic, "endpoint": held.endpoint, "length_bytes": area_bytes}
        target.ask("connect", initiator.ask("initiate", begin))
        for direction in ("write", "read"):
            if direction == "read":
                target.ask("fill", {"seed": seed + 1})
            asked = {"direction": direction, "remote": held.remote, **sizes}
            told = initiator.ask("run", {**asked, "seed": seed + (direction == "read")})
            ran = serialization.from_json_data(_Ran, told, where="run")
            if direction == "write":
                target.ask("check", {"seed": seed})
            row.numbers[f"{direction}_gb_per_s_median"] = ran.median
            row.numbers[f"{direction}_spread_percent"] = ran.spread_percent

    def _judge(self, row: _Row) -> str:
        if not is_of_hardware(_APIS, row.substrate):
            return ""
        judged = judge(row.case, row.numbers, profile=self._profile, limits={})
        row.evidence["judged"] = serialization.to_json_data(judged)
        return "; ".join(each.text for each in judged if each.verdict is Verdict.FAIL)

    def _append(self, row: _Row) -> None:
        on = row.substrate
        record = Record(
            schema_version=SCHEMA_VERSION,
            case=row.case,
            title="WRITE into and READ from the memory of a GPU, by the NICs of two ranks",
            verdict=Verdict.FAIL if row.why else Verdict.PASS,
            reasons=(CaseReason(text=row.why),) if row.why else (),
            profile=self._profile.name,
            facts_digest=self._first.facts.digest,
            substrate={api: on[api].value for api in sorted(on)},
            libraries=tuple(SeenLibrary.of(name, each) for name, _, libraries in row.seen for each in libraries),
            seed=self._options.seed or 0,
            evidence=row.evidence,
            numbers={} if row.why else row.numbers,
            routes=row.routes,
            duration_ms=round((time.monotonic() - row.began) * 1000, 3),
            started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=install_paths().commit(),
            version=gdrkit.__version__,
            command=self._options.command,
            uses=tuple(sorted(set(_APIS) & on.keys())),
        )
        append_record(self._records, record)
        self._progress.done(record)


def _dropped(side: Member) -> str:
    """Make a side close what it has open, and return why it could not; empty if it could."""
    try:
        side.ask("drop", {})
    except StepFailed as error:
        return error.message
    return ""
