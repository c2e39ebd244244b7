"""Gaudi devices: memory, a pool, host memory for the device, a query, and registration with a NIC."""

from __future__ import annotations

import mmap

from gdrkit import gaudi, verbs
from gdrkit.registration import register

for info in gaudi.list_devices():
    print(info.number, info.card_name, info.generation.value, info.memory_bytes >> 30, "GiB")
print(gaudi.device_count(), "device(s)")

(nic,) = verbs.open_active_nics(count_max=1)
with nic, gaudi.Device(0) as device:
    with device.allocate(1 << 20) as memory:
        memory.write(b"hello")
        assert memory.read(length_bytes=5) == b"hello"
        with register(memory, [nic]) as registration:
            print("registered by", registration.route.value)
        with device.query(memory.address) as queried_memory:
            assert queried_memory.kind is memory.kind
    # A pool is one allocation, exported once as a dma-buf. All memory of the pool is registered by this dma-buf.
    with (
        device.pool(1 << 20) as pool,
        pool.allocate(65536) as pooled_memory,
        register(pooled_memory, [nic]) as registration,
    ):
        assert registration.remote(nic).length_bytes == 65536
    # map_host() lets the device access host memory.
    with mmap.mmap(-1, 65536) as buffer, device.map_host(buffer):
        pass
