"""One record for each pair, written when it ends, however it ends.

Level 6.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import gdrkit
from gdrkit import plain
from gdrkit.errors import GdrkitError
from gdrkit.house import house
from gdrkit.qualify.ranks.lines import Gone
from gdrkit.qualify.ranks.pairs import name_of
from gdrkit.qualify.throughput import is_of_hardware, judge
from gdrkit.report import CaseReason, ClaimedRoute, Record, SeenLibrary, Verdict, append_record, substrate_of
from gdrkit.report.record import SCHEMA_VERSION
from gdrkit.report.substrate import Substrate, combined
from gdrkit.units import KIB, MIB
from gdrkit.witness import LoadedLibrary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.inventory import Profile
    from gdrkit.qualify.ranks.lines import Lines
    from gdrkit.qualify.ranks.pairs import Pair, RankFacts
    from gdrkit.qualify.run import Options, Progress

__all__ = ["Rows"]

# A child that is asked for more than this is stuck; with the time for the answer, a row is there within a minute.
_STEP_S, _ANSWER_S = 30.0, 10.0
_AREA_BYTES, _LENGTH_BYTES, _OPERATIONS, _ROUNDS = 64 * MIB, MIB, 1024, 10
# Of anything but hardware, whose numbers nobody is shown.
_SMALL_AREA_BYTES, _SMALL_LENGTH_BYTES, _SMALL_OPERATIONS = 256 * KIB, 16 * KIB, 32
_APIS = ("cuda", "verbs")

_Side: TypeAlias = "tuple[RankFacts, Lines]"


class _Failed(GdrkitError):
    """A step of a pair; the text is the reason of its record."""


@dataclass
class _Row:
    """What becomes a record."""

    case: str
    why: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[str, RankFacts, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    routes: tuple[ClaimedRoute, ...] = ()
    began: float = field(default_factory=time.monotonic)

    @property
    def substrate(self) -> dict[str, Substrate]:
        """What each API ran on, the weakest of both sides."""
        return combined(substrate_of(libraries, about.facts) for _, about, libraries in self.seen)


class Rows:
    """Measures pairs, one after the other, and appends what comes of each."""

    def __init__(
        self, records: Path, first: RankFacts, *, profile: Profile, options: Options, progress: Progress
    ) -> None:
        self._records = records
        self._first = first
        self._profile = profile
        self._options = options
        self._progress = progress

    def missing(self, rank: int, why: str) -> None:
        """A rank of which nothing is known."""
        self._append(_Row(f"ranks/{rank}", why))

    def measure(self, pair: Pair, ranks: Mapping[int, _Side]) -> None:
        """Measure one pair: WRITE into the GPU and READ from it, each with its data checked."""
        target, initiator = ranks[pair.target], ranks[pair.initiator]
        row = _Row(name_of(pair))
        row.evidence |= {"pair": plain.to_plain(pair), "measured_apis": list(_APIS)}
        row.evidence["hosts"] = {"initiator": initiator[0].host, "target": target[0].host}
        try:
            self._run(pair, target, initiator, row)
            for name, side in (("target", target), ("initiator", initiator)):
                told = _ask(side, "libraries", {})
                found = tuple(plain.from_plain(LoadedLibrary, each, where=name) for each in told)
                row.seen.append((name, side[0], found))
            row.why = self._judge(row)
        except _Failed as error:
            row.why = error.message
        # A peer that died shows at the other side as an error of its own; its end is the cause.
        row.why = "; ".join(filter(None, [row.why, *dict.fromkeys(map(_dropped, (initiator, target)))]))
        if target[0].host == self._first.host and not row.why:
            # The table of routes is about the machine of rank 0.
            row.routes = (ClaimedRoute(pair.device, pair.target_nic, str(row.evidence["way"])),)
        self._append(row)

    def _run(self, pair: Pair, target: _Side, initiator: _Side, row: _Row) -> None:
        is_large = all(
            is_of_hardware([api], substrate_of(side[0].facts.api_libraries(api), side[0].facts))
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
        held = _ask(target, "hold", {"nic": pair.target_nic, "device": pair.device, "length_bytes": area_bytes})
        row.evidence["way"] = held["way"]
        begin = {"nic": pair.initiator_nic, "endpoint": held["endpoint"], "length_bytes": area_bytes}
        _ask(target, "connect", _ask(initiator, "initiate", begin))
        for direction in ("write", "read"):
            if direction == "read":
                _ask(target, "fill", {"seed": seed + 1})
            asked = {"direction": direction, "remote": held["remote"], **sizes}
            told = _ask(initiator, "run", {**asked, "seed": seed + (direction == "read")})
            if direction == "write":
                _ask(target, "check", {"seed": seed})
            row.numbers[f"{direction}_gb_per_s_median"] = float(told["median"])
            row.numbers[f"{direction}_spread_percent"] = float(told["spread_percent"])

    def _judge(self, row: _Row) -> str:
        if not is_of_hardware(_APIS, row.substrate):
            return ""
        judged = judge(row.case, row.numbers, profile=self._profile, limits={})
        row.evidence["judged"] = plain.to_plain(judged)
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
            commit=house().commit(),
            version=gdrkit.__version__,
            command=self._options.command,
            uses=tuple(sorted(set(_APIS) & on.keys())),
        )
        append_record(self._records, record)
        self._progress.done(record)


def _ask(side: _Side, do: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - as the step says.
    about, lines = side
    name = f"{do} on rank {about.rank} ({about.host.partition(' ')[0]})"
    try:
        lines.send({"do": do, "with": arguments, "limit_s": _STEP_S}, limit_s=_ANSWER_S)
        answer = lines.receive(limit_s=_STEP_S + _ANSWER_S)
    except Gone as error:
        message = f"{name}: the rank is gone"
        raise _Failed(message) from error
    except TimeoutError as error:
        message = f"{name}: the rank does not answer"
        raise _Failed(message) from error
    if "result" in answer:
        return answer["result"]
    message = f"{name}: {answer['error']}" if "error" in answer else f"{name}: the measuring process: {answer['lost']}"
    raise _Failed(message)


def _dropped(side: _Side) -> str:
    """Have a side close what it has open; why it could not."""
    try:
        _ask(side, "drop", {})
    except _Failed as error:
        return error.message
    return ""
