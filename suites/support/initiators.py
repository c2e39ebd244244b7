"""An initiator (the C++ loop that posts RDMA requests) that is connected to queue pairs of the same process."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gdrkit.verbs import Initiator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

__all__ = ["connect_initiator"]


@contextlib.contextmanager
def connect_initiator(
    nic: Nic, *, peer: Nic | None = None, memory_bytes: int, queue_pair_count: int = 1, depth_max: int = 128
) -> Iterator[Initiator]:
    """Yield an initiator of `nic` that is connected to queue pairs of `peer`, by default of `nic`.

    The queue pairs of `peer` post no requests.
    """
    peer = peer or nic
    with (
        peer.completion_queue(depth=16) as completion_queue,
        contextlib.ExitStack() as stack,
        Initiator(nic.name, memory_bytes=memory_bytes, queue_pairs=queue_pair_count, depth_max=depth_max) as initiator,
    ):
        peer_queue_pairs = [stack.enter_context(peer.queue_pair(completion_queue)) for _ in range(queue_pair_count)]
        for peer_queue_pair, endpoint in zip(peer_queue_pairs, initiator.endpoints(), strict=True):
            peer_queue_pair.connect(endpoint, reads_max=initiator.reads_max)
        peer_endpoints = [peer_queue_pair.endpoint() for peer_queue_pair in peer_queue_pairs]
        initiator.connect(peer_endpoints, reads_max=initiator.reads_max)
        yield initiator
