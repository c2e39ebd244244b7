# ruff: noqa: ANN401 - options and answers are those of another process: plain data.
"""What a peer has made, as the case sees it: each is a number there and an object here.

Level 7. Closing is optional: a peer closes everything between two cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit.verbs import Access, Completion, Endpoint, Opcode, RemoteRange, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import QueuePair

__all__ = ["PeerBuffer", "PeerDevice", "PeerMemory", "PeerNic", "PeerQueuePair", "PeerRegion", "ReadBack"]

_ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE
_TIMEOUT_MS = 10_000.0
# How much longer to wait for the answer than the peer waits for a completion.
_SLACK_S = 20.0


@dataclass(frozen=True, slots=True)
class ReadBack:
    """How an RDMA READ by a peer ended, and the digest of what it then had."""

    completion: Completion
    sha256: str


class _Handle:
    def __init__(self, peer: Peer, made: dict[str, Any]) -> None:
        self.peer = peer
        self.number: int = made["handle"]

    def close(self) -> None:
        """Close it there."""
        self.peer.request("close", number=self.number)


class PeerRegion(_Handle):
    """A region of a peer."""

    def __init__(self, peer: Peer, made: dict[str, Any]) -> None:
        super().__init__(peer, made)
        self._remote = RemoteRange.from_dict(made["remote"])

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """How this side reaches a part of it; None: up to the end."""
        whole = self._remote
        length_bytes = whole.length_bytes - offset_bytes if length_bytes is None else length_bytes
        return whole.part(offset_bytes=offset_bytes, length_bytes=length_bytes)


class PeerBuffer(PeerRegion):
    """Registered host memory of a peer."""

    def fill(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, stream_offset_bytes: int = 0
    ) -> None:
        """Put bytes of the stream of `seed` (see :mod:`gdrkit.pattern`) into it."""
        self.peer.request(
            "verbs.fill",
            buffer=self.number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._length(offset_bytes, length_bytes),
            stream_offset_bytes=stream_offset_bytes,
        )

    def check(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, stream_offset_bytes: int = 0
    ) -> str:
        """Compare it, there, with the stream of `seed`; gives the SHA-256 of what was compared.

        Raises
        ------
        DataMismatch
            With the first wrong byte.
        """
        digest: str = self.peer.request(
            "verbs.check",
            buffer=self.number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._length(offset_bytes, length_bytes),
            stream_offset_bytes=stream_offset_bytes,
        )
        return digest

    def contents(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Its bytes."""
        length_bytes = self._length(offset_bytes, length_bytes)
        return bytes.fromhex(
            self.peer.request(
                "verbs.contents", buffer=self.number, offset_bytes=offset_bytes, length_bytes=length_bytes
            )
        )

    def _length(self, offset_bytes: int, length_bytes: int | None) -> int:
        return self._remote.length_bytes - offset_bytes if length_bytes is None else length_bytes


class PeerNic(_Handle):
    """A NIC that a peer has opened."""

    def __init__(self, peer: Peer, made: dict[str, Any]) -> None:
        super().__init__(peer, made)
        self.name: str = made["name"]
        self.gid: str = made["gid"]

    def buffer(self, length_bytes: int, *, seed: int | None = None, access: Access = _ALL_ACCESS) -> PeerBuffer:
        """New registered host memory: zeros, or from its first byte on the stream of `seed`."""
        made = self.peer.request("verbs.buffer", nic=self.number, length_bytes=length_bytes, access=int(access))
        buffer = PeerBuffer(self.peer, made)
        if seed is not None:
            buffer.fill(seed=seed)
        return buffer

    def register_dmabuf(
        self, fd: int, *, offset_bytes: int, length_bytes: int, address: int, access: Access = _ALL_ACCESS
    ) -> PeerRegion:
        """Have the peer register a dma-buf of this process; it gets a descriptor of its own."""
        made = self.peer.request(
            "verbs.dmabuf_region",
            nic=self.number,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            address=address,
            access=int(access),
            descriptors=[fd],
        )
        return PeerRegion(self.peer, made)

    def queue_pair(self, *, depth: int | None = None, **limits: int) -> PeerQueuePair:
        """A queue pair with its own completion queue, for `depth` completions; limits are those of
        :meth:`gdrkit.verbs.Nic.queue_pair`.
        """
        return PeerQueuePair(
            self.peer, self.peer.request("verbs.queue_pair", nic=self.number, depth=depth, limits=limits)
        )


