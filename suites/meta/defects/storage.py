# ruff: noqa: ANN401, SLF001 - this file replaces private functions of gdrkit, which have no types here.
"""Defects that can be put back into the storage client: accesses of the CPU to device memory, one function each.

The hook site/sitecustomize.py calls each function with the imported module of gdrkit. docs/findings.md shows the
docstrings of the functions.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = [
    "checksum_read_by_cpu",
    "checksum_write_by_cpu",
    "copy_short_read_by_cpu",
    "copy_short_write_by_cpu",
    "fill_holes_by_cpu",
    "register_device_as_host",
]

# Longest transfer whose data the CPU copies into the request or the reply, in bytes.
_INLINE_BYTES = 4096


def _get_address(buffer: Any) -> int:
    """Return the device address of the first byte of a buffer."""
    return int(buffer._registration.memory.address) + int(buffer._offset_bytes)


def _make_view(buffer: Any, length_bytes: int) -> memoryview:
    """Return a memoryview at the device address of a buffer. A process that reads device memory by it gets SIGSEGV."""
    return memoryview((ctypes.c_ubyte * length_bytes).from_address(_get_address(buffer))).cast("B")


def copy_short_read_by_cpu(batch_module: Any) -> None:
    """the data of a short read is in the reply, and the CPU copies it into device memory"""
    original_function = batch_module.Batch._join_results

    def _join_results(self: Any, request: Any, chunks: Any, results: Any) -> Any:
        result = original_function(self, request, chunks, results)
        buffer = request.buffer
        is_read = self.opcode is batch_module.IoOpcode.READ
        if is_read and buffer.is_device_memory and buffer.length_bytes <= _INLINE_BYTES:
            host_data = bytearray(result.length_bytes)
            with request.file.client.register(host_data) as host_buffer:
                request.file.read(host_buffer, offset_bytes=request.offset_bytes)
            ctypes.memmove(_get_address(buffer), bytes(host_data), len(host_data))
        return result

    batch_module.Batch._join_results = _join_results


def copy_short_write_by_cpu(batch_module: Any) -> None:
    """the CPU copies the data of a short write into the request"""
    original_function = batch_module.Batch._make_operation

    def _make_operation(self: Any, request: Any, *arguments: Any) -> Any:
        buffer = request.buffer
        is_write = self.opcode is batch_module.IoOpcode.WRITE
        if is_write and buffer.is_device_memory and buffer.length_bytes <= _INLINE_BYTES:
            # string_at() reads the device memory with the CPU.
            ctypes.string_at(_get_address(buffer), buffer.length_bytes)
        return original_function(self, request, *arguments)

    batch_module.Batch._make_operation = _make_operation


def checksum_read_by_cpu(batch_module: Any) -> None:
    """the CPU computes the checksum of received data in device memory"""
    original_join, original_choose_flags = batch_module.Batch._join_results, batch_module.Batch._choose_flags
    checksum_wanted, checksum_valid = batch_module.OperationFlag.CHECKSUM_WANTED, batch_module.ResultFlag.CHECKSUM_VALID

    def _choose_flags(self: Any, chunk: Any) -> Any:
        flags, checksum = original_choose_flags(self, chunk)
        return flags | checksum_wanted if self.opcode is batch_module.IoOpcode.READ else flags, checksum

    def _join_results(self: Any, request: Any, chunks: Any, results: Any) -> Any:
        from gdrkit.storage.checksum import crc32c

        joined_result = original_join(self, request, chunks, results)
        for chunk, result in zip(chunks, results, strict=True):
            # The checksum of the server covers only the bytes that it sent, so a read with holes cannot be compared.
            is_comparable = (
                self.opcode is batch_module.IoOpcode.READ and result.flags & checksum_valid and not result.holes
            )
            if is_comparable and chunk.is_device_memory and crc32c(_make_view(chunk, result.result)) != result.checksum:
                message = "the checksum differs from the server's"
                raise AssertionError(message)
        return joined_result

    batch_module.Batch._choose_flags, batch_module.Batch._join_results = _choose_flags, _join_results


def checksum_write_by_cpu(batch_module: Any) -> None:
    """the CPU computes the checksum of device memory before it is written"""
    original_function = batch_module.Batch._choose_flags

    def _choose_flags(self: Any, chunk: Any) -> Any:
        from gdrkit.storage.checksum import crc32c

        if self.opcode is batch_module.IoOpcode.WRITE and self._uses_checksums and chunk.is_device_memory:
            return batch_module.OperationFlag.CHECKSUM_GIVEN, crc32c(_make_view(chunk, chunk.length_bytes))
        return original_function(self, chunk)

    batch_module.Batch._choose_flags = _choose_flags


def fill_holes_by_cpu(iobuffer_module: Any) -> None:
    """the CPU fills the holes of a file in device memory"""
    original_function = iobuffer_module.IOBuffer.zero

    def zero(self: Any, *, offset_bytes: int, length_bytes: int) -> None:
        if self.is_device_memory:
            ctypes.memset(_get_address(self) + offset_bytes, 0, length_bytes)
        else:
            original_function(self, offset_bytes=offset_bytes, length_bytes=length_bytes)

    iobuffer_module.IOBuffer.zero = zero


def register_device_as_host(iobuffer_module: Any) -> None:
    """borrowed device memory is registered as host memory"""
    original_function = iobuffer_module.IOBuffer.of_device.__func__

    def of_device(cls: Any, memory: Any, cache: Any) -> Any:
        if memory.owned:
            return original_function(cls, memory, cache)
        view = (ctypes.c_ubyte * memory.length_bytes).from_address(memory.address)
        return cls.of_host(memoryview(view).cast("B"), cache.nics)

    iobuffer_module.IOBuffer.of_device = classmethod(of_device)
