"""An application of usrbio: memory of one kind, offered to an agent, and a ring for each direction.

``python -m support.application MOUNT FILE ...`` is one in a process of its own.
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
_CHECKED_BYTES = 16 * MIB  # At a time.

# File descriptor, where in the memory, where in the file, how much.
Transfer = tuple[int, int, int, int]


class Application:
    """Memory and rings at an agent; use it as a context manager.

    Parameters
    ----------
    mount : Path
        Of the agent.
    kind : str
        ``host`` or ``device``: where the memory is.
    length_bytes : int
        Its size.
    entries : int
        Of each ring.
    rings : int
        How many rings for each direction.
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
            made: list[list[Ioring]] = [[], []]
            for into in made * rings:
                into.append(undo.enter_context(usrbio.make_ioring(str(mount), entries, for_read=into is made[0])))
            self.readers, self.writers = made
            self._stack = undo.pop_all()

    def peek(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Bytes of the memory, as its owner sees them: device memory by the driver's own copy."""
        if self.memory is not None:
            return self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        return bytes(memoryview(self.iov)[offset_bytes : offset_bytes + length_bytes])

    def poke(self, offset_bytes: int, data: bytes) -> None:
        """Change bytes of the memory, as its owner."""
        if self.memory is not None:
            self.memory.write(data, offset_bytes=offset_bytes)
        else:
            memoryview(self.iov)[offset_bytes : offset_bytes + len(data)] = data

    def fill(self, byte: int) -> None:
        """Make every byte this one."""
        for at in range(0, self.length_bytes, _CHECKED_BYTES):
            self.poke(at, bytes([byte]) * min(_CHECKED_BYTES, self.length_bytes - at))

    def check(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Raise unless these bytes are those of the pattern at the place in the file."""
        for at in range(0, length_bytes, _CHECKED_BYTES):
            part = min(_CHECKED_BYTES, length_bytes - at)
            pattern.check(self.peek(offset_bytes + at, part), seed=seed, offset_bytes=file_offset + at)

    def write_pattern(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Put bytes of the pattern of a place in the file there."""
        for at in range(0, length_bytes, _CHECKED_BYTES):
            part = min(_CHECKED_BYTES, length_bytes - at)
            self.poke(offset_bytes + at, pattern.payload(part, seed=seed, offset_bytes=file_offset + at))

    def read(self, *transfers: Transfer, ring: int = 0) -> list[int]:
        """Have these parts of files brought into the memory; what each completion said, in the order of the request."""
        return self._move(self.readers[ring], transfers, is_read=True)

    def write(self, *transfers: Transfer, ring: int = 0) -> list[int]:
        """The other way round."""
        return self._move(self.writers[ring], transfers, is_read=False)

    def _move(self, ring: Ioring, transfers: Sequence[Transfer], *, is_read: bool) -> list[int]:
        results: dict[int, int] = {}
        for begin in range(0, len(transfers), ring.entries):
            batch = range(begin, min(begin + ring.entries, len(transfers)))
            for number in batch:
                fd, at, file_offset, length = transfers[number]
                ring.prepare(self.iov[at : at + length], is_read, fd, file_offset, userdata=number)
            done = ring.submit().wait(min_results=len(batch), timeout=_TIMEOUT)
            results.update((int(str(each.userdata)), each.result) for each in done)
        return [results[number] for number in range(len(transfers))]

    def close(self) -> None:
        """Take everything back."""
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
    parser.add_argument("file", help="the pattern of --seed; it is read")
    parser.add_argument("copy", help="what was read is written there, then read again")
    parser.add_argument("--kind", choices=KINDS, default="host")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args(arguments)
    chance = random.Random(asked.seed)
    size, moved = Path(asked.file).stat().st_size, 0
    with contextlib.ExitStack() as stack:
        application = stack.enter_context(Application(asked.mount, kind=asked.kind, length_bytes=4 * MIB))
        source, copy = os.open(asked.file, os.O_RDONLY), os.open(asked.copy, os.O_RDWR | os.O_CREAT, 0o600)
        for fd in (source, copy):
            stack.callback(os.close, fd)
            usrbio.register_fd(fd)
            stack.callback(usrbio.deregister_fd, fd)
        for _ in range(asked.rounds):
            lengths = [chance.randint(1, 64 * KIB) for _ in range(32)]
            places = [(number * 64 * KIB, chance.randrange(size - 64 * KIB)) for number in range(32)]
            parts = [(*place, length) for place, length in zip(places, lengths, strict=True)]
            for fd, writes_first in ((source, False), (copy, True)):
                if writes_first:
                    assert application.write(*((fd, *part) for part in parts)) == lengths, "a short write"
                    application.fill(0)
                assert application.read(*((fd, *part) for part in parts)) == lengths, "a short read"
                moved += sum(lengths) * (1 + writes_first)
                for at, file_offset, length in parts:
                    application.check(at, length, seed=asked.seed, file_offset=file_offset)
    sys.stdout.write(json.dumps({"bytes": moved, "pid": os.getpid()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
