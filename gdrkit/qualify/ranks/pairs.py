"""Which NIC of which rank reaches which GPU of which rank: the plan of rank 0.

Level 6, pure.
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
        Its number.
    host : str
        Its machine; ranks of one machine have the same.
    facts : Facts
        Of that machine.
    """

    rank: int
    host: str
    facts: Facts

    @property
    def nics(self) -> tuple[str, ...]:
        """Those with an active port, by name."""
        return tuple(nic.name for nic in self.facts.verbs.nics if nic.active_ports) if self.facts.verbs else ()

    @property
    def devices(self) -> tuple[int, ...]:
        """CUDA devices, by number."""
        return tuple(device.index for device in self.facts.cuda.devices) if self.facts.cuda else ()


@dataclass(frozen=True, slots=True)
class Pair:
    """One measurement: the NIC of an initiator, and a GPU behind a NIC of a target."""

    initiator: int
    initiator_nic: str
    target: int
    target_nic: str
    device: int


def name_of(pair: Pair) -> str:
    """As its record names it."""
    there = f"rank{pair.target}-{pair.target_nic}-gpu{pair.device}"
    return f"pairs/rank{pair.initiator}-{pair.initiator_nic}-to-{there}"


def plan_pairs(ranks: Sequence[RankFacts], *, within_hosts: bool) -> tuple[Pair, ...]:
    """Every GPU behind every NIC of every machine, each once.

    The ranks of a machine share its GPUs. The initiator is the next rank of another machine, by the NIC of the same
    place in the list (a rail); where there is one machine, or with `within_hosts`, the next rank of the same one.
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
                # The next after this rank, and then around.
                initiator = min(wanted, key=lambda each: (each.rank - target.rank) % (ranks[-1].rank + 1))
                theirs = initiator.nics[place % len(initiator.nics)]
                planned.append(Pair(initiator.rank, theirs, target.rank, nic, device))
    return tuple(planned)
