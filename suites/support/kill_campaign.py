"""Base class of kill campaigns: cases that kill a process many times, in each phase of its work.

:mod:`support.tier_campaign` and :mod:`fault.kill_campaign` implement it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

__all__ = ["KillCampaign"]

PhaseT = TypeVar("PhaseT")


class KillCampaign(abc.ABC, Generic[PhaseT]):
    """A campaign that kills a process in every phase, equally often and in random order.

    Attributes
    ----------
    kill_counts : dict of phase to int
        Number of kills in each phase.
    """

    def __init__(self, phases: Sequence[PhaseT], rng: Random) -> None:
        self.kill_counts = dict.fromkeys(phases, 0)
        self._rng = rng

    def run(self, kill_count: int) -> None:
        """Kill this number of processes."""
        while (kills_left := kill_count - sum(self.kill_counts.values())) > 0:
            for phase in self._rng.sample(list(self.kill_counts), len(self.kill_counts))[:kills_left]:
                try:
                    self.kill(phase)
                except AssertionError as error:
                    error.add_note(f"killed in {phase}; kills before: {self.kill_counts}")
                    raise
                self.kill_counts[phase] += 1

    @abc.abstractmethod
    def kill(self, phase: PhaseT) -> None:
        """Kill a process in this phase, and check what must hold afterwards."""
