"""What the cases about files and memory share: memory of every kind that may be handed over, and what is cached."""

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
    from collections.abc import Iterator

    from gdrkit.cuda import CudaMemory, Device

__all__ = [
    "DEVICE_KINDS",
    "KINDS",
    "PLACES",
    "RESIDENT_MOST",
    "Memory",
    "OnlyDlpack",
    "OnlyInterface",
    "cached_share",
    "engine_threads",
    "forget",
    "holding",
]

DEVICE_KINDS = [
    pytest.param("device", marks=needs(cuda.device()), id="device"),
    pytest.param("dlpack", marks=needs(cuda.device()), id="dlpack"),
    pytest.param("interface", marks=needs(cuda.device()), id="cuda-array-interface"),
]
KINDS = [pytest.param("host", id="host"), *DEVICE_KINDS]
# Where it does not matter who made the memory of a device.
PLACES = KINDS[:2]
# Of a file that is cold, this share may still be cached.
RESIDENT_MOST = 0.01


class OnlyDlpack:
    """Device memory that shows itself by DLPack alone, and knows how many have not let it go."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory

    def __dlpack__(self, *, stream: int | None = None) -> object:
        return self._memory.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.__dlpack_device__()


class OnlyInterface:
    """Device memory that shows itself by the CUDA array interface alone."""

    def __init__(self, memory: CudaMemory) -> None:
        self.__cuda_array_interface__ = memory.__cuda_array_interface__


@dataclass(frozen=True)
class Memory:
    """Memory, and what is handed over for it."""

    buffer: Any
    owner: CudaMemory | bytearray

    def content(self) -> bytes:
        """What it has."""
        return bytes(self.owner) if isinstance(self.owner, bytearray) else self.owner.read()

    def write(self, data: bytes) -> None:
        """Put this at its beginning."""
        if isinstance(self.owner, bytearray):
            self.owner[: len(data)] = data
        else:
            self.owner.write(data)


@contextlib.contextmanager
def holding(kind: str, length_bytes: int, device: Device | None) -> Iterator[Memory]:
    """Memory of one of the kinds, filled with 0xa5; it must have been let go at the end."""
    if device is None:
        host = bytearray(b"\xa5" * length_bytes)
        yield Memory(host, host)
        host.extend(b"free")  # BufferError: somebody still holds it.
        return
    with device.allocate(length_bytes) as memory:
        memory.fill(0xA5)
        yield Memory({"device": lambda it: it, "dlpack": OnlyDlpack, "interface": OnlyInterface}[kind](memory), memory)


def forget(path: Path, *, offset_bytes: int = 0, length_bytes: int = 0) -> None:
    """Have the kernel drop what it has cached of a range (0 bytes: to the end), where it can."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Which share of the file the kernel has cached, 0 to 1."""
    with gds.File(path, direct="never") as file:
        return file.cached_share()


def engine_threads() -> int:
    """How many threads of engines this process has."""
    names = []
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((each / "comm").read_text().strip())
    return names.count("gdrkit-engine")