class PeerQueuePair(_Handle):
    """One side of a connection, in a peer."""

    def __init__(self, peer: Peer, made: dict[str, Any]) -> None:
        super().__init__(peer, made)
        self.endpoint = Endpoint.from_dict(made["endpoint"])

    def connect(self, remote: Endpoint, **options: int) -> None:
        """Connect it to `remote`; options are those of :meth:`gdrkit.verbs.QueuePair.connect`."""
        self.peer.request("verbs.connect", queue_pair=self.number, endpoint=remote.to_dict(), options=options)

    def join(self, ours: QueuePair, **options: int) -> None:
        """Connect it and a queue pair of this process to each other."""
        self.connect(ours.endpoint(), **options)
        ours.connect(self.endpoint, **options)  # type: ignore[arg-type]

    def write(
        self,
        remote: RemoteRange,
        *,
        seed: int,
        length_bytes: int | None = None,
        local_offset_bytes: int = 0,
        stream_offset_bytes: int = 0,
        immediate: int | None = None,
        timeout_ms: float = _TIMEOUT_MS,
    ) -> Completion:
        """RDMA WRITE of bytes of the stream of `seed` from a buffer of its own, and its completion.

        Parameters
        ----------
        remote : RemoteRange
            Where to, in this process.
        seed, stream_offset_bytes : int
            Which bytes; see :mod:`gdrkit.pattern`.
        length_bytes : int or None
            How many; as many as `remote` has when None.
        local_offset_bytes : int
            Where they begin in the peer's buffer.
        immediate : int or None
            32 bits to come with them.
        timeout_ms : float
            How long to wait for the completion.

        Raises
        ------
        ApiError
            The request was refused, or (``TIMEOUT``) did not complete. One that completed with an error is returned.
        """
        return self._completed(
            "verbs.write",
            timeout_ms,
            remote=remote.to_dict(),
            seed=seed,
            length_bytes=remote.length_bytes if length_bytes is None else length_bytes,
            local_offset_bytes=local_offset_bytes,
            stream_offset_bytes=stream_offset_bytes,
            immediate=immediate,
        )

    def read(
        self,
        remote: RemoteRange,
        *,
        seed: int | None = None,
        length_bytes: int | None = None,
        local_offset_bytes: int = 0,
        stream_offset_bytes: int = 0,
        timeout_ms: float = _TIMEOUT_MS,
    ) -> ReadBack:
        """RDMA READ into a buffer of its own; with a `seed`, what arrived is compared with that stream, there.

        Raises
        ------
        DataMismatch
            The READ succeeded with other bytes.
        ApiError
            As :meth:`write`.
        """
        answer = self._request(
            "verbs.read",
            timeout_ms,
            remote=remote.to_dict(),
            seed=seed,
            length_bytes=remote.length_bytes if length_bytes is None else length_bytes,
            local_offset_bytes=local_offset_bytes,
            stream_offset_bytes=stream_offset_bytes,
        )
        return ReadBack(completion=_completion(answer["completion"]), sha256=answer["sha256"])

    def send(
        self,
        *,
        seed: int,
        length_bytes: int,
        stream_offset_bytes: int = 0,
        immediate: int | None = None,
        timeout_ms: float = _TIMEOUT_MS,
    ) -> Completion:
        """SEND bytes of the stream of `seed`, and its completion."""
        return self._completed(
            "verbs.send",
            timeout_ms,
            seed=seed,
            length_bytes=length_bytes,
            stream_offset_bytes=stream_offset_bytes,
            immediate=immediate,
        )

    def receive(self, buffer: PeerBuffer | None, *, work_id: int = 0, **part: int) -> None:
        """Offer a buffer (None: for an immediate) to the next message; :meth:`wait_received` says when it came."""
        number = None if buffer is None else buffer.number
        options = {"work_id": work_id, **part}
        self.peer.request("verbs.post_receive", queue_pair=self.number, buffer=number, options=options)

    def post_write(self, buffer: PeerBuffer, remote: RemoteRange, *, work_id: int, **options: Any) -> None:
        """Only post; options are those of :meth:`gdrkit.verbs.QueuePair.post_write`."""
        self._post("verbs.post_write", buffer, work_id, options, remote=remote.to_dict())

    def post_read(self, buffer: PeerBuffer, remote: RemoteRange, *, work_id: int, **options: Any) -> None:
        """Only post; options are those of :meth:`gdrkit.verbs.QueuePair.post_read`."""
        self._post("verbs.post_read", buffer, work_id, options, remote=remote.to_dict())

    def post_send(self, buffer: PeerBuffer, *, work_id: int, **options: Any) -> None:
        """Only post; options are those of :meth:`gdrkit.verbs.QueuePair.post_send`."""
        self._post("verbs.post_send", buffer, work_id, options)

    def wait(self, timeout_ms: float = _TIMEOUT_MS) -> Completion:
        """The next completion of its send queue."""
        return self._completed("verbs.wait", timeout_ms)

    def wait_received(self, timeout_ms: float = _TIMEOUT_MS) -> Completion:
        """The next completion of its receive queue."""
        return self._completed("verbs.wait_received", timeout_ms)

    @property
    def state(self) -> str:
        """E.g. ``RTS``."""
        state: str = self.peer.request("verbs.state", queue_pair=self.number)
        return state

    def _post(self, operation: str, buffer: PeerBuffer, work_id: int, options: dict[str, Any], **more: Any) -> None:
        options = {**options, "work_id": work_id}
        self.peer.request(operation, queue_pair=self.number, buffer=buffer.number, options=options, **more)

    def _completed(self, operation: str, timeout_ms: float, **arguments: Any) -> Completion:
        return _completion(self._request(operation, timeout_ms, **arguments))

    def _request(self, operation: str, timeout_ms: float, **arguments: Any) -> Any:
        return self.peer.request(
            operation,
            request_timeout_s=timeout_ms / 1000 + _SLACK_S,
            queue_pair=self.number,
            timeout_ms=timeout_ms,
            **arguments,
        )


