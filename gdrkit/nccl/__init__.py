"""NCCL with memory of gdrkit: communicators, registration, memory that NCCL allocates, and evidence from NCCL's log.

The import of this package loads no library; the first call of a function does. Only ``_nccl.py`` calls libnccl.

Example::

    from gdrkit import cuda, nccl

    # Each rank is a process. Rank 0 calls nccl.create_unique_id() and sends the result to the others.
    with (
        cuda.Device(0) as device,
        cuda.VmmMemory.create(device, 1 << 28) as memory,
        device.stream() as stream,
        nccl.Communicator(device, rank=rank, ranks_count=2, unique_id=unique_id) as communicator,
        communicator.register(memory),
    ):
        communicator.all_reduce(memory, memory, stream=stream)
        stream.synchronize()
"""

from __future__ import annotations

from gdrkit.nccl._nccl import get_version_code
from gdrkit.nccl.communicator import (
    Communicator,
    DataType,
    DeviceStream,
    NcclRegistration,
    ReduceOperation,
    ReducibleMemory,
    create_unique_id,
)
from gdrkit.nccl.log import NcclLog, log_environment
from gdrkit.nccl.memory import NcclMemory

__all__ = [
    "Communicator",
    "DataType",
    "DeviceStream",
    "NcclLog",
    "NcclMemory",
    "NcclRegistration",
    "ReduceOperation",
    "ReducibleMemory",
    "create_unique_id",
    "library_version",
    "log_environment",
]


def library_version() -> tuple[int, int, int]:
    """Return the version of NCCL as three numbers, e.g. ``(2, 28, 9)``.

    Raises
    ------
    SetupMissing
        NCCL is missing.
    """
    version_code = get_version_code()  # NCCL returns 22809 for version 2.28.9.
    return version_code // 10_000, version_code // 100 % 100, version_code % 100
