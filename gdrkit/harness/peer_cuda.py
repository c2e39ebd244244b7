"""The CUDA operations that a peer process executes when a test case requests them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.harness.peer_objects import ObjectTable

__all__ = ["operations"]


def operations(objects: ObjectTable) -> dict[str, Callable[..., Any]]:
    """Return the CUDA operations on the objects of this process, by name."""
    cuda_operations = _CudaOperations(objects)
    operation_names = "device allocate open_ipc export_ipc import_vmm contents check write"
    return {name: getattr(cuda_operations, name) for name in operation_names.split()}


class _CudaOperations:
    """The operations. A request passes the parameters by name; `device` and `memory` are handle numbers."""

    def __init__(self, objects: ObjectTable) -> None:
        self._objects = objects

    def device(self, index: int) -> dict[str, Any]:
        device = cuda.Device(index)
        return {"handle": self._objects.add(device), "name": device.name}

    def allocate(self, device: int, length_bytes: int) -> dict[str, Any]:
        return self._add_memory(self._get_device(device).allocate(length_bytes))

    def open_ipc(self, device: int, handle: str, length_bytes: int | None) -> dict[str, Any]:
        opened_memory = cuda.open_handle(self._get_device(device), bytes.fromhex(handle), length_bytes=length_bytes)
        return self._add_memory(opened_memory)

    def export_ipc(self, memory: int) -> str:
        return cuda.export_handle(self._get_memory(memory)).hex()

    def import_vmm(self, device: int, chunk_bytes: int, descriptors: list[int]) -> dict[str, Any]:
        imported_memory = cuda.VmmMemory.import_shareable(
            self._get_device(device), descriptors, chunk_bytes=chunk_bytes
        )
        return self._add_memory(imported_memory)

    def contents(self, memory: int, offset_bytes: int, length_bytes: int) -> str:
        return self._get_memory(memory).read(offset_bytes=offset_bytes, length_bytes=length_bytes).hex()

    def check(self, memory: int, *, seed: int, offset_bytes: int, length_bytes: int, pattern_offset_bytes: int) -> str:
        data = self._get_memory(memory).read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        pattern.check(data, seed=seed, offset_bytes=pattern_offset_bytes)
        return hashlib.sha256(data).hexdigest()

    def write(self, memory: int, *, seed: int, offset_bytes: int, length_bytes: int, pattern_offset_bytes: int) -> None:
        data = pattern.payload(length_bytes, seed=seed, offset_bytes=pattern_offset_bytes)
        self._get_memory(memory).write(data, offset_bytes=offset_bytes)

    def _add_memory(self, memory: cuda.CudaMemory) -> dict[str, Any]:
        return {"handle": self._objects.add(memory), "address": memory.address, "length_bytes": memory.length_bytes}

    def _get_device(self, handle_number: int) -> cuda.Device:
        device: cuda.Device = self._objects.get(handle_number, cuda.Device)
        return device

    def _get_memory(self, handle_number: int) -> cuda.CudaMemory:
        memory: cuda.CudaMemory = self._objects.get(handle_number, cuda.CudaMemory)
        return memory
