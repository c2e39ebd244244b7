"""Balance over hosts: all pairs of a ring, and then of a permutation, transfer at the same time.

Each host sends and receives in both directions at once, as in a collective operation. A pair that is slower than the
others is named, and the counters of the ports are compared with the bytes of all pairs.
"""

from __future__ import annotations

import functools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.host import PortCounters, PortGrowth, port_growth
from gdrkit.qualify.ranks.pairs import pair_name
from gdrkit.qualify.ranks.proxy import StepFailed
from gdrkit.qualify.ranks.recorder import PairResult, TargetReply, close_objects
from gdrkit.registration import COUNTERS_TIMEOUT_S, TransferPath, unproven_reason
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gdrkit.qualify.ranks.pairs import Pair, Round
    from gdrkit.qualify.ranks.proxy import RankProxy

__all__ = ["measure_round"]

_MEMORY_BYTES, _DURATION_S = MIB, 2.0
# A pair is slow if its rate is less than this part of the median of the round.
_SLOW_RATIO = 0.7


@dataclass(frozen=True, slots=True)
class _BalanceReply:
    """How many bytes an initiator moved in each direction, and in which time."""

    moved_bytes: int
    elapsed_s: float


@dataclass
class _Transfer:
    """A pair of the round, its ranks and its result. `reply` is None until the bytes have moved."""

    pair: Pair
    target: RankProxy
    initiator: RankProxy
    result: PairResult
    remote: dict[str, Any] | None = None
    endpoint: dict[str, Any] | None = None
    reply: _BalanceReply | None = None

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that moved in each direction, as far as the initiator has reported them."""
        return 0 if self.reply is None else self.reply.moved_bytes

    def open_target(self, _seed: int) -> None:
        """Allocate and register the memory of the target."""
        arguments = {"nic": self.pair.target_nic, "device": self.pair.device, "length_bytes": _MEMORY_BYTES}
        reply = serialization.from_json_data(
            TargetReply, self.target.request("open_target", arguments), where="open_target"
        )
        self.remote, self.endpoint, self.result.evidence["way"] = reply.remote, reply.endpoint, reply.way

    def open_initiator(self, _seed: int) -> None:
        """Create the initiator and connect it to the target."""
        arguments = {"nic": self.pair.initiator_nic, "endpoint": self.endpoint, "length_bytes": _MEMORY_BYTES}
        self.endpoint = self.initiator.request("open_initiator", arguments)

    def connect(self, _seed: int) -> None:
        """Connect the target to the initiator."""
        self.target.request("connect", self.endpoint or {})

    def run(self, seed: int) -> None:
        """Transfer for the time of a round."""
        arguments = {"remote": self.remote, "seed": seed, "duration_s": _DURATION_S}
        reply = serialization.from_json_data(
            _BalanceReply, self.initiator.request("balance", arguments), where="balance"
        )
        self.reply = reply
        self.result.numbers["balance_gb_per_s"] = 2 * reply.moved_bytes / reply.elapsed_s / 1e9

    def check(self, seed: int) -> None:
        """Check the data that the initiator wrote."""
        self.target.request("check", {"seed": seed})


def measure_round(plan: Round, ranks: Mapping[int, RankProxy], *, seed: int) -> list[PairResult]:
    """Transfer between all pairs of a round at the same time, and return the result of each pair.

    A rank that died fails the two pairs in which it takes part.
    """
    transfers = [
        _Transfer(pair, ranks[pair.target], ranks[pair.initiator], PairResult(pair_name(pair, f"balance/{plan.name}")))
        for pair in plan.pairs
    ]
    # Each rank is the target of one pair and the initiator of another. A step is a request to all targets or to all
    # initiators, so no rank gets two requests at the same time.
    with ThreadPoolExecutor(max_workers=len(transfers)) as pool:
        for step in (_Transfer.open_target, _Transfer.open_initiator, _Transfer.connect):
            list(pool.map(functools.partial(_attempt, step, seed=seed), transfers))
        counters_before = _read_counters(transfers)
        list(pool.map(functools.partial(_attempt, _Transfer.run, seed=seed), transfers))
        list(pool.map(functools.partial(_attempt, _Transfer.check, seed=seed), transfers))
    _compare_counters(transfers, counters_before)
    _name_slow_pairs(transfers)
    for transfer in transfers:
        hosts = {"initiator": transfer.initiator.rank_facts.host, "target": transfer.target.rank_facts.host}
        transfer.result.evidence |= {"pair": serialization.to_json_data(transfer.pair), "hosts": hosts}
        _attempt(lambda pair, _seed: pair.result.read_libraries(pair.target, pair.initiator), transfer, seed=seed)
    for transfer in transfers:
        failure = close_objects(transfer.target)
        transfer.result.failure = transfer.result.failure or failure
    return [transfer.result for transfer in transfers]


def _attempt(step: Callable[[_Transfer, int], None], transfer: _Transfer, *, seed: int) -> None:
    """Execute a step of a pair, and store its error in the result. Do nothing if an earlier step of the pair failed."""
    if not transfer.result.failure:
        try:
            step(transfer, seed)
        except (StepFailed, UsageError) as error:
            transfer.result.failure = error.message


def _read_counters(transfers: Sequence[_Transfer]) -> dict[int, PortCounters]:
    """Return the counters of the port of each rank that replies."""
    counters_by_rank = {}
    for transfer in transfers:
        try:
            reply = transfer.target.request("counters", {})
            counters_by_rank[transfer.pair.target] = serialization.from_json_data(PortCounters, reply, where="counters")
        except (StepFailed, UsageError):
            continue  # The next step of the pair fails for the same reason.
    return counters_by_rank


def _compare_counters(transfers: Sequence[_Transfer], counters_before: Mapping[int, PortCounters]) -> None:
    """Compare the counters of each port with the bytes of its two pairs, and keep the result as evidence."""
    incoming_bytes = {transfer.pair.target: transfer.moved_bytes for transfer in transfers}
    outgoing_bytes = {transfer.pair.initiator: transfer.moved_bytes for transfer in transfers}
    deadline_s = time.monotonic() + COUNTERS_TIMEOUT_S
    while True:
        growth_by_rank: dict[int, PortGrowth] = {
            rank: port_growth(counters_before[rank], after)
            for rank, after in _read_counters(transfers).items()
            if rank in counters_before
        }
        reason_by_rank = {
            rank: unproven_reason(TransferPath.WIRE, incoming_bytes[rank] + outgoing_bytes[rank], growth)
            for rank, growth in growth_by_rank.items()
        }
        # Some drivers update their counters late.
        if "counters_did_not_grow" not in reason_by_rank.values() or time.monotonic() > deadline_s:
            break
    for transfer in transfers:
        rank_by_role = {"target": transfer.pair.target, "initiator": transfer.pair.initiator}
        transfer.result.evidence["unproven"] = next(
            (reason for rank in rank_by_role.values() if (reason := reason_by_rank.get(rank, "counters_missing"))), ""
        )
        transfer.result.evidence["port_growth"] = serialization.to_json_data(
            {role: growth_by_rank.get(rank) for role, rank in rank_by_role.items()}
        )
        # Each port takes part in two pairs, in one as initiator and in one as target. Each pair moves its bytes in both
        # directions.
        transfer.result.evidence["port_bytes_expected"] = {
            role: incoming_bytes[rank] + outgoing_bytes[rank] for role, rank in rank_by_role.items()
        }


def _name_slow_pairs(transfers: Sequence[_Transfer]) -> None:
    rate_by_case = {
        transfer.result.case: transfer.result.numbers["balance_gb_per_s"]
        for transfer in transfers
        if not transfer.result.failure
    }
    if not rate_by_case:
        return
    median = statistics.median(rate_by_case.values())
    for transfer in transfers:
        rate = rate_by_case.get(transfer.result.case, median)
        if rate < _SLOW_RATIO * median:
            pair, percent = transfer.pair, 100 * rate / median
            initiator, target = transfer.initiator.rank_facts.host_name, transfer.target.rank_facts.host_name
            transfer.result.unproven = (
                f"slow pair: rank {pair.initiator} ({initiator}, {pair.initiator_nic}) and rank {pair.target} "
                f"({target}, {pair.target_nic}) moved {rate:.3g} GB/s, {percent:.0f} % of the median of this round"
            )
