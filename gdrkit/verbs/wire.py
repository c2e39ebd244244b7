"""What two sides tell each other before they can talk: where a queue pair is, and where bytes may be written.

Level 2, pure. Both values travel as JSON between processes, so what arrives is parsed strictly: the right keys, no
others, the right types, in range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NoReturn, Self

from gdrkit.buffers import check_range
from gdrkit.errors import Reason, UsageError

__all__ = ["Endpoint", "RemoteRange"]

_GID = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_MTUS_BYTES = frozenset({256, 512, 1024, 2048, 4096})


class _Wire:
    """A frozen dataclass that is parsed strictly."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Make one of what :meth:`to_dict` gave on another side.

        Raises
        ------
        UsageError
            MALFORMED: no mapping, a key is missing or unknown, a value has another type or is out of range.
        """
        if not isinstance(data, Mapping):
            cls._refuse(f"is no object but {type(data).__name__}")
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        missing = [name for name in names if name not in data]
        unknown = sorted(str(name) for name in data if name not in names)
        if missing or unknown:
            cls._refuse(f"lacks {missing}, has unknown {unknown}")
        return cls(**{name: data[name] for name in names})

    def to_dict(self) -> dict[str, int | str]:
        """For JSON."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        message = f"{cls.__name__} {what}"
        raise UsageError(message, reason=Reason.MALFORMED)

    def _check(self, **limits: int) -> None:
        for name, largest in limits.items():
            value = getattr(self, name)
            # bool is an int to Python and never a number on the wire.
            if type(value) is not int or not 0 <= value <= largest:
                self._refuse(f"has {name} {value!r}, which is not a number from 0 to {largest}")


@dataclass(frozen=True, slots=True)
class RemoteRange(_Wire):
    """Bytes of a peer that its region lets us reach.

    Parameters
    ----------
    address : int
        By which the peer's NIC names the first byte; whatever its region says, and nothing that is computed from
        elsewhere.
    rkey : int
        The key of its region.
    length_bytes : int
        How many bytes.
    """

    address: int
    rkey: int
    length_bytes: int

    def __post_init__(self) -> None:
        self._check(address=2**64 - 1, rkey=2**32 - 1, length_bytes=2**63)

    def part(self, *, offset_bytes: int, length_bytes: int) -> RemoteRange:
        """A part of it."""
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return RemoteRange(address=self.address + offset_bytes, rkey=self.rkey, length_bytes=length_bytes)


@dataclass(frozen=True, slots=True)
class Endpoint(_Wire):
    """One side of a reliable connection.

    Parameters
    ----------
    qp_number : int
        Number of the queue pair, 24 bits.
    psn : int
        Packet sequence number with which it begins to send, 24 bits.
    gid : str
        GID of its port, eight words of four hex digits.
    lid : int
        LID of its port; 0 on Ethernet.
    mtu_bytes : int
        Largest packet of its port: 256, 512, 1024, 2048 or 4096.
    """

    qp_number: int
    psn: int
    gid: str
    lid: int
    mtu_bytes: int

    def __post_init__(self) -> None:
        self._check(qp_number=2**24 - 1, psn=2**24 - 1, lid=2**16 - 1, mtu_bytes=4096)
        gid: object = self.gid  # What a peer sent may be anything.
        if not isinstance(gid, str) or not _GID.fullmatch(gid):
            self._refuse(f"has gid {self.gid!r}, which is not eight words of four hex digits")
        if self.mtu_bytes not in _MTUS_BYTES:
            self._refuse(f"has mtu_bytes {self.mtu_bytes}")
