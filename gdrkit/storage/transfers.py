"""The data connection of a storage client, which sends io requests and receives their results, with a timeout."""

from __future__ import annotations

import errno
import itertools
import select
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import GdrkitError
from gdrkit.storage.control import storage_error
from gdrkit.storage.wire import (
    HEADER_BYTES,
    OPERATIONS_MAX,
    FrameType,
    Operation,
    Result,
    pack_operations,
    parse_header,
    parse_results,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

__all__ = ["Transfers", "storage_error"]

# Largest number of bytes of one recv().
_RECEIVE_BYTES = 1 << 18


class Transfers:
    """The data connection. Only one thread may use it at a time. After an error, every later call fails."""

    def __init__(self, connected_socket: socket.socket, *, outstanding_max: int) -> None:
        self._socket = connected_socket
        self._socket.setblocking(False)  # noqa: FBT003 - a method of the standard library.
        self._outstanding_max = min(outstanding_max, OPERATIONS_MAX)
        # Bytes that were received and not yet parsed.
        self._received_bytes = bytearray()
        self._tags = itertools.count(1)
        self._sequence_numbers = itertools.count(1)
        # Why the connection has failed or was closed; empty while it works.
        self._failure_text: str = ""

    def run(self, operations: Sequence[Operation], *, timeout_s: float) -> list[Result]:
        """Give each operation a tag, execute the operations, and return the results in the order of the operations.

        Raises
        ------
        ApiError
            EREMOTEIO: the server is gone or sent an invalid reply. ETIMEDOUT: no result arrived within `timeout_s`
            after the last one, and the connection was closed.
        """
        if self._failure_text:
            raise storage_error("transfer", errno.EREMOTEIO, detail=self._failure_text)
        index_by_tag: dict[int, int] = {}
        results: list[Result | None] = [None] * len(operations)
        unsent_operations = deque(enumerate(operations))
        unsent_bytes = bytearray()
        deadline_s = time.monotonic() + timeout_s
        while unsent_operations or index_by_tag or unsent_bytes:
            if unsent_operations and not unsent_bytes and len(index_by_tag) < self._outstanding_max:
                unsent_bytes += self._pack_next_frame(unsent_operations, index_by_tag)
            self._wait_for_socket(deadline_s, is_sending=bool(unsent_bytes))
            if unsent_bytes:
                unsent_bytes = self._send(unsent_bytes)
            for result in self._receive_results():
                if result.tag not in index_by_tag:
                    self._fail("the server sent the result of an operation that was not requested")
                results[index_by_tag.pop(result.tag)] = result
                # A result is progress, so the deadline is extended.
                deadline_s = time.monotonic() + timeout_s
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Close the socket."""
        self._failure_text = self._failure_text or "the client was closed"
        self._socket.close()

    def _pack_next_frame(self, unsent_operations: deque[tuple[int, Operation]], index_by_tag: dict[int, int]) -> bytes:
        """Return the next io request, and add its operations to `index_by_tag`."""
        frame_operations = []
        while unsent_operations and len(index_by_tag) < self._outstanding_max:
            operation_index, operation = unsent_operations.popleft()
            tag = next(self._tags)
            index_by_tag[tag] = operation_index
            frame_operations.append(_add_tag(operation, tag))
        return pack_operations(frame_operations, sequence=next(self._sequence_numbers))

    def _wait_for_socket(self, deadline_s: float, *, is_sending: bool) -> None:
        """Wait until bytes have arrived or, if `is_sending`, can be sent. Fail with ETIMEDOUT at the deadline."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if is_sending else 0))
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
            self._failure_text = "the server did not answer in time"
            self._socket.close()
            raise storage_error("transfer", errno.ETIMEDOUT, detail=self._failure_text)

    def _send(self, unsent_bytes: bytearray) -> bytearray:
        """Send as many bytes as possible without waiting, and return the rest."""
        try:
            return unsent_bytes[self._socket.send(unsent_bytes) :]
        except BlockingIOError:
            return unsent_bytes
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)

    def _receive_results(self) -> list[Result]:
        """Receive bytes, and return the results in the replies that are complete."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)
        if not data:
            self._fail("the server ended the connection")
        self._received_bytes += data
        results: list[Result] = []
        try:
            while len(self._received_bytes) >= HEADER_BYTES:
                header = parse_header(bytes(self._received_bytes[:HEADER_BYTES]))
                frame_end = HEADER_BYTES + header.length
                # An incomplete reply stays until its other bytes have arrived. A frame of another type need not wait:
                # parse_results() refuses it.
                if header.type is FrameType.IO_REPLY and len(self._received_bytes) < frame_end:
                    break
                results += parse_results(header, bytes(self._received_bytes[HEADER_BYTES:frame_end]))
                del self._received_bytes[:frame_end]
        except GdrkitError as error:
            self._fail(f"the server sent an invalid reply: {error}", error)
        return results

    def _fail(self, problem: str, cause: Exception | None = None) -> NoReturn:
        """Close the socket and raise EREMOTEIO. `problem` becomes the error text of this call and of later ones."""
        self._failure_text = problem
        self._socket.close()
        raise storage_error("transfer", errno.EREMOTEIO, detail=problem) from cause


def _add_tag(operation: Operation, tag: int) -> Operation:
    """Return a copy of an operation with this tag."""
    return Operation(
        tag=tag,
        handle=operation.handle,
        file_offset=operation.file_offset,
        length=operation.length,
        remote_address=operation.remote_address,
        rkey=operation.rkey,
        queue_pair=operation.queue_pair,
        opcode=operation.opcode,
        flags=operation.flags,
        checksum=operation.checksum,
    )
