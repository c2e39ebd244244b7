# ruff: noqa: ANN401 - options and results come from another process as JSON data.
"""Proxies, in the process of the test case, for the RDMA objects of a peer process.

Closing a proxy is optional, because the peer closes all its objects after the case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.harness.peer_connection import PeerObject
from gdrkit.verbs import Access, Completion, CompletionOpcode, Endpoint, RemoteRange, Status

if TYPE_CHECKING:
    from gdrkit.harness.peer_connection import PeerConnection
    from gdrkit.verbs import QueuePair

__all__ = ["PeerBuffer", "PeerNic", "PeerQueuePair", "PeerRegion", "ReadResult"]

_READ_WRITE_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
# Default of the longest time for which the peer waits for a completion.
_COMPLETION_TIMEOUT_MS = 10_000.0
# The case waits this much longer for the reply of the peer.
_REPLY_MARGIN_S = 20.0


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of an RDMA READ by a peer: the completion, and the SHA-256 of the data."""

    completion: Completion
    sha256: str


class PeerRegion(PeerObject):
    """A memory region of a peer."""

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        super().__init__(peer, reply)
        self._remote_range = RemoteRange.from_dict(reply["remote"])

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the address and rkey of a part of the region. A `length_bytes` of None means up to its end."""
        length_bytes = self._remote_range.length_bytes - offset_bytes if length_bytes is None else length_bytes
        return self._remote_range.part(offset_bytes=offset_bytes, length_bytes=length_bytes)


class PeerBuffer(PeerRegion):
    """Registered host memory of a peer.

    In its methods, `pattern_offset_bytes` is the offset of the first byte in the pattern of `seed`; see
    :mod:`gdrkit.pattern`.
    """

    def fill(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, pattern_offset_bytes: int = 0
    ) -> None:
        """Write bytes of the pattern of `seed` into the buffer."""
        self.peer.request(
            "verbs.fill",
            buffer=self.handle_number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._resolve_length(offset_bytes, length_bytes),
            pattern_offset_bytes=pattern_offset_bytes,
        )

    def check(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, pattern_offset_bytes: int = 0
    ) -> str:
        """Make the peer compare the buffer with the pattern of `seed`, and return the SHA-256 of the compared bytes.

        Raises
        ------
        DataMismatch
            The bytes differ. The error has the offset of the first difference.
        """
        digest: str = self.peer.request(
            "verbs.check",
            buffer=self.handle_number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._resolve_length(offset_bytes, length_bytes),
            pattern_offset_bytes=pattern_offset_bytes,
        )
        return digest

    def contents(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Return the bytes of the buffer."""
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        return bytes.fromhex(
            self.peer.request(
                "verbs.contents", buffer=self.handle_number, offset_bytes=offset_bytes, length_bytes=length_bytes
            )
        )

    def _resolve_length(self, offset_bytes: int, length_bytes: int | None) -> int:
        return self._remote_range.length_bytes - offset_bytes if length_bytes is None else length_bytes


class PeerNic(PeerObject):
    """A NIC that a peer has opened."""

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        super().__init__(peer, reply)
        self.name: str = reply["name"]
        self.gid: str = reply["gid"]

    def buffer(self, length_bytes: int, *, seed: int | None = None, access: Access = _READ_WRITE_ACCESS) -> PeerBuffer:
        """Register new host memory that contains the pattern of `seed`, or zeros if `seed` is None."""
        reply = self.peer.request("verbs.buffer", nic=self.handle_number, length_bytes=length_bytes, access=int(access))
        buffer = PeerBuffer(self.peer, reply)
        if seed is not None:
            buffer.fill(seed=seed)
        return buffer

    def register_dmabuf(
        self, fd: int, *, offset_bytes: int, length_bytes: int, address: int, access: Access = _READ_WRITE_ACCESS
    ) -> PeerRegion:
        """Make the peer register a dma-buf of this process. The peer gets a duplicate of the descriptor."""
        reply = self.peer.request(
            "verbs.dmabuf_region",
            nic=self.handle_number,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            address=address,
            access=int(access),
            descriptors=[fd],
        )
        return PeerRegion(self.peer, reply)

    def queue_pair(self, *, depth: int | None = None, **limits: int) -> PeerQueuePair:
        """Create a queue pair, and a completion queue of `depth` entries (256 if None) for it.

        The limits have the same meaning as in :meth:`gdrkit.verbs.Nic.queue_pair`.
        """
        return PeerQueuePair(
            self.peer, self.peer.request("verbs.queue_pair", nic=self.handle_number, depth=depth, limits=limits)
        )


