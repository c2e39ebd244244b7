"""A storage client in its own process, which a defect may kill: ``python storage_client.py``.

The program reads one operation as JSON from standard input and prints the result as JSON. The data is that of
:mod:`gdrkit.pattern`. Only copies of the device read or write the device memory.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from gdrkit import cuda, pattern
from gdrkit.storage.client import StorageClient

__all__ = ["main"]

_CANARY = 0xA5


def main(operation: dict[str, Any]) -> dict[str, Any]:
    """Read a file into device memory, or write device memory into a file; return what was transferred."""
    # The case expects that a defect kills this process, and needs no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seed, length_bytes, offset_bytes = operation["seed"], operation["length_bytes"], operation["offset_bytes"]
    with (
        cuda.Device(operation["device"]).allocate(length_bytes) as memory,
        StorageClient(operation["address"], token=operation["token"]) as client,
        client.register(memory) as buffer,
    ):
        if operation["operation"] == "write":
            memory.write(pattern.payload(length_bytes, seed=seed, offset_bytes=offset_bytes))
            with client.open(operation["path"], read=False, write=True, create=True) as file:
                result = file.write(buffer, offset_bytes=offset_bytes)
        else:
            memory.fill(_CANARY)
            with client.open(operation["path"]) as file:
                result = file.read(buffer, offset_bytes=offset_bytes)
        contents = memory.read(length_bytes=length_bytes)
    # A short read leaves the rest of the memory unchanged.
    expected = bytearray(pattern.payload(result.length_bytes, seed=seed, offset_bytes=offset_bytes))
    for begin, end in operation.get("holes", ()):
        expected[begin - offset_bytes : end - offset_bytes] = bytes(end - begin)
    expected += bytes([_CANARY]) * (length_bytes - result.length_bytes)
    return {
        "length_bytes": result.length_bytes,
        "hole_bytes": result.hole_bytes,
        "checksums": result.checksums,
        "is_expected": contents == bytes(expected),
    }


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
