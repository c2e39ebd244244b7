"""The operations of one batch of transfers of a storage client, and the check of their results.

A long transfer is split into several operations, so that it uses all queue pairs in parallel. Each operation moves a
subrange of the buffer. The CPU computes and verifies checksums of host memory only. It never touches device memory.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from gdrkit.buffers import check_range
from gdrkit.errors import DataMismatch
from gdrkit.storage.control import storage_error
from gdrkit.storage.file import IORequest, StorageResult
from gdrkit.storage.wire import IoOpcode, Operation, OperationFlag, Result, ResultFlag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.storage.iobuffer import IOBuffer
    from gdrkit.storage.messages import SessionLimits
    from gdrkit.verbs import Nic

__all__ = ["Batch"]

# Largest length of one operation of a client. The server may have a smaller limit.
_OPERATION_BYTES_MAX = 16 << 20


class Batch:
    """The operations of one call of ``batch_read`` or ``batch_write``, and the buffers that they move.

    Parameters
    ----------
    opcode : IoOpcode
        Direction of all operations.
    limits : SessionLimits
        The limits of the server.
    forbid_holes : bool
        Whether a read that meets a hole fails.
    checksum : bool
        Whether writes have checksums. Reads always have checksums if they are into host memory, and never otherwise.

    Attributes
    ----------
    opcode : IoOpcode
        Direction of all operations.
    operations : list of Operation
        The operations in the order of the requests. :class:`~gdrkit.storage.transfers.Transfers` sets their tags.
    """

    def __init__(self, opcode: IoOpcode, limits: SessionLimits, *, forbid_holes: bool, checksum: bool) -> None:
        self.operations: list[Operation] = []
        self.opcode = opcode
        self._limits = limits
        self._forbid_holes = forbid_holes
        self._uses_checksums = checksum
        self._requests_with_subranges: list[tuple[IORequest, list[IOBuffer]]] = []

    def add(self, request: IORequest, queue_pair_choices: Iterator[tuple[int, Nic]]) -> None:
        """Add the operations of a request. Each operation uses the next queue pair.

        `queue_pair_choices` yields, for each operation, the index of its queue pair and the NIC of this queue pair.
        """
        subranges = self._split(request.buffer)
        self._requests_with_subranges.append((request, subranges))
        offset_bytes = request.offset_bytes
        for subrange in subranges:
            flags, checksum = self._choose_flags(subrange)
            queue_pair_index, nic = next(queue_pair_choices)
            sub_request = IORequest(request.file, offset_bytes, subrange)
            self.operations.append(self._make_operation(sub_request, queue_pair_index, nic, flags, checksum))
            offset_bytes += subrange.length_bytes

    def join(self, results: list[Result]) -> list[StorageResult]:
        """Return the result of each request. `results` has the results of the operations, in the order of `operations`.

        Raises
        ------
        ApiError
            The first operation that failed, with the errno of the server.
        DataMismatch
            Bytes that arrived in host memory differ from the bytes that the server sent.
        """
        result_iterator = iter(results)
        return [
            self._join_results(request, subranges, [next(result_iterator) for _ in subranges])
            for request, subranges in self._requests_with_subranges
        ]

    def _split(self, buffer: IOBuffer) -> list[IOBuffer]:
        """Return the subranges of a buffer, one for each operation."""
        length_bytes_max = min(_OPERATION_BYTES_MAX, self._limits.length_bytes_max)
        if self.opcode is IoOpcode.WRITE and self._uses_checksums and not buffer.is_device_memory:
            length_bytes_max = min(length_bytes_max, self._limits.checksum_given_bytes_max)
        return [
            buffer.subrange(offset_bytes=begin, length_bytes=min(length_bytes_max, buffer.length_bytes - begin))
            for begin in range(0, buffer.length_bytes, length_bytes_max)
        ]

    def _choose_flags(self, subrange: IOBuffer) -> tuple[OperationFlag, int]:
        """Return the flags of the operation on a subrange, and the checksum that the operation contains (0: none)."""
        flags = OperationFlag.FORBID_HOLES if self._forbid_holes else OperationFlag(0)
        if self.opcode is IoOpcode.READ:
            if not subrange.is_device_memory:
                return flags | OperationFlag.CHECKSUM_WANTED, 0
            # If the device can zero the holes itself, the server need not send zeros.
            return flags | (OperationFlag.REPORT_HOLES if subrange.can_zero else OperationFlag(0)), 0
        if not self._uses_checksums:
            return flags, 0
        if subrange.is_device_memory:
            # The CPU must not read device memory, so the server computes the checksum.
            return flags | OperationFlag.CHECKSUM_WANTED, 0
        return flags | OperationFlag.CHECKSUM_GIVEN, subrange.checksum(length_bytes=subrange.length_bytes)

    def _make_operation(
        self, sub_request: IORequest, queue_pair_index: int, nic: Nic, flags: OperationFlag, checksum: int
    ) -> Operation:
        """Return the operation that transfers one subrange."""
        length_bytes = sub_request.buffer.length_bytes
        # File offsets are signed numbers of 64 bits, so the transfer must end at 1 << 63 or before.
        check_range(offset_bytes=sub_request.offset_bytes, length_bytes=length_bytes, size_bytes=1 << 63)
        remote_range = sub_request.buffer.remote(nic)
        return Operation(
            tag=0,
            handle=sub_request.file.handle,
            file_offset=sub_request.offset_bytes,
            length=length_bytes,
            remote_address=remote_range.address,
            rkey=remote_range.rkey,
            queue_pair=queue_pair_index,
            opcode=self.opcode,
            flags=flags,
            checksum=checksum,
        )

    def _join_results(self, request: IORequest, subranges: list[IOBuffer], results: list[Result]) -> StorageResult:
        """Return the result of a request from the results of its operations."""
        operation_name = self.opcode.name.lower()
        length_bytes, hole_bytes, checksums, are_previous_complete = 0, 0, [], True
        for subrange, result in zip(subranges, results, strict=True):
            if result.result < 0:
                raise storage_error(
                    operation_name,
                    -result.result,
                    handle=request.file.handle,
                    offset_bytes=request.offset_bytes,
                    length_bytes=request.buffer.length_bytes,
                )
            if result.result > subrange.length_bytes:
                detail = f"the server reported {result.result} bytes for {subrange.length_bytes} that were requested"
                raise storage_error(operation_name, errno.EREMOTEIO, detail=detail)
            for hole in result.holes:
                subrange.zero(offset_bytes=hole.offset, length_bytes=hole.length)
                hole_bytes += hole.length
            if result.flags & ResultFlag.CHECKSUM_VALID:
                checksums.append(result.checksum)
                if self.opcode is IoOpcode.READ and not subrange.is_device_memory:
                    _verify_checksum(subrange, result)
            # After a short read at the end of the file, later subranges add no bytes: they begin after this end.
            length_bytes += result.result if are_previous_complete else 0
            are_previous_complete = are_previous_complete and result.result == subrange.length_bytes
        return StorageResult(length_bytes, tuple(checksums), hole_bytes)


def _verify_checksum(subrange: IOBuffer, result: Result) -> None:
    """Raise DataMismatch if the bytes that arrived have another checksum than the server sent."""
    checksum = subrange.checksum(length_bytes=result.result)
    if checksum != result.checksum:
        raise DataMismatch(
            first_offset_bytes=None,
            expected=result.checksum.to_bytes(4, "big"),
            actual=checksum.to_bytes(4, "big"),
            length_bytes=result.result,
        )
