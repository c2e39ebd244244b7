"""The plan of rank 0: which NIC of which rank accesses which GPU of which rank.

The module performs no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import Facts

__all__ = ["Pair", "RankFacts", "pair_name", "plan_pairs"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts of the machine of a rank.

    Attributes
    ----------
    rank : int
        Number of the rank.
    host : str
        Identity of its machine, which all ranks of one machine share: host name, boot id, network namespace.
    facts : Facts
        The facts of that machine.
    """

    rank: int
    host: str
    facts: Facts

    @property
    def host_name(self) -> str:
        """Host name of its machine, the first word of `host`."""
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
    """The devices of a measurement: the NIC of the initiator, and the NIC and the GPU of the target.

    `initiator` and `target` are numbers of ranks, and `device` is the index of a CUDA device.
    """

    initiator: int
    initiator_nic: str
    target: int
    target_nic: str
    device: int


def pair_name(pair: Pair) -> str:
    """Return the case id of a pair in records."""
    target = f"rank{pair.target}-{pair.target_nic}-gpu{pair.device}"
    return f"pairs/rank{pair.initiator}-{pair.initiator_nic}-to-{target}"


def plan_pairs(ranks: Sequence[RankFacts], *, within_hosts: bool) -> tuple[Pair, ...]:
    """Return one pair for each combination of a GPU and a NIC of each machine.

    The GPUs of a machine are divided among its ranks. The initiator is the next rank on another machine, with the NIC
    at the same position in its list (a rail). If there is only one machine, or with `within_hosts`, it is the next rank
    on the same machine.
    """
    has_several_hosts = len({each.host for each in ranks}) > 1
    planned = []
    for target in ranks:
        same_host = [each for each in ranks if each.host == target.host]
        initiators = [
            each
            for each in ranks
            if each.nics
            and each.rank != target.rank
            and (each.host == target.host) == (within_hosts or not has_several_hosts)
        ]
        for device in target.devices[same_host.index(target) :: len(same_host)]:
            for position, nic in enumerate(target.nics):
                if not initiators:
                    continue
                # The next rank in cyclic order.
                initiator = min(initiators, key=lambda each: (each.rank - target.rank) % (ranks[-1].rank + 1))
                initiator_nic = initiator.nics[position % len(initiator.nics)]
                planned.append(Pair(initiator.rank, initiator_nic, target.rank, nic, device))
    return tuple(planned)
