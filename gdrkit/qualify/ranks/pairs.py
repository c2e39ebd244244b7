"""The plan of rank 0: which NIC of which rank accesses which GPU of which rank.

The module is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import Facts

__all__ = ["Pair", "RankFacts", "name_of", "plan_pairs"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank that has reported.

    Attributes
    ----------
    rank : int
        Number of the rank.
    host : str
        Identity of its machine, the same for all ranks of one machine.
    facts : Facts
        The facts of that machine.
    """

    rank: int
    host: str
    facts: Facts

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
    """A measurement: the NIC of an initiator, and a GPU and the NIC of a target."""

    initiator: int
    initiator_nic: str
    target: int
    target_nic: str
    device: int


def name_of(pair: Pair) -> str:
    """Return the name of a pair in records."""
    there = f"rank{pair.target}-{pair.target_nic}-gpu{pair.device}"
    return f"pairs/rank{pair.initiator}-{pair.initiator_nic}-to-{there}"


def plan_pairs(ranks: Sequence[RankFacts], *, within_hosts: bool) -> tuple[Pair, ...]:
    """Return every combination of GPU and NIC of every machine, each once.

    The ranks of a machine share its GPUs. The initiator is the next rank of another machine, with the NIC at the same
    position in the list (a rail). If there is only one machine, or with `within_hosts`, it is the next rank of the same
    machine.
    """
    several = len({each.host for each in ranks}) > 1
    planned = []
    for target in ranks:
        mates = [each for each in ranks if each.host == target.host]
        wanted = [
            each
            for each in ranks
            if each.nics and each.rank != target.rank and (each.host == target.host) == (within_hosts or not several)
        ]
        for device in target.devices[mates.index(target) :: len(mates)]:
            for place, nic in enumerate(target.nics):
                if not wanted:
                    continue
                # This is the next rank in cyclic order.
                initiator = min(wanted, key=lambda each: (each.rank - target.rank) % (ranks[-1].rank + 1))
                theirs = initiator.nics[place % len(initiator.nics)]
                planned.append(Pair(initiator.rank, theirs, target.rank, nic, device))
    return tuple(planned)
