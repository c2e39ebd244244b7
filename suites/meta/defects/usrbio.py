# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects of the usrbio client, in Python and in the C library. The folder native/ has the sources of the latter."""

from __future__ import annotations

import ctypes
from typing import Any

from meta.defects.defect import NativeUnit

__all__ = [
    "DECIMAL_FLAGS",
    "LINK_ERRORS_IGNORED",
    "OVERFLOWING_RANGE",
    "RAW_ADDRESS",
    "address_for_handle",
    "published_as_host",
]

RAW_ADDRESS = NativeUnit("raw_address", "the link of a GPU iov contains the virtual address in its owner's process")
LINK_ERRORS_IGNORED = NativeUnit("link_errors_ignored", "the result of symlink(2) for published memory is ignored")
OVERFLOWING_RANGE = NativeUnit("overflowing_range", "`hf3fs_prep_io` adds the address and the length")
DECIMAL_FLAGS = NativeUnit("decimal_flags", "the flags in the name of a ring are in base 10")


def address_for_handle(gpu: Any) -> None:
    """`GpuSharedBuffer` exports its virtual address, and the importer uses it in its own process"""
    from gdrkit import cuda
    from gdrkit.registration.gdr_handle import GdrHandle

    shared = gpu.GpuSharedBuffer

    def export(self: Any) -> bytes:
        address = int(self.iovec.address).to_bytes(64, "little")
        packed: bytes = GdrHandle(ipc=address, length_bytes=self.length_bytes, device_index=self.device).pack()
        return packed

    def open_raw(cls: Any, hf3fs_mount_point: str, handle: bytes) -> Any:
        parsed = GdrHandle.parse(handle)
        address = int.from_bytes(parsed.ipc, "little")
        memory = cuda.borrow(cuda.Device(parsed.device_index), address, length_bytes=parsed.length_bytes)
        return cls(gpu.make_gpu_iovec(hf3fs_mount_point, memory, device=parsed.device_index), is_owner=False)

    shared.export, shared.open = export, classmethod(open_raw)


def published_as_host(gpu: Any) -> None:
    """existing device memory is published as host memory"""
    import uuid

    def _wrap(mount: str, memory: Any, *, block_size: int, device: int, owner: object) -> Any:
        del device, owner
        view = (ctypes.c_ubyte * memory.length_bytes).from_address(memory.address)
        return gpu.native().iovec(view, str(uuid.uuid4()), mount, block_size)

    gpu._wrap = _wrap
