# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects that can be put back into the usrbio client: functions for the Python part, patches for the C library.

The hook site/sitecustomize.py calls each function with the imported module of gdrkit. docs/findings.md shows the
docstrings of the functions.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from meta.defects.defect import NativeDefect
from meta.mutants.patches import Patch

__all__ = [
    "DECIMAL_FLAGS",
    "LINK_ERRORS_IGNORED",
    "NATIVE_DEFECTS",
    "OVERFLOWING_RANGE",
    "RAW_ADDRESS",
    "export_address_as_handle",
    "publish_as_host",
]

_CLIENT_FOLDER = "native/usrbio/client"
# Device memory is published by a symbolic link. The first C++ statement returns the correct target of the link. The
# second returns a target with the virtual address in place of the IPC handle.
_RETURN_CORRECT_TARGET = """\
return {gpu_iov.device, gpu_iov.allocation.bytes, gpu_iov.pointer - gpu_iov.allocation.base, gpu_iov.size_bytes,
                gpu_iov.ipc};"""
_RETURN_ADDRESS_TARGET = """IpcBytes address{};
        std::copy_n(reinterpret_cast<const std::uint8_t*>(&gpu_iov.pointer), sizeof gpu_iov.pointer, address.begin());
        return {gpu_iov.device, gpu_iov.size_bytes, 0, gpu_iov.size_bytes, address};"""

RAW_ADDRESS = NativeDefect(
    Patch("raw_address", f"{_CLIENT_FOLDER}/gpu_publish.cpp", _RETURN_CORRECT_TARGET, _RETURN_ADDRESS_TARGET),
    "the link of a GPU iov contains a virtual address of the owner's process instead of an IPC handle",
)
LINK_ERRORS_IGNORED = NativeDefect(
    Patch(
        "link_errors_ignored",
        f"{_CLIENT_FOLDER}/publication.cpp",
        "path.c_str()) == 0 ? 0 : -errno",
        "path.c_str()) & 0",
    ),
    "the result of symlink(2) for published memory is ignored",
)
OVERFLOWING_RANGE = NativeDefect(
    Patch(
        "overflowing_range",
        f"{_CLIENT_FOLDER}/io.cpp",
        "offset < iov.size && length <= iov.size - offset",
        "offset + length <= iov.size",
    ),
    "`hf3fs_prep_io` adds the offset and the length, and the sum can overflow",
)
DECIMAL_FLAGS = NativeDefect(
    Patch(
        "decimal_flags",
        f"{_CLIENT_FOLDER}/names.cpp",
        "    std::string digits;\n",
        "    return std::to_string(flags);\n    std::string digits;\n",
    ),
    "the flags in the name of a ring are in base 10",
)
NATIVE_DEFECTS = (RAW_ADDRESS, LINK_ERRORS_IGNORED, OVERFLOWING_RANGE, DECIMAL_FLAGS)


def export_address_as_handle(gpu_module: Any) -> None:
    """`GpuSharedBuffer` exports its virtual address, and the importer uses it in its own process"""
    from gdrkit import cuda
    from gdrkit.registration.gdr_handle import GdrHandle

    buffer_class = gpu_module.GpuSharedBuffer

    def export(self: Any) -> bytes:
        address_bytes = int(self.iovec.address).to_bytes(64, "little")
        packed_handle: bytes = GdrHandle(
            ipc=address_bytes, length_bytes=self.length_bytes, device_index=self.device
        ).pack()
        return packed_handle

    def open_by_address(cls: Any, hf3fs_mount_point: str, handle: bytes) -> Any:
        parsed_handle = GdrHandle.parse(handle)
        address = int.from_bytes(parsed_handle.ipc, "little")
        memory = cuda.borrow(cuda.Device(parsed_handle.device_index), address, length_bytes=parsed_handle.length_bytes)
        return cls(
            gpu_module.make_gpu_iovec(hf3fs_mount_point, memory, device=parsed_handle.device_index), is_owner=False
        )

    buffer_class.export, buffer_class.open = export, classmethod(open_by_address)


def publish_as_host(gpu_module: Any) -> None:
    """existing device memory is published as host memory"""
    import uuid

    def wrap_as_host(mount: str, memory: Any, *, block_size: int, device: int, owner: object) -> Any:
        del device, owner
        view = (ctypes.c_ubyte * memory.length_bytes).from_address(memory.address)
        iov_uuid = str(uuid.uuid4())
        # hf3fs_iovwrap fails if no symbolic link publishes the memory.
        Path(mount, "3fs-virt", "iovs", iov_uuid).symlink_to(f"/dev/shm/hf3fs-iov-{iov_uuid}")  # noqa: S108
        return gpu_module.native().iovec(view, iov_uuid, mount, block_size)

    gpu_module._wrap_memory = wrap_as_host