class PeerDevice(_Handle):
    """A CUDA device that a peer uses."""

    def allocate(self, length_bytes: int) -> PeerMemory:
        """Memory by cuMemAlloc."""
        return PeerMemory(self.peer, self.peer.request("cuda.allocate", device=self.number, length_bytes=length_bytes))

    def open_ipc(self, handle: bytes, *, length_bytes: int | None = None) -> PeerMemory:
        """Memory of another process by its IPC handle."""
        made = self.peer.request("cuda.open_ipc", device=self.number, handle=handle.hex(), length_bytes=length_bytes)
        return PeerMemory(self.peer, made)

    def import_vmm(self, descriptors: Sequence[int], *, chunk_bytes: int) -> PeerMemory:
        """Chunks of VMM memory by their descriptors, which travel by SCM_RIGHTS."""
        made = self.peer.request(
            "cuda.import_vmm", device=self.number, chunk_bytes=chunk_bytes, descriptors=list(descriptors)
        )
        return PeerMemory(self.peer, made)


class PeerMemory(_Handle):
    """Device memory as a peer has it."""

    def __init__(self, peer: Peer, made: dict[str, Any]) -> None:
        super().__init__(peer, made)
        self.address: int = made["address"]
        self.length_bytes: int = made["length_bytes"]

    def export_ipc(self) -> bytes:
        """Its IPC handle."""
        return bytes.fromhex(self.peer.request("cuda.export_ipc", memory=self.number))

    def contents(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Its bytes, read by the peer."""
        arguments: dict[str, Any] = {
            "offset_bytes": offset_bytes,
            "length_bytes": self._length(offset_bytes, length_bytes),
        }
        return bytes.fromhex(self.peer.request("cuda.contents", memory=self.number, **arguments))

    def check(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, stream_offset_bytes: int = 0
    ) -> str:
        """Compare it, there, with the stream of `seed`; gives the SHA-256 of what was compared.

        Raises
        ------
        DataMismatch
            With the first wrong byte.
        """
        digest: str = self._stream("cuda.check", seed, offset_bytes, length_bytes, stream_offset_bytes)
        return digest

    def write(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, stream_offset_bytes: int = 0
    ) -> None:
        """Put bytes of the stream of `seed` into it."""
        self._stream("cuda.write", seed, offset_bytes, length_bytes, stream_offset_bytes)

    def _stream(self, operation: str, seed: int, offset_bytes: int, length_bytes: int | None, begin: int) -> Any:
        return self.peer.request(
            operation,
            memory=self.number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._length(offset_bytes, length_bytes),
            stream_offset_bytes=begin,
        )

    def _length(self, offset_bytes: int, length_bytes: int | None) -> int:
        return self.length_bytes - offset_bytes if length_bytes is None else length_bytes


def _completion(data: dict[str, Any]) -> Completion:
    opcode = data["opcode"]
    return Completion(
        **{**data, "status": Status(data["status"]), "opcode": None if opcode is None else Opcode(opcode)}
    )
