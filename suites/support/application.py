"""An application of usrbio, with memory of one kind and rings for both directions.

``python -m support.application MOUNT FILE ...`` runs one in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gdrkit import cuda, pattern, usrbio
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from gdrkit.usrbio.native_types import Ioring, Iovec

__all__ = ["KINDS", "Application", "Transfer"]

KINDS = ("host", "device")
_TIMEOUT = timedelta(seconds=120)
# The memory is filled and checked in parts of this size.
_PART_BYTES = 16 * MIB

# File descriptor, offset in the memory, offset in the file, length.
Transfer = tuple[int, int, int, int]


class Application:
    """Memory and rings that are published to an agent. Use it as a context manager.

    Parameters
    ----------
    mount : Path
        Mount of the agent.
    kind : str
        Kind of the memory, ``host`` or ``device``.
    length_bytes : int
        Length of the memory.
    entries : int
        Number of entries of each ring.
    rings : int
        Number of rings for each direction.
    """

    def __init__(self, mount: Path | str, *, kind: str, length_bytes: int, entries: int = 64, rings: int = 1) -> None:
        self.length_bytes = length_bytes
        self.memory: cuda.DeviceMemory | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            if kind == "device":
                self.memory = undo.enter_context(cuda.Device(0)).allocate(length_bytes)
                undo.callback(self.memory.close)
                self.iov: Iovec = undo.enter_context(usrbio.make_gpu_iovec(str(mount), self.memory))
            else:
                self.iov = undo.enter_context(usrbio.create_iovec(str(mount), length_bytes=length_bytes))
            self.readers: list[Ioring] = []
            self.writers: list[Ioring] = []
            for _ in range(rings):
                for group, for_read in ((self.readers, True), (self.writers, False)):
                    group.append(undo.enter_context(usrbio.make_ioring(str(mount), entries, for_read=for_read)))
            self._stack = undo.pop_all()

    def peek(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return bytes of the memory. The driver copies those of device memory."""
        if self.memory is not None:
            return self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        return bytes(memoryview(self.iov)[offset_bytes : offset_bytes + length_bytes])

    def poke(self, offset_bytes: int, data: bytes) -> None:
        """Change bytes of the memory. The driver copies those of device memory."""
        if self.memory is not None:
            self.memory.write(data, offset_bytes=offset_bytes)
        else:
            memoryview(self.iov)[offset_bytes : offset_bytes + len(data)] = data

    def fill(self, byte: int) -> None:
        """Set every byte of the memory to this value."""
        for begin in range(0, self.length_bytes, _PART_BYTES):
            self.poke(begin, bytes([byte]) * min(_PART_BYTES, self.length_bytes - begin))

    def check(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Raise an error unless the memory has the bytes of the pattern at this offset of the file."""
        for begin in range(0, length_bytes, _PART_BYTES):
            part = min(_PART_BYTES, length_bytes - begin)
            pattern.check(self.peek(offset_bytes + begin, part), seed=seed, offset_bytes=file_offset + begin)

    def write_pattern(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Copy the bytes of the pattern at this offset of the file into the memory."""
        for begin in range(0, length_bytes, _PART_BYTES):
            part = min(_PART_BYTES, length_bytes - begin)
            self.poke(offset_bytes + begin, pattern.payload(part, seed=seed, offset_bytes=file_offset + begin))

    def read(self, *transfers: Transfer, ring: int = 0) -> list[int]:
        """Read parts of files into the memory, and return the result of each read in the given order."""
        return self._transfer(self.readers[ring], transfers, is_read=True)

    def write(self, *transfers: Transfer, ring: int = 0) -> list[int]:
        """Write parts of the memory into files, and return the result of each write in the given order."""
        return self._transfer(self.writers[ring], transfers, is_read=False)

    def _transfer(self, ring: Ioring, transfers: Sequence[Transfer], *, is_read: bool) -> list[int]:
        results: dict[int, int] = {}
        for begin in range(0, len(transfers), ring.entries):
            batch = range(begin, min(begin + ring.entries, len(transfers)))
            for number in batch:
                fd, offset, file_offset, length = transfers[number]
                ring.prepare(self.iov[offset : offset + length], is_read, fd, file_offset, userdata=number)
            done = ring.submit().wait(min_results=len(batch), timeout=_TIMEOUT)
            results.update((int(str(each.userdata)), each.result) for each in done)
        return [results[number] for number in range(len(transfers))]

    def close(self) -> None:
        """Close the rings and the memory."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount")
    parser.add_argument("file", help="file with the pattern of --seed, which is read")
    parser.add_argument("copy", help="file to which the data is written and from which it is read again")
    parser.add_argument("--kind", choices=KINDS, default="host")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    size, transferred_bytes = Path(options.file).stat().st_size, 0
    with contextlib.ExitStack() as stack:
        application = stack.enter_context(Application(options.mount, kind=options.kind, length_bytes=4 * MIB))
        source, copy = os.open(options.file, os.O_RDONLY), os.open(options.copy, os.O_RDWR | os.O_CREAT, 0o600)
        for fd in (source, copy):
            stack.callback(os.close, fd)
            usrbio.register_fd(fd)
            stack.callback(usrbio.deregister_fd, fd)
        for _ in range(options.rounds):
            lengths = [chance.randint(1, 64 * KIB) for _ in range(32)]
            offsets = [(number * 64 * KIB, chance.randrange(size - 64 * KIB)) for number in range(32)]
            parts = [(*each, length) for each, length in zip(offsets, lengths, strict=True)]
            for fd, writes_first in ((source, False), (copy, True)):
                if writes_first:
                    assert application.write(*((fd, *part) for part in parts)) == lengths, "a short write"
                    application.fill(0)
                assert application.read(*((fd, *part) for part in parts)) == lengths, "a short read"
                transferred_bytes += sum(lengths) * (1 + writes_first)
                for offset, file_offset, length in parts:
                    application.check(offset, length, seed=options.seed, file_offset=file_offset)
    sys.stdout.write(json.dumps({"bytes": transferred_bytes, "pid": os.getpid()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
