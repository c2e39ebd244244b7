"""The data connection of a client, which sends io requests and receives results, with a timeout."""

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

_RECEIVE_BYTES = 1 << 18


class Transfers:
    """The data connection. Only one thread may use it at a time. After an error, every call fails."""

    def __init__(self, connected: socket.socket, *, outstanding_max: int) -> None:
        self._socket = connected
        self._socket.setblocking(False)  # noqa: FBT003 - a method of the standard library.
        self._outstanding_max = min(outstanding_max, OPERATIONS_MAX)
        self._received = bytearray()
        self._tags = itertools.count(1)
        self._sequence = itertools.count(1)
        self._failure: str = ""

    def run(self, operations: Sequence[Operation], *, timeout_s: float) -> list[Result]:
        """Execute operations, whose tags are set here, and return the results in the order of the operations.

        Raises
        ------
        ApiError
            EREMOTEIO: the server is gone or sent an invalid reply. ETIMEDOUT: no reply in time; the connection is
            closed.
        """
        if self._failure:
            raise storage_error("transfer", errno.EREMOTEIO, detail=self._failure)
        indexes: dict[int, int] = {}
        results: list[Result | None] = [None] * len(operations)
        remaining = deque(enumerate(operations))
        out = bytearray()
        deadline = time.monotonic() + timeout_s
        while remaining or indexes or out:
            if remaining and not out and len(indexes) < self._outstanding_max:
                out += self._next_frame(remaining, indexes)
            self._wait(deadline, writing=bool(out))
            if out:
                out = self._send(out)
            for result in self._receive_results():
                if result.tag not in indexes:
                    self._fail("the server sent the result of an operation that was not requested")
                results[indexes.pop(result.tag)] = result
                # A result is progress, so the deadline is extended.
                deadline = time.monotonic() + timeout_s
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Close the socket."""
        self._failure = self._failure or "the client was closed"
        self._socket.close()

    def _next_frame(self, remaining: deque[tuple[int, Operation]], indexes: dict[int, int]) -> bytes:
        chosen = []
        while remaining and len(indexes) < self._outstanding_max:
            index, operation = remaining.popleft()
            tag = next(self._tags)
            indexes[tag] = index
            chosen.append(_with_tag(operation, tag))
        return pack_operations(chosen, sequence=next(self._sequence))

    def _wait(self, deadline: float, *, writing: bool) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if writing else 0))
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
            self._failure = "the server did not answer in time"
            self._socket.close()
            raise storage_error("transfer", errno.ETIMEDOUT, detail=self._failure)

    def _send(self, out: bytearray) -> bytearray:
        try:
            return out[self._socket.send(out) :]
        except BlockingIOError:
            return out
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)

    def _receive_results(self) -> list[Result]:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)
        if not data:
            self._fail("the server ended the connection")
        self._received += data
        results: list[Result] = []
        try:
            while len(self._received) >= HEADER_BYTES:
                header = parse_header(bytes(self._received[:HEADER_BYTES]))
                end = HEADER_BYTES + header.length
                if header.type is FrameType.IO_REPLY and len(self._received) < end:
                    break
                results += parse_results(header, bytes(self._received[HEADER_BYTES:end]))
                del self._received[:end]
        except GdrkitError as error:
            self._fail(f"the server sent an invalid reply: {error}", error)
        return results

    def _fail(self, problem: str, cause: Exception | None = None) -> NoReturn:
        self._failure = problem
        self._socket.close()
        raise storage_error("transfer", errno.EREMOTEIO, detail=problem) from cause


def _with_tag(operation: Operation, tag: int) -> Operation:
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
