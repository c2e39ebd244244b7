"""Memory regions: memory that a NIC may reach, and the keys to it.

Level 2. A region states the address that peers use; nobody else computes it, since it depends on how the region was
made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import check_range
from gdrkit.errors import ClosedResource
from gdrkit.handles import Handle
from gdrkit.verbs.wire import RemoteRange

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from gdrkit.verbs._rows import MadeRegion
    from gdrkit.verbs.nic import Nic

__all__ = ["Piece", "Region"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One element of a scatter/gather list: local bytes, as the NIC sees them."""

    address: int
    length_bytes: int
    lkey: int


class Region:
    """A registered piece of memory; made by the ``register_...`` methods of :class:`~gdrkit.verbs.Nic`.

    Attributes
    ----------
    nic : Nic
        Whose keys these are.
    length_bytes : int
        Its size.
    memory : memoryview or None
        The bytes of a host buffer; None for what was registered by its address, and for dma-bufs.
    """

    def __init__(
        self, nic: Nic, made: MadeRegion, *, length_bytes: int, memory: memoryview | None, keeper: object
    ) -> None:
        self.nic = nic
        self.length_bytes = length_bytes
        self.memory = memory
        self._made = made
        self._keeper = keeper
        self._closed = False
        self._handle = Handle("verbs.region")
        self._leave: Callable[[], None] = nic.adopt(self.close)

    @property
    def closed(self) -> bool:
        """Whether it was deregistered."""
        return self._closed

    @property
    def lkey(self) -> int:
        """The key for requests of this side."""
        return self._open().lkey

    @property
    def rkey(self) -> int:
        """The key for requests of the other side."""
        return self._open().rkey

    @property
    def address(self) -> int:
        """The address of the first byte in requests of this side."""
        return self._open().iova

    @property
    def remote_address(self) -> int:
        """The address of the first byte in requests of the other side."""
        return self._open().iova

    def piece(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Piece:
        """A part of it for a request of this side; None: up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return Piece(self.address + offset_bytes, length_bytes, self.lkey)

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """A part of it for the other side; None: up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return RemoteRange(address=self.remote_address + offset_bytes, rkey=self.rkey, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister; from then on its keys reach nothing. A second close does nothing.

        Raises
        ------
        ApiError
            libibverbs refused (a memory window is bound to it); the region is still there.
        """
        if self._closed:
            return
        self._made.close()
        self._closed = True
        # Only now: as long as the NIC can reach it, a host buffer must stay where it is.
        self.memory = self._keeper = None
        self._leave()
        self._handle.release()

    def _open(self) -> MadeRegion:
        if self._closed:
            what = "memory region"
            raise ClosedResource(what)
        return self._made

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"lkey={self.lkey:#x}, rkey={self.rkey:#x}"
        return f"Region({self.nic.name}, {state}, length_bytes={self.length_bytes})"
