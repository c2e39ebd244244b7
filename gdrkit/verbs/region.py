"""Memory regions: memory that a NIC can access, and its keys.

Local requests and peers address a region by its iova. The call that registers the region determines the iova. So other
code takes the iova from the region and never computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.buffers import check_range
from gdrkit.handles import Resource
from gdrkit.verbs.wire import RemoteRange

if TYPE_CHECKING:
    from gdrkit.verbs._structures import NativeRegion
    from gdrkit.verbs.context import NicContext

__all__ = ["Region", "ScatterGatherElement"]


@dataclass(frozen=True, slots=True)
class ScatterGatherElement:
    """A scatter/gather element: local bytes as the NIC addresses them (``ibv_sge``)."""

    address: int
    length_bytes: int
    lkey: int


class Region(Resource):
    """A registered range of memory; made by the ``register_...`` methods of :class:`~gdrkit.verbs.Nic`.

    Attributes
    ----------
    nic : NicContext
        The NIC for which the keys are valid.
    length_bytes : int
        Size of the region in bytes.
    memory : memoryview or None
        The bytes of a host buffer. None for dma-bufs and for memory that was registered by its address.

    The constructor's `buffer_export` is an object that exports a host buffer by Python's buffer protocol, or None for
    other memory. While this object exists, the owner of the buffer cannot move or resize it.
    """

    def __init__(
        self,
        nic: NicContext,
        native: NativeRegion,
        *,
        length_bytes: int,
        memory: memoryview | None,
        buffer_export: object,
    ) -> None:
        self.nic = nic
        self.length_bytes = length_bytes
        self.memory = memory
        self._native = native
        self._buffer_export = buffer_export
        super().__init__("verbs.region", name="memory region", on_close=nic.on_close, size_bytes=length_bytes)

    @property
    def lkey(self) -> int:
        """The key for local requests."""
        return self._require_native().lkey

    @property
    def rkey(self) -> int:
        """The key for requests of peers."""
        return self._require_native().rkey

    @property
    def address(self) -> int:
        """The address of the first byte in local requests."""
        return self._require_native().iova

    @property
    def remote_address(self) -> int:
        """The address of the first byte in requests of peers. It equals :attr:`address`: both are the iova."""
        return self._require_native().iova

    def element(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> ScatterGatherElement:
        """Return a scatter/gather element for a part of the region, for local requests.

        A length of None means up to the end.
        """
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return ScatterGatherElement(self.address + offset_bytes, length_bytes, self.lkey)

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the address, rkey and length of a part of the region. A length of None means up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return RemoteRange(address=self.remote_address + offset_bytes, rkey=self.rkey, length_bytes=length_bytes)

    def close(self) -> None:
        """Deregister the region, so that its keys become invalid. A second close does nothing.

        Raises
        ------
        ApiError
            libibverbs failed to deregister (for example, a memory window is bound to the region). The region still
            exists.
        """
        super().close()

    def _release(self) -> None:
        self._native.close()
        # The references keep a host buffer at its address, so they are dropped only after the deregistration.
        self.memory = self._buffer_export = None

    def _require_native(self) -> NativeRegion:
        self._check_open()
        return self._native

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"lkey={self.lkey:#x}, rkey={self.rkey:#x}"
        return f"Region({self.nic.name}, {state}, length_bytes={self.length_bytes})"
