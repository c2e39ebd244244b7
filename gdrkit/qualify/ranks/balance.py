"""Measurement of the balance between hosts: all pairs of a ring, and then of a permutation, transfer at the same time.

Each host is the initiator of one pair and the target of another at the same time, as in a collective operation. The
result names each pair that is slower than the others, and says whether the port counters agree with the moved bytes.
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

_MEMORY_BYTES, _ROUND_DURATION_S = MIB, 2.0
# A pair is slow if its rate is below this fraction of the median rate of the round.
_SLOW_RATIO = 0.7


@dataclass(frozen=True, slots=True)
class _BalanceReply:
    """The reply of an initiator: how many bytes it moved in each direction, and the time that it took."""

    moved_bytes: int
    elapsed_s: float


@dataclass
class _Transfer:
    """The transfer of a pair in a round, its two ranks and its result.

    Attributes
    ----------
    remote_memory : dict or None
        Address and key of the target's memory. None until :meth:`open_target`.
    target_endpoint : dict or None
        Endpoint of the target's queue pair. None until :meth:`open_target`.
    connect_arguments : dict or None
        The endpoint of the initiator, for the request ``connect``. None until :meth:`open_initiator`.
    reply : _BalanceReply or None
        The reply of the initiator. None until the bytes have moved.
    """

    pair: Pair
    target: RankProxy
    initiator: RankProxy
    result: PairResult
    remote_memory: dict[str, Any] | None = None
    target_endpoint: dict[str, Any] | None = None
    connect_arguments: dict[str, Any] | None = None
    reply: _BalanceReply | None = None

    @property
    def moved_bytes(self) -> int:
        """Number of bytes that moved in each direction, as far as the initiator has reported them."""
        return 0 if self.reply is None else self.reply.moved_bytes

    # Each step has the parameter seed, because _attempt() passes it to every step.
    def open_target(self, _seed: int) -> None:
        """Make the target allocate and register memory, and store its reply."""
        arguments = {"nic": self.pair.target_nic, "device": self.pair.device, "length_bytes": _MEMORY_BYTES}
        reply = serialization.from_json_data(
            TargetReply, self.target.request("open_target", arguments), where="open_target"
        )
        self.remote_memory, self.target_endpoint, self.result.evidence["way"] = reply.remote, reply.endpoint, reply.way

    def open_initiator(self, _seed: int) -> None:
        """Make the initiator connect its queue pair to the target, and store its endpoint."""
        arguments = {"nic": self.pair.initiator_nic, "endpoint": self.target_endpoint, "length_bytes": _MEMORY_BYTES}
        self.connect_arguments = self.initiator.request("open_initiator", arguments)

    def connect(self, _seed: int) -> None:
        """Make the target connect its queue pair to the initiator."""
        self.target.request("connect", self.connect_arguments or {})

    def run(self, seed: int) -> None:
        """Make the initiator transfer for the duration of a round, and store the rate of the pair."""
        arguments = {"remote": self.remote_memory, "seed": seed, "duration_s": _ROUND_DURATION_S}
        reply = serialization.from_json_data(
            _BalanceReply, self.initiator.request("balance", arguments), where="balance"
        )
        self.reply = reply
        self.result.numbers["balance_gb_per_s"] = 2 * reply.moved_bytes / reply.elapsed_s / 1e9

    def check(self, seed: int) -> None:
        """Make the target check the data that the initiator wrote."""
        self.target.request("check", {"seed": seed})


def measure_round(round_plan: Round, ranks: Mapping[int, RankProxy], *, seed: int) -> list[PairResult]:
    """Transfer between all pairs of a round at the same time, and return the result of each pair.

    If a rank has died, the two pairs in which it takes part fail.
    """
    transfers = [
        _Transfer(
            pair, ranks[pair.target], ranks[pair.initiator], PairResult(pair_name(pair, f"balance/{round_plan.name}"))
        )
        for pair in round_plan.pairs
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
    _mark_slow_pairs(transfers)
    for transfer in transfers:
        hosts = {"initiator": transfer.initiator.rank_facts.host, "target": transfer.target.rank_facts.host}
        transfer.result.evidence |= {"pair": serialization.to_json_data(transfer.pair), "hosts": hosts}
        _attempt(
            lambda ended_transfer, _seed: ended_transfer.result.read_libraries(
                ended_transfer.target, ended_transfer.initiator
            ),
            transfer,
            seed=seed,
        )
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
    """Return the port counters of each rank that replies, by rank number. Each rank is the target of one pair."""
    counters_by_rank = {}
    for transfer in transfers:
        try:
            reply = transfer.target.request("counters", {})
            counters_by_rank[transfer.pair.target] = serialization.from_json_data(PortCounters, reply, where="counters")
        except (StepFailed, UsageError):
            continue  # The next step of this pair reports the failure.
    return counters_by_rank


def _compare_counters(transfers: Sequence[_Transfer], counters_before: Mapping[int, PortCounters]) -> None:
    """Compare the growth of each port's counters with the bytes of its two pairs. Store the result as evidence."""
    bytes_as_target = {transfer.pair.target: transfer.moved_bytes for transfer in transfers}
    bytes_as_initiator = {transfer.pair.initiator: transfer.moved_bytes for transfer in transfers}
    deadline_s = time.monotonic() + COUNTERS_TIMEOUT_S
    while True:
        growth_by_rank: dict[int, PortGrowth] = {
            rank: port_growth(counters_before[rank], counters_after)
            for rank, counters_after in _read_counters(transfers).items()
            if rank in counters_before
        }
        unproven_reason_by_rank = {
            rank: unproven_reason(TransferPath.WIRE, bytes_as_target[rank] + bytes_as_initiator[rank], growth)
            for rank, growth in growth_by_rank.items()
        }
        # Some drivers update their counters late, so the counters are read again until the deadline.
        if "counters_did_not_grow" not in unproven_reason_by_rank.values() or time.monotonic() > deadline_s:
            break
    for transfer in transfers:
        rank_by_role = {"target": transfer.pair.target, "initiator": transfer.pair.initiator}
        transfer.result.evidence["unproven"] = next(
            (
                reason
                for rank in rank_by_role.values()
                if (reason := unproven_reason_by_rank.get(rank, "counters_missing"))
            ),
            "",
        )
        transfer.result.evidence["port_growth"] = serialization.to_json_data(
            {role: growth_by_rank.get(rank) for role, rank in rank_by_role.items()}
        )
        # Each port takes part in two pairs, in one as initiator and in one as target. Each pair moves its bytes in both
        # directions.
        transfer.result.evidence["port_bytes_expected"] = {
            role: bytes_as_target[rank] + bytes_as_initiator[rank] for role, rank in rank_by_role.items()
        }


def _mark_slow_pairs(transfers: Sequence[_Transfer]) -> None:
    rate_by_case_gb_per_s = {
        transfer.result.case: transfer.result.numbers["balance_gb_per_s"]
        for transfer in transfers
        if not transfer.result.failure
    }
    if not rate_by_case_gb_per_s:
        return
    median_gb_per_s = statistics.median(rate_by_case_gb_per_s.values())
    for transfer in transfers:
        rate_gb_per_s = rate_by_case_gb_per_s.get(transfer.result.case, median_gb_per_s)
        if rate_gb_per_s < _SLOW_RATIO * median_gb_per_s:
            pair, percent = transfer.pair, 100 * rate_gb_per_s / median_gb_per_s
            initiator_host, target_host = transfer.initiator.rank_facts.host_name, transfer.target.rank_facts.host_name
            transfer.result.unproven = (
                f"slow pair: rank {pair.initiator} ({initiator_host}, {pair.initiator_nic}) and rank {pair.target} "
                f"({target_host}, {pair.target_nic}) moved {rate_gb_per_s:.3g} GB/s, "
                f"{percent:.0f} % of the median of this round"
            )
