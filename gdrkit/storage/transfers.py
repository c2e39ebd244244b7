"""The data connection of a client, which sends io requests and receives results, with a timeout."""

from __future__ import annotations

import errno
import itertools
import select
import time
from collections import deque
from typing import TYPE_CHECKING, NoReturn

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, errno_name
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

_PART_BYTES = 1 << 18


def storage_error(operation: str, number: int, *, detail: str = "", **arguments: object) -> ApiError:
    """Return the exception for an errno of the service."""
    reasons = {
        errno.EREMOTEIO: Reason.PEER_GONE,
        errno.EACCES: Reason.NO_PERMISSION,
        errno.EPERM: Reason.NO_PERMISSION,
        errno.EINVAL: Reason.BAD_ARGUMENT,
        errno.EBADF: Reason.BAD_DESCRIPTOR,
        errno.ETIMEDOUT: Reason.TIMEOUT,
    }
    return ApiError(
        api=Api.STORAGE,
        operation=operation,
        status=number,
        status_name=errno_name(number),
        errno=number,
        arguments=arguments,
        reason=reasons.get(number, Reason.OTHER),
        detail=detail,
    )


class Transfers:
    """The data connection. Only one thread may use it at a time. After an error it is unusable (unknown state)."""

    def __init__(self, end: socket.socket, *, outstanding_max: int) -> None:
        self._socket = end
        self._socket.setblocking(False)  # noqa: FBT003 - a method of the standard library.
        self._outstanding_max = min(outstanding_max, OPERATIONS_MAX)
        self._received = bytearray()
        self._tags = itertools.count(1)
        self._sequence = itertools.count(1)
        self._gone: str = ""

    def run(self, operations: Sequence[Operation], *, timeout_s: float) -> list[Result]:
        """Execute operations, whose tags are set here, and return the results in the order of the operations.

        Raises
        ------
        ApiError
            EREMOTEIO: the server is gone or sent an invalid reply. ETIMEDOUT: no reply in time; the connection is
            closed.
        """
        if self._gone:
            raise storage_error("transfer", errno.EREMOTEIO, detail=self._gone)
        places: dict[int, int] = {}
        results: list[Result | None] = [None] * len(operations)
        todo = deque(enumerate(operations))
        out = bytearray()
        deadline = time.monotonic() + timeout_s
        while todo or places or out:
            if todo and not out and len(places) < self._outstanding_max:
                out += self._frame(todo, places)
            self._wait(deadline, writing=bool(out))
            if out:
                out = self._send(out)
            for result in self._results():
                if result.tag not in places:
                    self._fail("the server answered an operation that nobody asked for")
                results[places.pop(result.tag)] = result
                # A result is progress, so the deadline is extended.
                deadline = time.monotonic() + timeout_s
        return [result for result in results if result is not None]

    def close(self) -> None:
        """Close the socket."""
        self._gone = self._gone or "the client was closed"
        self._socket.close()

    def _frame(self, todo: deque[tuple[int, Operation]], places: dict[int, int]) -> bytes:
        chosen = []
        while todo and len(places) < self._outstanding_max:
            place, operation = todo.popleft()
            tag = next(self._tags)
            places[tag] = place
            chosen.append(_tagged(operation, tag))
        return pack_operations(chosen, sequence=next(self._sequence))

    def _wait(self, deadline: float, *, writing: bool) -> None:
        watched = select.poll()
        watched.register(self._socket, select.POLLIN | (select.POLLOUT if writing else 0))
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not watched.poll(remaining_s * 1000):
            self._gone = "the server did not answer in time"
            self._socket.close()
            raise storage_error("transfer", errno.ETIMEDOUT, detail=self._gone)

    def _send(self, out: bytearray) -> bytearray:
        try:
            return out[self._socket.send(out) :]
        except BlockingIOError:
            return out
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)

    def _results(self) -> list[Result]:
        try:
            part = self._socket.recv(_PART_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self._fail(f"the connection ended: {error}", error)
        if not part:
            self._fail("the server ended the connection")
        self._received += part
        found: list[Result] = []
        try:
            while len(self._received) >= HEADER_BYTES:
                header = parse_header(bytes(self._received[:HEADER_BYTES]))
                end = HEADER_BYTES + header.length
                if header.type is FrameType.IO_REPLY and len(self._received) < end:
                    break
                found += parse_results(header, bytes(self._received[HEADER_BYTES:end]))
                del self._received[:end]
        except GdrkitError as error:
            self._fail(f"the server answered nonsense: {error}", error)
        return found

    def _fail(self, why: str, cause: Exception | None = None) -> NoReturn:
        self._gone = why
        self._socket.close()
        raise storage_error("transfer", errno.EREMOTEIO, detail=why) from cause


def _tagged(operation: Operation, tag: int) -> Operation:
    return Operation(
        tag=tag,
        handle=operation.handle,
        file_offset=operation.file_offset,
        length=operation.length,
        remote_address=operation.remote_address,
        rkey=operation.rkey,
        lane=operation.lane,
        opcode=operation.opcode,
        flags=operation.flags,
        checksum=operation.checksum,
    )
