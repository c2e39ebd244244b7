"""The plan of the measurements between ranks: which NIC of which rank accesses which GPU of which other rank.

A measurement is a pair: the target has GPU memory that its NIC has registered, and the initiator is another rank whose
NIC accesses this memory. The module performs no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import Facts

__all__ = ["Pair", "RankFacts", "Round", "pair_name", "plan_pairs", "plan_rounds"]

# With fewer hosts, the rate of a pair could not be compared with the rates of other pairs.
_BALANCE_HOSTS_MIN = 3


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank and the facts about its machine.

    Attributes
    ----------
    rank : int
        Number of the rank.
    host : str
        Identity of the machine of the rank: host name, boot id and network namespace. All ranks of a machine have the
        same identity.
    facts : Facts
        The facts about the machine.
    """

    rank: int
    host: str
    facts: Facts

    @property
    def host_name(self) -> str:
        """Host name of the machine, which is the first word of `host`."""
        return self.host.partition(" ")[0]

    @property
    def nics(self) -> tuple[str, ...]:
        """Names of the NICs with an active port."""
        return tuple(nic.name for nic in self.facts.verbs.nics if nic.active_ports) if self.facts.verbs else ()

    @property
    def devices(self) -> tuple[int, ...]:
        """Indices of the CUDA devices."""
        return tuple(device.index for device in self.facts.cuda.devices) if self.facts.cuda else ()


@dataclass(frozen=True, slots=True)
class Pair:
    """The NICs and the GPU of one measurement. The NIC of the initiator accesses GPU memory of the target.

    `initiator` and `target` are rank numbers, and `device` is the index of a CUDA device of the target.
    """

    initiator: int
    initiator_nic: str
    target: int
    target_nic: str
    device: int


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs that transfer at the same time. Each rank is the initiator of one pair and the target of another."""

    name: str
    pairs: tuple[Pair, ...]


def pair_name(pair: Pair, group: str = "pairs") -> str:
    """Return the case id of a pair, as in records. `group` is the beginning of the id, before the last slash."""
    target = f"rank{pair.target}-{pair.target_nic}-gpu{pair.device}"
    return f"{group}/rank{pair.initiator}-{pair.initiator_nic}-to-{target}"


def plan_pairs(ranks: Sequence[RankFacts], *, within_hosts: bool) -> tuple[Pair, ...]:
    """Return one pair for each combination of a GPU and a NIC of the same machine. The combination is the target.

    The GPUs of a machine are divided among its ranks. The initiator is the next rank on another machine. With a single
    machine, or with `within_hosts`, the initiator is the next rank on the same machine. The NICs of initiator and
    target have the same index in the lists of NICs, because such NICs are usually on the same network (a rail).
    """
    has_several_hosts = len({rank_facts.host for rank_facts in ranks}) > 1
    pairs = []
    for target in ranks:
        ranks_on_host = [candidate for candidate in ranks if candidate.host == target.host]
        initiators = [
            candidate
            for candidate in ranks
            if candidate.nics
            and candidate.rank != target.rank
            and (candidate.host == target.host) == (within_hosts or not has_several_hosts)
        ]
        for device in target.devices[ranks_on_host.index(target) :: len(ranks_on_host)]:
            for nic_index, nic in enumerate(target.nics):
                if not initiators:
                    continue
                # Choose the next rank in cyclic order. `ranks` is sorted by rank number.
                initiator = min(initiators, key=lambda candidate: (candidate.rank - target.rank) % (ranks[-1].rank + 1))
                initiator_nic = initiator.nics[nic_index % len(initiator.nics)]
                pairs.append(Pair(initiator.rank, initiator_nic, target.rank, nic, device))
    return tuple(pairs)


def plan_rounds(ranks: Sequence[RankFacts]) -> tuple[Round, ...]:
    """Return the rounds of a balance between hosts: for each rail, a ring and a permutation.

    A rail is the network of the NICs with the same index on each host. In the ring, each host is the initiator to the
    next host; in the permutation, to the host half a ring away. On each host, the first rank with a GPU and a NIC takes
    part. The result is empty for fewer than three such hosts.
    """
    first_ranks: dict[str, RankFacts] = {}
    for candidate in ranks:
        if candidate.nics and candidate.devices:
            first_ranks.setdefault(candidate.host, candidate)
    participants = tuple(first_ranks.values())
    if len(participants) < _BALANCE_HOSTS_MIN:
        return ()
    shift_by_round_name = {"ring": 1, "permutation": (len(participants) + 1) // 2}
    return tuple(
        Round(
            f"{name}-rail{rail}",
            tuple(
                _make_pair_on_rail(participant, participants[(position + shift) % len(participants)], rail)
                for position, participant in enumerate(participants)
            ),
        )
        for rail in range(min(len(participant.nics) for participant in participants))
        for name, shift in shift_by_round_name.items()
    )


def _make_pair_on_rail(initiator: RankFacts, target: RankFacts, rail: int) -> Pair:
    device = target.devices[rail % len(target.devices)]
    return Pair(initiator.rank, initiator.nics[rail], target.rank, target.nics[rail], device)
