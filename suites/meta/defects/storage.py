# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects of the storage client: earlier accesses of its CPU to device memory."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["host_buffer_of_device", "inline_read", "inline_write", "memset_holes", "sum_read", "sum_written"]

_INLINE_BYTES = 4096


def _address(piece: Any) -> int:
    return int(piece._registered.memory.address) + int(piece._offset_bytes)


def _view(piece: Any, length_bytes: int) -> memoryview:
    """Return device memory as a view of its address, as if the CPU could access it."""
    return memoryview((ctypes.c_ubyte * length_bytes).from_address(_address(piece))).cast("B")


def inline_read(client: Any) -> None:
    """the data of a short read comes within the reply, and the CPU copies it to where it is wanted"""
    right = client.StorageClient._joined

    def _joined(self: Any, request: Any, pieces: Any, results: Any, opcode: Any) -> Any:
        moved = right(self, request, pieces, results, opcode)
        buffer = request.buffer
        if opcode is client.Opcode.READ and buffer.is_device_memory and buffer.length_bytes <= _INLINE_BYTES:
            inline = bytearray(moved.length_bytes)
            with self.register(inline) as received:
                request.file.read(received, offset_bytes=request.offset_bytes)
            ctypes.memmove(_address(buffer), bytes(inline), len(inline))
        return moved

    client.StorageClient._joined = _joined


def inline_write(client: Any) -> None:
    """the CPU copies the data of a short write into the request"""
    right = client.StorageClient._operation

    def _operation(self: Any, part: Any, opcode: Any, flags: Any, given: int) -> Any:
        buffer = part.buffer
        if opcode is client.Opcode.WRITE and buffer.is_device_memory and buffer.length_bytes <= _INLINE_BYTES:
            ctypes.string_at(_address(buffer), buffer.length_bytes)
        return right(self, part, opcode, flags, given)

    client.StorageClient._operation = _operation


def sum_read(client: Any) -> None:
    """the CPU computes the checksum of what arrived in device memory"""
    right, flags_of = client.StorageClient._joined, client.StorageClient._flags
    wanted, valid = client.OperationFlag.CHECKSUM_WANTED, client.ResultFlag.CHECKSUM_VALID

    def _flags(piece: Any, opcode: Any, **options: Any) -> Any:
        flags, given = flags_of(piece, opcode, **options)
        return flags | wanted if opcode is client.Opcode.READ else flags, given

    def _joined(self: Any, request: Any, pieces: Any, results: Any, opcode: Any) -> Any:
        from gdrkit.storage.checksum import crc32c

        moved = right(self, request, pieces, results, opcode)
        for piece, result in zip(pieces, results, strict=True):
            # The server computes the checksum of the bytes that it sent, so it does not cover a read with holes.
            is_summed = opcode is client.Opcode.READ and result.flags & valid and not result.holes
            if is_summed and piece.is_device_memory and crc32c(_view(piece, result.result)) != result.checksum:
                message = "the bytes are not what the server sent"
                raise AssertionError(message)
        return moved

    client.StorageClient._flags, client.StorageClient._joined = staticmethod(_flags), _joined


def sum_written(client: Any) -> None:
    """the CPU computes the checksum of device memory before it is written"""
    right = client.StorageClient._flags

    def _flags(piece: Any, opcode: Any, *, forbid_holes: bool, checksum: bool) -> Any:
        from gdrkit.storage.checksum import crc32c

        if opcode is client.Opcode.WRITE and checksum and piece.is_device_memory:
            return client.OperationFlag.CHECKSUM_GIVEN, crc32c(_view(piece, piece.length_bytes))
        return right(piece, opcode, forbid_holes=forbid_holes, checksum=checksum)

    client.StorageClient._flags = staticmethod(_flags)


def memset_holes(iobuffer: Any) -> None:
    """the CPU fills the holes of a file in device memory"""
    right = iobuffer.IOBuffer.zero

    def zero(self: Any, *, offset_bytes: int, length_bytes: int) -> None:
        if self.is_device_memory:
            ctypes.memset(_address(self) + offset_bytes, 0, length_bytes)
        else:
            right(self, offset_bytes=offset_bytes, length_bytes=length_bytes)

    iobuffer.IOBuffer.zero = zero


def host_buffer_of_device(iobuffer: Any) -> None:
    """device memory that came by its address is registered as host memory"""
    right = iobuffer.IOBuffer.of_device.__func__

    def of_device(cls: Any, memory: Any, cache: Any) -> Any:
        if memory.owned:
            return right(cls, memory, cache)
        view = (ctypes.c_ubyte * memory.length_bytes).from_address(memory.address)
        return cls.of_host(memoryview(view).cast("B"), cache.nics)

    iobuffer.IOBuffer.of_device = classmethod(of_device)
