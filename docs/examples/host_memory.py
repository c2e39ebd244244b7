"""Host memory for RDMA, with the same rules, keys and leases as GPU memory."""

from __future__ import annotations

import os

from gdrkit import host, verbs
from gdrkit.registration import BufferPool, RegionCache

nics = verbs.open_active_nics()
with host.HostMemory(1 << 20) as memory, RegionCache(nics) as cache:
    memory.write(b"hello")
    with cache.lease(memory) as lease:
        assert lease.remote(nics[0]).length_bytes == 1 << 20

with BufferPool(host.HostAllocator(), nics, buffer_bytes=4096, count=2) as pool, pool.allocate() as buffer:
    buffer.write(b"pooled")
    assert buffer.read(length_bytes=6) == b"pooled"

# MappedFile maps a file into memory, for example a memfd (memfd_create(2)) that another process shares.
memfd = os.memfd_create("shared")
os.truncate(memfd, 8192)
with host.MappedFile(memfd, length_bytes=8192) as mapped_memory:
    mapped_memory.fill(0x5A)
    assert os.pread(memfd, 2, 100) == b"\x5a\x5a"
os.close(memfd)
for nic in nics:
    nic.close()