class PeerQueuePair(PeerObject):
    """A queue pair of a peer."""

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        super().__init__(peer, reply)
        self.endpoint = Endpoint.from_dict(reply["endpoint"])

    def connect(self, remote: Endpoint, **options: int) -> None:
        """Connect the queue pair to `remote`. For the options see :meth:`gdrkit.verbs.QueuePair.connect`."""
        self.peer.request("verbs.connect", queue_pair=self.handle_number, endpoint=remote.to_dict(), options=options)

    def connect_with(self, local: QueuePair, **options: int) -> None:
        """Connect the queue pair and a queue pair of this process to each other."""
        self.connect(local.endpoint(), **options)
        local.connect(self.endpoint, **options)  # type: ignore[arg-type]

    def write(
        self,
        remote: RemoteRange,
        *,
        seed: int,
        length_bytes: int | None = None,
        local_offset_bytes: int = 0,
        pattern_offset_bytes: int = 0,
        immediate: int | None = None,
        timeout_ms: float = _COMPLETION_TIMEOUT_MS,
    ) -> Completion:
        """Write bytes of the pattern of `seed` by RDMA WRITE from a temporary buffer, and return the completion.

        Parameters
        ----------
        remote : RemoteRange
            The target memory in the process of the case.
        seed, pattern_offset_bytes : int
            The pattern, and the offset of the first byte in it; see :mod:`gdrkit.pattern`.
        length_bytes : int or None
            Number of bytes to write; None for the length of `remote`.
        local_offset_bytes : int
            Offset of the bytes in the temporary buffer.
        immediate : int or None
            The 32-bit immediate value of the request, or None.
        timeout_ms : float
            Longest wait for the completion.

        Raises
        ------
        ApiError
            The work request cannot be posted, or did not complete in time (``TIMEOUT``). A completion with an error
            status is not raised as an error, but returned.
        """
        return self._request_completion(
            "verbs.write",
            timeout_ms,
            remote=remote.to_dict(),
            seed=seed,
            length_bytes=remote.length_bytes if length_bytes is None else length_bytes,
            local_offset_bytes=local_offset_bytes,
            pattern_offset_bytes=pattern_offset_bytes,
            immediate=immediate,
        )

    def read(
        self,
        remote: RemoteRange,
        *,
        seed: int | None = None,
        length_bytes: int | None = None,
        local_offset_bytes: int = 0,
        pattern_offset_bytes: int = 0,
        timeout_ms: float = _COMPLETION_TIMEOUT_MS,
    ) -> ReadResult:
        """Read by RDMA READ into a temporary buffer of the peer.

        If `seed` is given, the peer compares the data with the pattern of `seed`.

        Raises
        ------
        DataMismatch
            The READ succeeded, but the data differs.
        ApiError
            See :meth:`write`.
        """
        reply = self._request(
            "verbs.read",
            timeout_ms,
            remote=remote.to_dict(),
            seed=seed,
            length_bytes=remote.length_bytes if length_bytes is None else length_bytes,
            local_offset_bytes=local_offset_bytes,
            pattern_offset_bytes=pattern_offset_bytes,
        )
        return ReadResult(completion=_parse_completion(reply["completion"]), sha256=reply["sha256"])

    def send(
        self,
        *,
        seed: int,
        length_bytes: int,
        pattern_offset_bytes: int = 0,
        immediate: int | None = None,
        timeout_ms: float = _COMPLETION_TIMEOUT_MS,
    ) -> Completion:
        """Send bytes of the pattern of `seed` by SEND from a temporary buffer, and return the completion."""
        return self._request_completion(
            "verbs.send",
            timeout_ms,
            seed=seed,
            length_bytes=length_bytes,
            pattern_offset_bytes=pattern_offset_bytes,
            immediate=immediate,
        )

    def receive(self, buffer: PeerBuffer | None, *, work_id: int = 0, **part: int) -> None:
        """Post a receive request. If `buffer` is None, the request receives only an immediate value.

        `part` selects the bytes of the buffer, as in :meth:`gdrkit.verbs.QueuePair.post_receive`. :meth:`wait_received`
        returns the completion.
        """
        buffer_number = None if buffer is None else buffer.handle_number
        options = {"work_id": work_id, **part}
        self.peer.request("verbs.post_receive", queue_pair=self.handle_number, buffer=buffer_number, options=options)

    def post_write(self, buffer: PeerBuffer, remote: RemoteRange, *, work_id: int, **options: Any) -> None:
        """Post a WRITE and do not wait; for the options see :meth:`gdrkit.verbs.QueuePair.post_write`."""
        self._post("verbs.post_write", buffer, work_id, options, remote=remote.to_dict())

    def post_read(self, buffer: PeerBuffer, remote: RemoteRange, *, work_id: int, **options: Any) -> None:
        """Post a READ and do not wait; for the options see :meth:`gdrkit.verbs.QueuePair.post_read`."""
        self._post("verbs.post_read", buffer, work_id, options, remote=remote.to_dict())

    def post_send(self, buffer: PeerBuffer, *, work_id: int, **options: Any) -> None:
        """Post a SEND and do not wait; for the options see :meth:`gdrkit.verbs.QueuePair.post_send`."""
        self._post("verbs.post_send", buffer, work_id, options)

    def wait(self, timeout_ms: float = _COMPLETION_TIMEOUT_MS) -> Completion:
        """Wait for the next completion of the send queue, and return it."""
        return self._request_completion("verbs.wait", timeout_ms)

    def wait_received(self, timeout_ms: float = _COMPLETION_TIMEOUT_MS) -> Completion:
        """Wait for the next completion of the receive queue, and return it."""
        return self._request_completion("verbs.wait_received", timeout_ms)

    @property
    def state(self) -> str:
        """State of the queue pair, e.g. ``RTS``."""
        state: str = self.peer.request("verbs.state", queue_pair=self.handle_number)
        return state

    def _post(
        self, operation: str, buffer: PeerBuffer, work_id: int, options: dict[str, Any], **arguments: Any
    ) -> None:
        options = {**options, "work_id": work_id}
        self.peer.request(
            operation, queue_pair=self.handle_number, buffer=buffer.handle_number, options=options, **arguments
        )

    def _request_completion(self, operation: str, timeout_ms: float, **arguments: Any) -> Completion:
        return _parse_completion(self._request(operation, timeout_ms, **arguments))

    def _request(self, operation: str, timeout_ms: float, **arguments: Any) -> Any:
        return self.peer.request(
            operation,
            request_timeout_s=timeout_ms / 1000 + _REPLY_MARGIN_S,
            queue_pair=self.handle_number,
            timeout_ms=timeout_ms,
            **arguments,
        )


def _parse_completion(fields: dict[str, Any]) -> Completion:
    """Return the completion with these fields, which the peer has sent as JSON data."""
    opcode = fields["opcode"]
    return Completion(
        **{**fields, "status": Status(fields["status"]), "opcode": None if opcode is None else CompletionOpcode(opcode)}
    )
