# ruff: noqa: ANN401, ARG005, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects that can be put back into the export and import of device memory, one function each.

The hook site/sitecustomize.py calls each function with the imported module of gdrkit. docs/findings.md shows the
docstrings of the functions.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "export_base_for_interior",
    "export_placeholder",
    "export_placeholder_handle",
    "import_null_pointer",
    "skip_base_check",
    "skip_device_check",
]


def export_placeholder(share_module: Any) -> None:
    """without CUDA, `export_address` returns only metadata and reports success"""
    from gdrkit.errors import Unsupported

    original_function = share_module.export_address

    def export_address(address: int, *, length_bytes: int, device_index: int, kind: Any) -> Any:
        try:
            return original_function(address, length_bytes=length_bytes, device_index=device_index, kind=kind)
        except Unsupported:
            handle = share_module.ShareHandle(
                kind=share_module.ShareKind.IPC,
                allocation_bytes=length_bytes,
                offset_bytes=0,
                length_bytes=length_bytes,
                device_uuid=b"\x01" * 16,
                owner=share_module.this_process(),
                ipc=b"\x01" * 64,
            )
            return share_module.HandleMessage(handle.pack())

    share_module.export_address = export_address


def export_placeholder_handle(gdr_handle_module: Any) -> None:
    """`export_gdr` exports placeholder bytes as the IPC handle"""

    def export_gdr(memory: Any) -> bytes:
        gdr_handle_module._refuse_unless_at_allocation_base(memory)
        index = memory.device.index
        packed_handle: bytes = gdr_handle_module.GdrHandle(
            ipc=b"\x01" * 64, length_bytes=memory.length_bytes, device_index=index
        ).pack()
        return packed_handle

    gdr_handle_module.export_gdr = export_gdr


class _NullMemory:
    """Memory whose address is a null pointer."""

    address = 0

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    close = __exit__


def import_null_pointer(gdr_handle_module: Any) -> None:
    """`import_gdr` returns memory with a null pointer"""
    original_function = gdr_handle_module.import_gdr

    def import_gdr(device: Any, data: bytes) -> _NullMemory:
        original_function(device, data).close()  # This call still refuses a wrong handle or device.
        return _NullMemory(device)

    gdr_handle_module.import_gdr = import_gdr


def export_base_for_interior(share_module: Any) -> None:
    """an IPC export omits the offset of the memory in its allocation"""

    def _locate_in_allocation(memory: Any, offset_bytes: int) -> tuple[int, int]:
        return memory.allocation_key()[0][1], 0

    share_module._locate_in_allocation = _locate_in_allocation


def skip_base_check(gdr_handle_module: Any) -> None:
    """`export_gdr` accepts memory that does not begin at the base of its allocation"""
    gdr_handle_module._refuse_unless_at_allocation_base = lambda memory: None


def skip_device_check(ipc_module: Any) -> None:
    """`open_handle` does not check on which device the memory is"""
    ipc_module._check_device = lambda address, device: None
