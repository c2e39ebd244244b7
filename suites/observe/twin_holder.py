"""Program that holds memory regions and dma-bufs on the twins, for the cases of `gdrkit monitor`.

`python -m observe.twin_holder` prints its process ID. Then it executes the commands on its standard input, and prints
`done` after each: `cycle N` registers and deregisters N times, `hold N` opens N regions and N dma-bufs, and `release`
closes all open regions and dma-bufs. `leak` opens a region and a dma-buf every 0.01 s until the next command. Twins are
libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

from gdrkit import cuda
from gdrkit.units import KIB
from gdrkit.verbs import Nic

__all__ = ["MEMORY_BYTES", "REGION_BYTES"]

# Size of each memory region, and of the device memory from which every dma-buf is exported.
REGION_BYTES = 4 * KIB
MEMORY_BYTES = 64 * KIB


def main() -> None:
    """Execute the commands on standard input."""
    with (
        Nic.open("twin0") as nic,
        cuda.Device(0) as device,
        device.allocate(MEMORY_BYTES) as memory,
        contextlib.ExitStack() as open_objects,
    ):

        def open_regions_and_dmabufs(count: int) -> None:
            for _ in range(count):
                open_objects.enter_context(nic.register_host(bytearray(REGION_BYTES)))
                open_objects.enter_context(memory.export_dmabuf())

        print(os.getpid(), flush=True)  # noqa: T201 - the case reads it.
        while line := sys.stdin.readline().split():
            if line[0] == "cycle":
                for _ in range(int(line[1])):
                    nic.register_host(bytearray(REGION_BYTES)).close()
            elif line[0] == "hold":
                open_regions_and_dmabufs(int(line[1]))
            elif line[0] == "leak":
                while not select.select([sys.stdin], [], [], 0.01)[0]:
                    open_regions_and_dmabufs(1)
            else:
                open_objects.close()
            print("done", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
