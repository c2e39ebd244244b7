"""Memory of every kind that `gdrkit.gds` accepts, and queries of the page cache and of the engine's threads."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gdrkit import gds
from gdrkit.harness.needs import cuda, needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.cuda import CudaMemory, Device

__all__ = [
    "CACHED_SHARE_MAX",
    "DEVICE_KINDS",
    "HOST_AND_DEVICE",
    "MEMORY_KINDS",
    "CudaArrayBuffer",
    "DlpackBuffer",
    "Memory",
    "allocate_memory",
    "cached_share",
    "count_engine_threads",
    "drop_from_cache",
]

# Parameters of cases: kinds of device memory, which differ in the interface by which `gdrkit.gds` gets the address.
DEVICE_KINDS = [
    pytest.param("device", marks=needs(cuda.device()), id="device"),
    pytest.param("dlpack", marks=needs(cuda.device()), id="dlpack"),
    pytest.param("interface", marks=needs(cuda.device()), id="cuda-array-interface"),
]
MEMORY_KINDS = [pytest.param("host", id="host"), *DEVICE_KINDS]
# Host memory, and device memory as an object of gdrkit.
HOST_AND_DEVICE = MEMORY_KINDS[:2]
# A file counts as cold if at most this share of its bytes is in the page cache.
CACHED_SHARE_MAX = 0.01


class DlpackBuffer:
    """Device memory that other libraries can access by DLPack only."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self._memory.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()


class CudaArrayBuffer:
    """Device memory that other libraries can access by the CUDA array interface only."""

    def __init__(self, memory: CudaMemory) -> None:
        self.__cuda_array_interface__ = memory.__cuda_array_interface__


@dataclass(frozen=True)
class Memory:
    """Memory of a case: the buffer that the case passes to `gdrkit.gds`, and the owner of the bytes.

    Attributes
    ----------
    buffer : object
        The object that is passed to `gdrkit.gds`.
    owner : CudaMemory or bytearray
        The object that owns the bytes.
    """

    buffer: Any
    owner: CudaMemory | bytearray

    def read_all(self) -> bytes:
        """Return all bytes of the memory."""
        return bytes(self.owner) if isinstance(self.owner, bytearray) else self.owner.read()

    def write(self, data: bytes) -> None:
        """Write data to the beginning of the memory."""
        if isinstance(self.owner, bytearray):
            self.owner[: len(data)] = data
        else:
            self.owner.write(data)


@contextlib.contextmanager
def allocate_memory(memory_kind: str, length_bytes: int, device: Device | None) -> Iterator[Memory]:
    """Yield new memory, filled with 0xa5: of `memory_kind` on the device, or host memory if `device` is None.

    No other object may refer to the memory at the end of the block.
    """
    if device is None:
        host_memory = bytearray(b"\xa5" * length_bytes)
        yield Memory(host_memory, host_memory)
        # This raises BufferError if a memoryview of the array still exists.
        host_memory.extend(b"free")
        return
    wrapper_class_by_kind: dict[str, Callable[[CudaMemory], object]] = {
        "dlpack": DlpackBuffer,
        "interface": CudaArrayBuffer,
    }
    with device.allocate(length_bytes) as memory:
        memory.fill(0xA5)
        yield Memory(memory if memory_kind == "device" else wrapper_class_by_kind[memory_kind](memory), memory)


def drop_from_cache(path: Path, *, offset_bytes: int = 0, length_bytes: int = 0) -> None:
    """Ask the kernel to drop a range of the file from the page cache. Length 0 means up to the end of the file."""
    with path.open("rb") as file:
        # The kernel drops only pages that are already written to the disk.
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Return the share of the file that is in the page cache, from 0 to 1."""
    with gds.File(path, direct="never") as file:
        return file.cached_share()


def count_engine_threads() -> int:
    """Return the number of threads of the copy engine in this process."""
    thread_names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            thread_names.append((task / "comm").read_text().strip())
    return thread_names.count("gdrkit-engine")
