"""A native initiator, connected to passive queue pairs of this process on the same NIC."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.verbs import Initiator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

__all__ = ["initiating"]


@contextlib.contextmanager
def initiating(nic: Nic, *, memory_bytes: int, queue_pairs: int = 1, depth_max: int = 128) -> Iterator[Initiator]:
    """Yield an initiator whose queue pairs are connected to passive ones of the NIC."""
    with (
        nic.completion_queue(depth=16) as queue,
        contextlib.ExitStack() as pairs,
        Initiator(nic.name, memory_bytes=memory_bytes, queue_pairs=queue_pairs, depth_max=depth_max) as initiator,
    ):
        passive = [pairs.enter_context(nic.queue_pair(queue)) for _ in range(queue_pairs)]
        for mine, theirs in zip(passive, initiator.endpoints(), strict=True):
            mine.connect(theirs, reads_max=initiator.reads_max)
        initiator.connect([mine.endpoint() for mine in passive], reads_max=initiator.reads_max)
        yield initiator
