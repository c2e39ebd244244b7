# ruff: noqa: ANN401 - results come from another process as JSON data.
"""Proxies, in the process of the test case, for the CUDA devices of a peer process and for their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gdrkit.harness.peer_connection import PeerObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.harness.peer_connection import PeerConnection

__all__ = ["PeerDevice", "PeerMemory"]


class PeerDevice(PeerObject):
    """A CUDA device that a peer uses."""

    def allocate(self, length_bytes: int) -> PeerMemory:
        """Allocate memory on the device by cuMemAlloc."""
        return PeerMemory(
            self.peer, self.peer.request("cuda.allocate", device=self.handle_number, length_bytes=length_bytes)
        )

    def open_ipc(self, handle: bytes, *, length_bytes: int | None = None) -> PeerMemory:
        """Open the memory of another process by its IPC handle."""
        reply = self.peer.request(
            "cuda.open_ipc", device=self.handle_number, handle=handle.hex(), length_bytes=length_bytes
        )
        return PeerMemory(self.peer, reply)

    def import_vmm(self, descriptors: Sequence[int], *, chunk_bytes: int) -> PeerMemory:
        """Import VMM memory of another process. `descriptors` has a descriptor for each chunk of `chunk_bytes` bytes.

        The peer receives duplicates of the descriptors by SCM_RIGHTS.
        """
        reply = self.peer.request(
            "cuda.import_vmm", device=self.handle_number, chunk_bytes=chunk_bytes, descriptors=list(descriptors)
        )
        return PeerMemory(self.peer, reply)


class PeerMemory(PeerObject):
    """Device memory of a peer.

    In its methods, `pattern_offset_bytes` is the offset of the first byte in the pattern of `seed`; see
    :mod:`gdrkit.pattern`.
    """

    def __init__(self, peer: PeerConnection, reply: dict[str, Any]) -> None:
        super().__init__(peer, reply)
        self.address: int = reply["address"]
        self.length_bytes: int = reply["length_bytes"]

    def export_ipc(self) -> bytes:
        """Return the IPC handle of the memory."""
        return bytes.fromhex(self.peer.request("cuda.export_ipc", memory=self.handle_number))

    def contents(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Return the bytes of the memory, read by the peer."""
        arguments: dict[str, Any] = {
            "offset_bytes": offset_bytes,
            "length_bytes": self._resolve_length(offset_bytes, length_bytes),
        }
        return bytes.fromhex(self.peer.request("cuda.contents", memory=self.handle_number, **arguments))

    def check(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, pattern_offset_bytes: int = 0
    ) -> str:
        """Make the peer compare the memory with the pattern of `seed`, and return the SHA-256 of the compared bytes.

        Raises
        ------
        DataMismatch
            The bytes differ. The error has the offset of the first difference.
        """
        digest: str = self._request_pattern("cuda.check", seed, offset_bytes, length_bytes, pattern_offset_bytes)
        return digest

    def write(
        self, *, seed: int, offset_bytes: int = 0, length_bytes: int | None = None, pattern_offset_bytes: int = 0
    ) -> None:
        """Write bytes of the pattern of `seed` into the memory."""
        self._request_pattern("cuda.write", seed, offset_bytes, length_bytes, pattern_offset_bytes)

    def _request_pattern(
        self, operation: str, seed: int, offset_bytes: int, length_bytes: int | None, pattern_offset_bytes: int
    ) -> Any:
        return self.peer.request(
            operation,
            memory=self.handle_number,
            seed=seed,
            offset_bytes=offset_bytes,
            length_bytes=self._resolve_length(offset_bytes, length_bytes),
            pattern_offset_bytes=pattern_offset_bytes,
        )

    def _resolve_length(self, offset_bytes: int, length_bytes: int | None) -> int:
        return self.length_bytes - offset_bytes if length_bytes is None else length_bytes
