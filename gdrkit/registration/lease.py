"""Lease of a cached registration: while a lease is open, the NICs can access the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from gdrkit.buffers import check_range
from gdrkit.errors import ClosedResource, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration._entries import CacheEntry
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Nic, RemoteRange
    from gdrkit.verbs.region import ScatterGatherElement

__all__ = ["Lease", "refuse_range"]


class Lease:
    """A range of device memory that the NICs of a cache can access until :meth:`close`.

    Attributes
    ----------
    address : int
        Device address of the first byte.
    length_bytes : int
        Size of the range in bytes.
    """

    __slots__ = ("_entry", "address", "length_bytes")

    def __init__(self, entry: CacheEntry, address: int, length_bytes: int) -> None:
        """Create a lease of `entry`. Callers use :meth:`RegionCache.lease` instead."""
        self._entry: CacheEntry | None = entry
        self.address = address
        self.length_bytes = length_bytes

    @property
    def closed(self) -> bool:
        """Whether the lease was closed."""
        return self._entry is None

    @property
    def route(self) -> RegistrationRoute:
        """The method by which the memory was registered."""
        return self._require_entry().registration.route

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The NICs that can access the range."""
        return self._require_entry().registration.nics

    def remote(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the address and the key by which a peer can access a part of the range through `nic`.

        A length of None means up to the end of the range. The key is valid for the whole allocation, so pass it only to
        peers that may access all of the allocation.
        """
        entry, offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        return entry.registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def element(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> ScatterGatherElement:
        """Return a scatter/gather element for a part of the range, for local requests.

        A length of None means up to the end of the range.
        """
        entry, offset_bytes, length_bytes = self._resolve_part(offset_bytes, length_bytes)
        return entry.registration.region(nic).element(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """End the lease. A second close does nothing.

        Raises
        ------
        ApiError
            This was the last lease of an entry that the cache has removed, and libibverbs failed to deregister the
            memory. :meth:`RegionCache.close` tries again.
        """
        entry = self._entry
        if entry is not None:
            # CPython runs no signal handler between these two statements, so an interrupted close() cannot leave the
            # item of this lease in lease_marks.
            self._entry = None
            entry.lease_marks.pop()
            finish_lease = entry.finish_lease  # Python calls a local function faster than `entry.finish_lease(entry)`.
            finish_lease(entry)

    def _require_entry(self) -> CacheEntry:
        if self._entry is None:
            resource = "lease"
            raise ClosedResource(resource)
        return self._entry

    def _resolve_part(self, offset_bytes: int, length_bytes: int | None) -> tuple[CacheEntry, int, int]:
        """Return the entry, the offset of the part in the memory of the entry, and the length of the part, in bytes."""
        entry = self._require_entry()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return entry, self.address - entry.base + offset_bytes, length_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._entry is None else f"{self.address:#x}"
        return f"Lease({state}, length_bytes={self.length_bytes})"


def refuse_range(memory: DeviceBuffer, *, offset_bytes: int, length_bytes: int) -> NoReturn:
    """Raise the error that says why a range cannot be leased.

    Either the memory is closed, or the range is empty or not inside the memory.
    """
    if memory.closed:
        resource = "the memory to lease"
        raise ClosedResource(resource)
    check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
    message = "an empty range cannot be leased"
    raise UsageError(message)
