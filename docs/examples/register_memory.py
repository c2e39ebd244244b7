"""Register GPU memory with NICs: by hand, by a cache, by the manager; pools; the nearest NIC."""

from __future__ import annotations

from gdrkit import cuda, verbs
from gdrkit.registration import (
    BufferPool,
    DmabufMemory,
    GdrManager,
    MemoryPool,
    Ordering,
    Placement,
    RegionCache,
    register,
)

MIB = 1 << 20

# The manager opens all GPUs and NICs, and says what is missing.
with GdrManager() as manager:
    for obstacle in manager.state.obstacles:
        print(obstacle.message, "To do:", obstacle.what_to_do)
    with manager.device(0).allocate(MIB) as memory, manager.lease(memory) as lease:
        nic, remote_range = manager.remote(lease, gpu_index=0)
        print("nearest NIC:", nic.name, "address:", hex(remote_range.address), "rkey:", hex(remote_range.rkey))

nics = verbs.open_active_nics()
with cuda.Device(0) as device:
    with device.allocate(MIB) as memory:
        # register() registers the memory with all NICs. If no route works, the error has the cause for each route.
        with register(memory, nics) as registration:
            print("registered by", registration.route.value, "with", [nic.name for nic in registration.nics])

        # The cache registers whole allocations. A second lease of any part of an allocation is a hit.
        with RegionCache(nics, regions_max=8) as cache:
            with cache.lease(memory) as lease:
                assert lease.remote(nics[0]).length_bytes == MIB
            with cache.lease(memory, offset_bytes=4096, length_bytes=4096):
                pass
            statistics = cache.statistics()
            assert (statistics.registrations, statistics.hits) == (1, 1)

        # Memory of any exporter can be registered by its dma-buf.
        with DmabufMemory(memory.export_dmabuf()) as dmabuf_memory, register(dmabuf_memory, nics) as registration:
            print("a dma-buf of", dmabuf_memory.length_bytes, "bytes is registered by", registration.route.value)

    # BufferPool registers its buffers in advance. MemoryPool keeps freed memory for later allocations.
    with BufferPool(device, nics, buffer_bytes=65536, count=4) as pool, pool.allocate(timeout_ms=1000) as buffer:
        buffer.write(b"ready")
        assert buffer.read(length_bytes=5) == b"ready"
    with MemoryPool(device, idle_bytes_max=4 * MIB) as memory_pool:
        memory_pool.allocate(MIB).close()
        memory_pool.allocate(MIB).close()
        assert memory_pool.statistics().hits == 1

    # Show which NIC is near, and whether the device sees a completed write without a flush.
    placement = Placement()
    print([(nic.name, placement.distance(device.pci_bus_id, nic.name).name) for nic in nics])
    print("flush needed:", Ordering.of(device).needs_flush)
for nic in nics:
    nic.close()
