"""Measurement of the pairs of a job. In a pair, a NIC of one rank accesses GPU memory of another rank.

Rank 0 sends requests to both ranks of a pair, and appends a record for the pair, also if the measurement fails.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gdrkit
from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.evidence import LoadedLibrary  # noqa: TC001 - types of fields are read at run time.
from gdrkit.host import PortCounters, port_growth
from gdrkit.install_paths import install_paths
from gdrkit.qualify.ranks.pairs import pair_name
from gdrkit.qualify.ranks.proxy import StepFailed
from gdrkit.qualify.throughput import check_numbers, ran_on_hardware
from gdrkit.registration import COUNTERS_TIMEOUT_S, TransferPath, unproven_reason
from gdrkit.report import CaseReason, ClaimedRoute, Record, SeenLibrary, Verdict, append_record, substrate_of
from gdrkit.report.record import SCHEMA_VERSION
from gdrkit.report.substrate import Substrate, combine
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.inventory import Profile
    from gdrkit.qualify.ranks.pairs import Pair, RankFacts
    from gdrkit.qualify.ranks.proxy import RankProxy
    from gdrkit.qualify.run import Options, Progress

__all__ = ["PairRecorder", "PairResult", "TargetReply", "close_objects"]

_MEMORY_BYTES, _TRANSFER_BYTES, _OPERATION_COUNT, _ROUND_COUNT = 64 * MIB, MIB, 1024, 10
# The sizes for software twins and software NICs are smaller, because their rates say nothing about a machine.
_SMALL_MEMORY_BYTES, _SMALL_TRANSFER_BYTES, _SMALL_OPERATION_COUNT = 256 * KIB, 16 * KIB, 32
_APIS = ("cuda", "verbs")


# The replies of the ranks. If a reply has another form, the measurement of the pair fails.
@dataclass(frozen=True, slots=True)
class TargetReply:
    """The reply to open_target: endpoint of the target, address and key of its memory, and registration method."""

    endpoint: dict[str, Any]
    remote: dict[str, Any]
    way: str


@dataclass(frozen=True, slots=True)
class _RateReply:
    """The reply to run: the median rate of the rounds in GB/s, and the interquartile range in percent of the median.

    `moved_bytes` is the number of bytes that all rounds together moved.
    """

    median: float
    spread_percent: float
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class _LibrariesReply:
    libraries: tuple[LoadedLibrary, ...]


@dataclass
class PairResult:
    """The result of measuring a pair, from which a record is made.

    `failure` is the error of the measurement, and empty if it succeeded. `unproven` says what the measurement did not
    prove although the data was correct. `libraries` has for each rank of the pair: its role, its facts, and the
    libraries that its child had loaded.
    """

    case: str
    failure: str = ""
    unproven: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    libraries: list[tuple[str, RankFacts, tuple[LoadedLibrary, ...]]] = field(default_factory=list)
    routes: tuple[ClaimedRoute, ...] = ()
    clock_start_s: float = field(default_factory=time.monotonic)

    @property
    def substrate(self) -> dict[str, Substrate]:
        """The weakest substrate of each API in the children of both ranks."""
        return combine(substrate_of(libraries, rank_facts.facts) for _, rank_facts, libraries in self.libraries)

    def read_libraries(self, target: RankProxy, initiator: RankProxy) -> None:
        """Ask both ranks which libraries their children have loaded, and store the replies in `libraries`.

        Raises
        ------
        StepFailed
            A rank did not reply, or replied with an error.
        """
        for role, rank in (("target", target), ("initiator", initiator)):
            reply = {"libraries": rank.request("libraries", {})}
            libraries = serialization.from_json_data(_LibrariesReply, reply, where=role).libraries
            self.libraries.append((role, rank.rank_facts, libraries))


class PairRecorder:
    """A recorder that measures one pair after another and appends a record for each.

    Parameters
    ----------
    records : Path
        The records file.
    rank0_facts : RankFacts
        The facts of rank 0. The report describes the machine of this rank.
    profile, options, progress
        The profile, the options and the progress display of the run.
    """

    def __init__(
        self, records: Path, rank0_facts: RankFacts, *, profile: Profile, options: Options, progress: Progress
    ) -> None:
        self._records = records
        self._rank0_facts = rank0_facts
        self._profile = profile
        self._options = options
        self._progress = progress

    def record_missing_rank(self, rank: int, reason: str) -> None:
        """Append a failed record for a rank that does not take part."""
        self.append(PairResult(f"ranks/{rank}", reason))

    def measure(self, pair: Pair, ranks: Mapping[int, RankProxy]) -> None:
        """Measure RDMA WRITE into the target's GPU memory and READ from it, check the data, and append a record."""
        target, initiator = ranks[pair.target], ranks[pair.initiator]
        result = PairResult(pair_name(pair))
        result.evidence |= {"pair": serialization.to_json_data(pair), "measured_apis": list(_APIS)}
        result.evidence["hosts"] = {"initiator": initiator.rank_facts.host, "target": target.rank_facts.host}
        try:
            self._transfer(pair, target, initiator, result)
            result.read_libraries(target, initiator)
            result.failure = self._check_numbers(result)
        except (StepFailed, UsageError) as error:
            result.failure = error.message
        # If the child of one rank crashes, the other rank also fails, and may report first. But close_objects() then
        # returns an error of the rank whose child crashed, so the text names this rank too.
        result.failure = "; ".join(
            filter(None, [result.failure, *dict.fromkeys(map(close_objects, (initiator, target)))])
        )
        if target.rank_facts.host == self._rank0_facts.host and not result.failure:
            # The table of routes in the report describes only the machine of rank 0.
            method, path = str(result.evidence["way"]), _find_path(pair, target, initiator)
            unproven = str(result.evidence["unproven"]) or None
            claim = ClaimedRoute(pair.device, pair.target_nic, method, None, path.value, pair.initiator_nic, unproven)
            result.routes = (claim,)
        self.append(result)

    def _transfer(self, pair: Pair, target: RankProxy, initiator: RankProxy, result: PairResult) -> None:
        is_hardware = all(
            ran_on_hardware([api], substrate_of(rank.rank_facts.facts.api_libraries(api), rank.rank_facts.facts))
            for rank in (target, initiator)
            for api in _APIS
        )
        memory_bytes = _MEMORY_BYTES if is_hardware else _SMALL_MEMORY_BYTES
        transfer_options = {
            "length_bytes": _TRANSFER_BYTES if is_hardware else _SMALL_TRANSFER_BYTES,
            "operations": _OPERATION_COUNT if is_hardware else _SMALL_OPERATION_COUNT,
            "rounds": _ROUND_COUNT,
        }
        seed = self._options.seed or 0
        reply = target.request(
            "open_target", {"nic": pair.target_nic, "device": pair.device, "length_bytes": memory_bytes}
        )
        target_reply = serialization.from_json_data(TargetReply, reply, where="open_target")
        result.evidence["way"] = target_reply.way
        connect_arguments = initiator.request(
            "open_initiator",
            {"nic": pair.initiator_nic, "endpoint": target_reply.endpoint, "length_bytes": memory_bytes},
        )
        target.request("connect", connect_arguments)
        counters_before, moved_bytes_of_directions = _read_port_counters(target, initiator), []
        for direction in ("write", "read"):
            # READ transfers other data than WRITE, so that data left over from the WRITE is detected.
            transfer_seed = seed + (direction == "read")
            if direction == "read":
                target.request("fill", {"seed": transfer_seed})
            reply = initiator.request(
                "run",
                {"direction": direction, "remote": target_reply.remote, **transfer_options, "seed": transfer_seed},
            )
            rate = serialization.from_json_data(_RateReply, reply, where="run")
            if direction == "write":
                target.request("check", {"seed": transfer_seed})
            result.numbers[f"{direction}_gb_per_s_median"] = rate.median
            result.numbers[f"{direction}_spread_percent"] = rate.spread_percent
            moved_bytes_of_directions.append(rate.moved_bytes)
        path, deadline_s = _find_path(pair, target, initiator), time.monotonic() + COUNTERS_TIMEOUT_S
        while True:
            counters_after = _read_port_counters(target, initiator)
            growths = [
                port_growth(before, after) for before, after in zip(counters_before, counters_after, strict=True)
            ]
            unproven = unproven_reason(path, min(moved_bytes_of_directions), *growths)
            # Some drivers update their counters late, so the counters are read again until the deadline.
            if unproven in {"", "counters_missing"} or time.monotonic() > deadline_s:
                break
        growth_by_role = dict(zip(("target", "initiator"), growths, strict=True))
        result.evidence["path"], result.evidence["unproven"] = path.value, unproven
        result.evidence["port_growth"] = serialization.to_json_data(growth_by_role)

    def _check_numbers(self, result: PairResult) -> str:
        """Compare rates of hardware with the profile. Return a text about rates that fail, or an empty text."""
        if not ran_on_hardware(_APIS, result.substrate):
            return ""
        checks = check_numbers(result.case, result.numbers, profile=self._profile, limits={})
        result.evidence["judged"] = serialization.to_json_data(checks)
        return "; ".join(check.text for check in checks if check.verdict is Verdict.FAIL)

    def append(self, result: PairResult) -> None:
        """Append the record of a pair, and show it in the progress display."""
        substrate = result.substrate
        record = Record(
            schema_version=SCHEMA_VERSION,
            case=result.case,
            title="WRITE into and READ from the memory of a GPU, by the NICs of two ranks",
            verdict=Verdict.FAIL if result.failure else Verdict.UNPROVEN if result.unproven else Verdict.PASS,
            reasons=tuple(CaseReason(text=text) for text in (result.failure or result.unproven,) if text),
            profile=self._profile.name,
            facts_digest=self._rank0_facts.facts.digest,
            substrate={api: substrate[api].value for api in sorted(substrate)},
            libraries=tuple(
                SeenLibrary.of(role, library) for role, _, libraries in result.libraries for library in libraries
            ),
            seed=self._options.seed or 0,
            evidence=result.evidence,
            numbers={} if result.failure else result.numbers,
            routes=result.routes,
            duration_ms=round((time.monotonic() - result.clock_start_s) * 1000, 3),
            started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=install_paths().commit(),
            version=gdrkit.__version__,
            command=self._options.command,
            uses=tuple(sorted(set(_APIS) & substrate.keys())),
        )
        append_record(self._records, record)
        self._progress.show_record(record)


def _find_path(pair: Pair, target: RankProxy, initiator: RankProxy) -> TransferPath:
    """Return the path between the NICs of a pair: loopback if both are the same NIC of the same machine, else wire."""
    nics_with_hosts = ((target.rank_facts.host, pair.target_nic), (initiator.rank_facts.host, pair.initiator_nic))
    return TransferPath.LOOPBACK if nics_with_hosts[0] == nics_with_hosts[1] else TransferPath.WIRE


def _read_port_counters(target: RankProxy, initiator: RankProxy) -> list[PortCounters]:
    """Return the counters of the port of the target's NIC, and of the port of the initiator's NIC."""
    return [
        serialization.from_json_data(PortCounters, rank.request("counters", {}), where="counters")
        for rank in (target, initiator)
    ]


def close_objects(rank: RankProxy) -> str:
    """Make the child of a rank close its NIC, GPU and memory. Return the error message, or an empty string."""
    try:
        rank.request("close", {})
    except StepFailed as error:
        return error.message
    return ""
