"""A storage client in a process of its own, which may die: ``python storage_child.py``, with what to do as JSON on
standard input. Prints what became of it as JSON.

The bytes are those of :mod:`gdrkit.pattern`; the process looks at them by the device's own copy calls alone.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

from gdrkit import cuda, pattern
from gdrkit.storage.client import StorageClient

__all__ = ["main"]

_GUARD = 0xA5


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Read a file into device memory, or write it from there."""
    # Whoever started this wants to know of its death, and to keep nothing of it.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seed, length_bytes, offset_bytes = asked["seed"], asked["length_bytes"], asked["offset_bytes"]
    with (
        cuda.Device(asked["device"]).allocate(length_bytes) as memory,
        StorageClient(asked["place"], token=asked["token"]) as client,
        client.register(memory) as buffer,
    ):
        if asked["operation"] == "write":
            memory.write(pattern.payload(length_bytes, seed=seed, offset_bytes=offset_bytes))
            with client.open(asked["path"], read=False, write=True, create=True) as file:
                moved = file.write(buffer, offset_bytes=offset_bytes)
        else:
            memory.fill(_GUARD)
            with client.open(asked["path"]) as file:
                moved = file.read(buffer, offset_bytes=offset_bytes)
        found = memory.read(length_bytes=length_bytes)
    # Only what came, and what lies behind it as it was before.
    moved_bytes = moved.length_bytes
    expected = bytearray(pattern.payload(moved_bytes, seed=seed, offset_bytes=offset_bytes))
    for begin, end in asked.get("holes", ()):
        expected[begin - offset_bytes : end - offset_bytes] = bytes(end - begin)
    rest = bytes([_GUARD]) * (length_bytes - moved_bytes)
    return {
        "length_bytes": moved_bytes,
        "hole_bytes": moved.hole_bytes,
        "checksums": moved.checksums,
        "right": found == bytes(expected) + rest,
    }


if __name__ == "__main__":
    json.dump(main(json.load(sys.stdin)), sys.stdout)
