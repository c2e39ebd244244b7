"""A peer process writes to memory and reads from it by RDMA, and every byte is checked on both sides.

This process allocates and registers the memory. It reads device memory with a copy call of the CUDA driver. The peer
is a spawned process that has only an address and a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import LENGTHS_AND_OFFSETS, MEMORY_KINDS, connect_peer_queue_pair

from gdrkit import pattern
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.memory_kinds import RdmaMemoryKind

    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = pytest.mark.qualify

# Number of bytes after the written range, which must not change.
MARGIN_BYTES = 4096
# Software RDMA in the kernel may take longer than 10 s for 64 MiB on a shared virtual processor.
TIMEOUT_MS = 60_000.0


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), LENGTHS_AND_OFFSETS)
def test_remote_write_arrives_in_memory(
    nic: Nic,
    peer: Peer,
    evidence: Evidence,
    seed: int,
    memory_kind: RdmaMemoryKind,
    length_bytes: int,
    offset_bytes: int,
) -> None:
    memory_bytes = offset_bytes + length_bytes + MARGIN_BYTES
    with memory_kind.memory(length_bytes=memory_bytes) as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        remote_range = memory.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
        peer_pair.write(remote_range, seed=seed, timeout_ms=TIMEOUT_MS).expect(Status.SUCCESS)
        data = memory.read()
    pattern.check(memoryview(data)[offset_bytes : offset_bytes + length_bytes], seed=seed)
    # All bytes before the range and after it still have the value with which RdmaMemoryKind.memory() filled the memory.
    assert data[:offset_bytes] == b"\xa5" * offset_bytes
    assert data[offset_bytes + length_bytes :] == b"\xa5" * MARGIN_BYTES
    memory_kind.record_route(evidence)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), LENGTHS_AND_OFFSETS)
def test_remote_read_returns_memory(
    nic: Nic,
    peer: Peer,
    evidence: Evidence,
    seed: int,
    memory_kind: RdmaMemoryKind,
    length_bytes: int,
    offset_bytes: int,
) -> None:
    memory_bytes = offset_bytes + length_bytes
    with memory_kind.memory(length_bytes=memory_bytes) as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        memory.write(pattern.payload(length_bytes, seed=seed), offset_bytes=offset_bytes)
        remote_range = memory.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
        # The peer compares the received bytes with the pattern of the seed.
        peer_pair.read(remote_range, seed=seed, timeout_ms=TIMEOUT_MS).completion.expect(Status.SUCCESS)
    memory_kind.record_route(evidence)
