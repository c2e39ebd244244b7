"""The class by which a test case uses a peer, a second process with its own NICs, memory and CUDA devices.

A case needs a peer, for example, as the other end of a connection. The fixture ``peer`` returns one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.harness.peer_connection import PeerConnection
from gdrkit.harness.peer_handles import PeerBuffer, PeerNic, PeerQueuePair
from gdrkit.harness.peer_memory import PeerDevice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdrkit.evidence import LoadedLibrary

__all__ = ["Peer"]


class Peer(PeerConnection):
    """A peer process whose NICs, memory and CUDA devices a case uses.

    Parameters
    ----------
    name : str
        Name of the peer in errors and records.
    environment : mapping or None
        Environment of the peer. If None, it is the environment of this process.
    """

    def __init__(self, name: str = "peer", *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(name, environment=environment)
        self._nic: PeerNic | None = None

    @property
    def nic(self) -> PeerNic:
        """The first active NIC of the peer. The first access opens it."""
        if self._nic is None:
            self._nic = self.open_nic()
        return self._nic

    def open_nic(self, name: str | None = None, *, port: int | None = None, gid_index: int | None = None) -> PeerNic:
        """Open the NIC `name` in the peer, or the first NIC with an active port if `name` is None."""
        reply = self.request("verbs.open_nic", name=name, port=port, gid_index=gid_index)
        return PeerNic(self, reply)

    def queue_pair(self, **limits: int) -> PeerQueuePair:
        """Create a queue pair on the first active NIC of the peer; see :meth:`PeerNic.queue_pair`."""
        return self.nic.queue_pair(**limits)

    def buffer(self, length_bytes: int, *, seed: int | None = None) -> PeerBuffer:
        """Register host memory on the first active NIC of the peer, filled with the pattern of `seed` if it is given.

        See :meth:`PeerNic.buffer`.
        """
        return self.nic.buffer(length_bytes, seed=seed)

    def device(self, index: int = 0) -> PeerDevice:
        """Open a CUDA device in the peer. The first call loads CUDA there."""
        return PeerDevice(self, self.request("cuda.device", index=index))

    def reset(self) -> tuple[LoadedLibrary, ...]:
        """Make the peer close all objects, including :attr:`nic`, and return the libraries that it has loaded."""
        self._nic = None
        return super().reset()
