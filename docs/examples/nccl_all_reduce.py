"""NCCL with memory of gdrkit: an all-reduce with a single rank. Without NCCL, the program says what to install."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from gdrkit import cuda, nccl
from gdrkit.errors import SetupMissing

LENGTH_BYTES = 1 << 20

with tempfile.TemporaryDirectory() as folder:
    log_file = Path(folder) / "nccl.log"
    # NCCL reads these variables at its first call.
    os.environ |= nccl.log_environment(log_file)
    try:
        print("NCCL", *nccl.library_version())
    except SetupMissing as error:
        print(error)
        sys.exit()
    with (
        cuda.Device(0) as device,
        cuda.VmmMemory.create(device, LENGTH_BYTES) as memory,
        nccl.NcclMemory(device, LENGTH_BYTES) as target,
        device.stream() as stream,
        nccl.Communicator(device, rank=0, ranks_count=1, unique_id=nccl.create_unique_id()) as communicator,
        communicator.register(memory),
    ):
        memory.fill(0)
        communicator.all_reduce(memory, target, stream=stream, operation=nccl.ReduceOperation.MAXIMUM)
        stream.synchronize()
        communicator.check()
        print("transports that used the memory:", set(nccl.NcclLog.read(log_file).transports_using(memory)))
