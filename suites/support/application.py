"""A usrbio application for cases: host or device memory that is published to an agent, with rings to read and write.

usrbio is the user-space I/O of 3FS, and the agent is the process that serves its applications. A case creates an
:class:`Application` in its process. ``python -m support.application MOUNT FILE COPY`` runs an application in a new
process: it copies random parts of FILE to COPY, reads these parts of COPY, and checks all bytes.
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

__all__ = ["MEMORY_KINDS", "Application", "Transfer"]

MEMORY_KINDS = ("host", "device")
_BATCH_TIMEOUT = timedelta(seconds=120)
# The memory is filled and checked in chunks of this length.
_CHUNK_BYTES = 16 * MIB

# A transfer has a file descriptor, an offset in the memory, an offset in the file, and a length in bytes.
Transfer = tuple[int, int, int, int]


class Application:
    """An application with memory and rings that are published to an agent. Use it as a context manager.

    Parameters
    ----------
    mount : Path
        Mount point of the agent.
    memory_kind : str
        Kind of the memory: ``host`` or ``device``.
    length_bytes : int
        Length of the memory.
    entries : int
        Number of entries of each ring.
    ring_count : int
        Number of rings for each direction.
    """

    def __init__(
        self, mount: Path | str, *, memory_kind: str, length_bytes: int, entries: int = 64, ring_count: int = 1
    ) -> None:
        self.length_bytes = length_bytes
        self.memory: cuda.DeviceMemory | None = None
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as cleanup_stack:
            if memory_kind == "device":
                self.memory = cleanup_stack.enter_context(cuda.Device(0)).allocate(length_bytes)
                cleanup_stack.callback(self.memory.close)
                self.iov: Iovec = cleanup_stack.enter_context(usrbio.make_gpu_iovec(str(mount), self.memory))
            else:
                cleanup_stack.callback(_free_idle_memory)
                self.iov = cleanup_stack.enter_context(usrbio.create_iovec(str(mount), length_bytes=length_bytes))
            self.read_rings: list[Ioring] = []
            self.write_rings: list[Ioring] = []
            for _ in range(ring_count):
                for rings, for_read in ((self.read_rings, True), (self.write_rings, False)):
                    rings.append(
                        cleanup_stack.enter_context(usrbio.make_ioring(str(mount), entries, for_read=for_read))
                    )
            self._stack = cleanup_stack.pop_all()

    def read_memory(self, offset_bytes: int, length_bytes: int) -> bytes:
        """Return bytes of the memory. The CUDA driver copies the bytes of device memory."""
        if self.memory is not None:
            return self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        return bytes(memoryview(self.iov)[offset_bytes : offset_bytes + length_bytes])

    def write_memory(self, offset_bytes: int, data: bytes) -> None:
        """Write bytes to the memory. The CUDA driver copies the bytes to device memory."""
        if self.memory is not None:
            self.memory.write(data, offset_bytes=offset_bytes)
        else:
            memoryview(self.iov)[offset_bytes : offset_bytes + len(data)] = data

    def fill(self, byte_value: int) -> None:
        """Set every byte of the memory to this value."""
        for chunk_begin in range(0, self.length_bytes, _CHUNK_BYTES):
            self.write_memory(chunk_begin, bytes([byte_value]) * min(_CHUNK_BYTES, self.length_bytes - chunk_begin))

    def check(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Require that the memory holds the pattern of `seed`, from offset `file_offset` of the pattern on."""
        for chunk_begin in range(0, length_bytes, _CHUNK_BYTES):
            chunk_bytes = min(_CHUNK_BYTES, length_bytes - chunk_begin)
            pattern.check(
                self.read_memory(offset_bytes + chunk_begin, chunk_bytes),
                seed=seed,
                offset_bytes=file_offset + chunk_begin,
            )

    def write_pattern(self, offset_bytes: int, length_bytes: int, *, seed: int, file_offset: int) -> None:
        """Write the pattern of `seed`, from offset `file_offset` of the pattern on, to the memory."""
        for chunk_begin in range(0, length_bytes, _CHUNK_BYTES):
            chunk_bytes = min(_CHUNK_BYTES, length_bytes - chunk_begin)
            self.write_memory(
                offset_bytes + chunk_begin,
                pattern.payload(chunk_bytes, seed=seed, offset_bytes=file_offset + chunk_begin),
            )

    def read(self, *transfers: Transfer, ring_index: int = 0) -> list[int]:
        """Read parts of files into the memory, and return the result of each read in the given order."""
        return self._transfer(self.read_rings[ring_index], transfers, is_read=True)

    def write(self, *transfers: Transfer, ring_index: int = 0) -> list[int]:
        """Write parts of the memory into files, and return the result of each write in the given order."""
        return self._transfer(self.write_rings[ring_index], transfers, is_read=False)

    def _transfer(self, ring: Ioring, transfers: Sequence[Transfer], *, is_read: bool) -> list[int]:
        """Submit the transfers in batches that fit into the ring, and return the results in the given order."""
        result_by_index: dict[int, int] = {}
        for begin in range(0, len(transfers), ring.entries):
            batch_indices = range(begin, min(begin + ring.entries, len(transfers)))
            for index in batch_indices:
                fd, memory_offset, file_offset, length = transfers[index]
                ring.prepare(self.iov[memory_offset : memory_offset + length], is_read, fd, file_offset, userdata=index)
            completions = ring.submit().wait(min_results=len(batch_indices), timeout=_BATCH_TIMEOUT)
            result_by_index.update((int(str(completion.userdata)), completion.result) for completion in completions)
        return [result_by_index[index] for index in range(len(transfers))]

    def close(self) -> None:
        """Close the rings and the memory."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _free_idle_memory() -> None:
    """Free the pooled memory of closed iovs, so that the library closes its connection to the agent.

    A client library without a pool raises UsrbioUnsupported.
    """
    with contextlib.suppress(usrbio.UsrbioUnsupported):
        usrbio.trim_host_pool()


def _main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("mount")
    parser.add_argument("file", help="file to read, with the pattern of --seed")
    parser.add_argument("copy", help="file to write and then to read again")
    parser.add_argument("--kind", choices=MEMORY_KINDS, default="host", help="kind of the memory")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds, each with 32 parts of the files")
    options = parser.parse_args(arguments)
    rng = random.Random(options.seed)
    file_bytes, transferred_bytes = Path(options.file).stat().st_size, 0
    with contextlib.ExitStack() as stack:
        application = stack.enter_context(Application(options.mount, memory_kind=options.kind, length_bytes=4 * MIB))
        source_fd, copy_fd = os.open(options.file, os.O_RDONLY), os.open(options.copy, os.O_RDWR | os.O_CREAT, 0o600)
        for fd in (source_fd, copy_fd):
            stack.callback(os.close, fd)
            usrbio.register_fd(fd)
            stack.callback(usrbio.deregister_fd, fd)
        for _ in range(options.rounds):
            lengths = [rng.randint(1, 64 * KIB) for _ in range(32)]
            # Each pair has an offset in the memory and an offset in the file.
            offset_pairs = [(index * 64 * KIB, rng.randrange(file_bytes - 64 * KIB)) for index in range(32)]
            # Each range has these offsets and a length. With a file descriptor before them, it is a Transfer.
            transfer_ranges = [(*pair, length) for pair, length in zip(offset_pairs, lengths, strict=True)]
            for fd, writes_first in ((source_fd, False), (copy_fd, True)):
                if writes_first:
                    assert (
                        application.write(*((fd, *transfer_range) for transfer_range in transfer_ranges)) == lengths
                    ), "a short write"
                    application.fill(0)
                assert application.read(*((fd, *transfer_range) for transfer_range in transfer_ranges)) == lengths, (
                    "a short read"
                )
                transferred_bytes += sum(lengths) * (1 + writes_first)
                for memory_offset, file_offset, length in transfer_ranges:
                    application.check(memory_offset, length, seed=options.seed, file_offset=file_offset)
    sys.stdout.write(json.dumps({"bytes": transferred_bytes, "pid": os.getpid()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
