# ruff: noqa: ANN401, ARG005, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects of sharing: earlier behaviour of export and import."""

from __future__ import annotations

from typing import Any, Self

__all__ = ["base_for_interior", "metadata_only", "no_base_check", "no_device_check", "null_import", "placeholder"]


def placeholder(share: Any) -> None:
    """without CUDA, `export_address` returns only metadata and reports success"""
    from gdrkit.errors import Unsupported

    original = share.export_address

    def export_address(address: int, *, length_bytes: int, device_index: int, kind: Any) -> Any:
        try:
            return original(address, length_bytes=length_bytes, device_index=device_index, kind=kind)
        except Unsupported:
            handle = share.ShareHandle(
                kind=share.ShareKind.IPC,
                allocation_bytes=length_bytes,
                offset_bytes=0,
                length_bytes=length_bytes,
                device_uuid=b"\x01" * 16,
                owner=share.this_process(),
                ipc=b"\x01" * 64,
            )
            return share.HandleMessage(handle.pack())

    share.export_address = export_address


def metadata_only(gdr_handle: Any) -> None:
    """`export_gdr` leaves the IPC handle empty"""

    def export_gdr(memory: Any) -> bytes:
        gdr_handle._require_base(memory)
        index = memory.device.index
        packed: bytes = gdr_handle.GdrHandle(
            ipc=b"\x01" * 64, length_bytes=memory.length_bytes, device_index=index
        ).pack()
        return packed

    gdr_handle.export_gdr = export_gdr


class _NullMemory:
    address = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    close = __exit__


def null_import(gdr_handle: Any) -> None:
    """`import_gdr` returns memory with a null pointer"""

    def import_gdr(device: Any, data: bytes) -> _NullMemory:
        gdr_handle._require_device(gdr_handle.GdrHandle.parse(data), device)
        return _NullMemory()

    gdr_handle.import_gdr = import_gdr


def base_for_interior(share: Any) -> None:
    """an IPC export omits the offset of the memory in its allocation"""

    def _place(memory: Any, offset_bytes: int) -> tuple[int, int]:
        return memory.allocation_key()[0][1], 0

    share._place = _place


def no_base_check(gdr_handle: Any) -> None:
    """`export_gdr` accepts interior memory of an allocation"""
    gdr_handle._require_base = lambda memory: None


def no_device_check(gdr_handle: Any) -> None:
    """`import_gdr` does not check the device number"""
    gdr_handle._require_device = lambda handle, device: None
