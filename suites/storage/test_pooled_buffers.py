"""Buffers that the storage client allocates: their memory and registrations are used again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.storage import MEMORY_KINDS

from gdrkit.errors import Reason, UsageError
from gdrkit.host import HostAllocator
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from support.storage import StorageMemoryKind, StorageServer

    from gdrkit.storage.client import StorageClient


@pytest.mark.parametrize("memory", MEMORY_KINDS, indirect=True)
def test_buffers_of_similar_sizes_are_registered_once(
    server: StorageServer, client: StorageClient, memory: StorageMemoryKind
) -> None:
    data = os.urandom(MIB)
    (server.root / "file").write_bytes(data)
    allocator = memory.device or HostAllocator()
    with client.open("file") as file:
        for length_bytes in (MIB, 600 * KIB, MIB - 1, 700_001):
            with client.allocate(allocator, length_bytes) as buffer:
                assert buffer.length_bytes == length_bytes
                assert file.read(buffer, offset_bytes=0).length_bytes == length_bytes
                assert buffer.copy_out() == data[:length_bytes]
    statistics = client.pool_statistics()[allocator]
    # The pool rounds each of the four lengths up to 1 MiB, so all transfers use one buffer.
    assert (statistics.hits, statistics.misses, statistics.idle_bytes) == (3, 1, MIB)
    (cache,) = client._caches.values()  # noqa: SLF001 - the cache is not public.
    assert cache.statistics().registrations == 1


def test_client_with_an_open_pooled_buffer_stays_open(client: StorageClient) -> None:
    with client.allocate(HostAllocator(), 4096):
        with pytest.raises(UsageError) as error_info:
            client.close()
        assert error_info.value.reason is Reason.BUSY
    client.close()
