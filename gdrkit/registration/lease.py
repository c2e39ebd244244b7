"""The right to use a registration of a cache for a while.

Level 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from gdrkit.buffers import check_range
from gdrkit.errors import ClosedResource, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.registration._entries import Entry
    from gdrkit.registration.policy import RegistrationRoute
    from gdrkit.verbs import Nic, RemoteRange
    from gdrkit.verbs.region import Piece

__all__ = ["Lease", "refuse_range"]


class Lease:
    """A range of device memory that the NICs of a cache can reach until :meth:`close`.

    Attributes
    ----------
    address : int
        Device address of its first byte.
    length_bytes : int
        Its size.
    """

    __slots__ = ("_entry", "address", "length_bytes")

    def __init__(self, entry: Entry, address: int, length_bytes: int) -> None:
        """Not for direct use; see :meth:`RegionCache.lease`."""
        self._entry: Entry | None = entry
        self.address = address
        self.length_bytes = length_bytes

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._entry is None

    @property
    def route(self) -> RegistrationRoute:
        """How the NICs came to know the memory."""
        return self._open().registration.route

    @property
    def nics(self) -> tuple[Nic, ...]:
        """Which NICs reach it."""
        return self._open().registration.nics

    def remote(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """What a peer needs to reach a part of the range through this NIC; None: up to the end.

        The key in it is that of the whole allocation: it is for peers that are trusted with all of it.
        """
        entry, offset_bytes, length_bytes = self._part(offset_bytes, length_bytes)
        return entry.registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def piece(self, nic: Nic, *, offset_bytes: int = 0, length_bytes: int | None = None) -> Piece:
        """A part of the range for a request of this side; None: up to the end."""
        entry, offset_bytes, length_bytes = self._part(offset_bytes, length_bytes)
        return entry.registration.region(nic).piece(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def close(self) -> None:
        """Give it back; a second close does nothing.

        Raises
        ------
        ApiError
            It was the last lease of a registration that is out of the cache, and libibverbs refused to deregister it;
            :meth:`RegionCache.close` tries again.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            give_back = entry.give_back  # A field that is called where it stands costs more.
            give_back(entry)

    def _open(self) -> Entry:
        if self._entry is None:
            what = "lease"
            raise ClosedResource(what)
        return self._entry

    def _part(self, offset_bytes: int, length_bytes: int | None) -> tuple[Entry, int, int]:
        entry = self._open()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return entry, self.address - entry.base + offset_bytes, length_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._entry is None else f"{self.address:#x}"
        return f"Lease({state}, length_bytes={self.length_bytes})"


def refuse_range(memory: DeviceBuffer, *, offset_bytes: int, length_bytes: int) -> NoReturn:
    """Say why this part of the memory cannot be leased: it is closed, or the range is outside of it or empty."""
    if memory.closed:
        what = "the memory to lease"
        raise ClosedResource(what)
    check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
    message = "an empty range cannot be leased"
    raise UsageError(message)
