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
        with device.query(memory.address) as address_info:
            assert address_info.kind is memory.kind
    # A pool is one allocation. It is exported once, as one dma-buf, with which all its parts are registered.
    with device.pool(1 << 20) as pool, pool.allocate(65536) as part, register(part, [nic]) as registration:
        assert registration.remote(nic).length_bytes == 65536
    # Host memory that the device can access.
    with mmap.mmap(-1, 65536) as buffer, device.map_host(buffer):
        pass
