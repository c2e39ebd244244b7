"""Program that makes one transfer of a storage client with device memory: ``python storage_client.py``.

test_storage_review.py runs it as a separate process, because a defect of the client may kill the process. The program
reads the request as JSON from standard input, and prints the result as JSON. The data is a pattern of
:mod:`gdrkit.pattern`. The program itself reads and writes the device memory only by copy calls of the CUDA driver.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from gdrkit import cuda, pattern
from gdrkit.storage.client import StorageClient

__all__ = ["main"]

# Byte that fills the memory before a read.
_CANARY = 0xA5


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Read a file into device memory, or write device memory into a file. Return the result of the transfer."""
    # A defect may kill this process. It then leaves no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seed, length_bytes, offset_bytes = request["seed"], request["length_bytes"], request["offset_bytes"]
    with (
        cuda.Device(request["device"]).allocate(length_bytes) as memory,
        StorageClient(request["address"], token=request["token"]) as client,
        client.register(memory) as buffer,
    ):
        if request["operation"] == "write":
            memory.write(pattern.payload(length_bytes, seed=seed, offset_bytes=offset_bytes))
            with client.open(request["path"], read=False, write=True, create=True) as file:
                result = file.write(buffer, offset_bytes=offset_bytes)
        else:
            memory.fill(_CANARY)
            with client.open(request["path"]) as file:
                result = file.read(buffer, offset_bytes=offset_bytes)
        memory_contents = memory.read(length_bytes=length_bytes)
    # A short read leaves the memory after its data unchanged.
    expected_bytes = bytearray(pattern.payload(result.length_bytes, seed=seed, offset_bytes=offset_bytes))
    # Holes are ranges of file offsets that are read as zeros.
    for begin, end in request.get("holes", ()):
        expected_bytes[begin - offset_bytes : end - offset_bytes] = bytes(end - begin)
    expected_bytes += bytes([_CANARY]) * (length_bytes - result.length_bytes)
    return {
        "length_bytes": result.length_bytes,
        "hole_bytes": result.hole_bytes,
        "checksums": result.checksums,
        "is_data_correct": memory_contents == bytes(expected_bytes),
    }


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
