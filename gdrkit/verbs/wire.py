"""Values that two peers exchange before they connect: the address of a queue pair, and ranges of remote memory.

Both values are sent as JSON between processes. Received data is parsed strictly: all keys and no others must be
present, and each value must have the right type and be in range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import NoReturn, Self

from gdrkit.buffers import check_range
from gdrkit.errors import Reason, UsageError

__all__ = ["Endpoint", "RemoteRange"]

_GID_PATTERN = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_VALID_MTU_BYTES = frozenset({256, 512, 1024, 2048, 4096})


class _PeerValue:
    """Base of the frozen dataclasses that a peer sends as JSON and this side parses strictly."""

    __slots__ = ()

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the value that :meth:`to_dict` of the peer serialized.

        Raises
        ------
        UsageError
            MALFORMED: `data` is not a mapping, a key is missing or unknown, or a value has a wrong type or value.
        """
        if not isinstance(data, Mapping):
            cls._refuse(f"must be an object, not {type(data).__name__}")
        field_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        missing_keys = [name for name in field_names if name not in data]
        unknown_keys = sorted(str(name) for name in data if name not in field_names)
        if missing_keys or unknown_keys:
            cls._refuse(f"lacks {missing_keys}, has unknown {unknown_keys}")
        return cls(**{name: data[name] for name in field_names})

    def to_dict(self) -> dict[str, int | str]:
        """Return the fields as a dict for JSON."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def _refuse(cls, problem: str) -> NoReturn:
        message = f"{cls.__name__} {problem}"
        raise UsageError(message, reason=Reason.MALFORMED)

    def _check_integers(self, **maximums: int) -> None:
        """Check that each named field is an int from 0 to the given maximum."""
        for name, maximum in maximums.items():
            value = getattr(self, name)
            # In Python a bool is an int, but on the wire it is not a number.
            if type(value) is not int or not 0 <= value <= maximum:
                self._refuse(f"has {name} {value!r}, which is not a number from 0 to {maximum}")


@dataclass(frozen=True, slots=True)
class RemoteRange(_PeerValue):
    """A range of a peer's memory that a region of the peer allows this side to access.

    Parameters
    ----------
    address : int
        The address of the first byte, as :attr:`Region.remote_address` of the peer's region reports it.
    rkey : int
        The rkey of the peer's region.
    length_bytes : int
        Size of the range in bytes.

    Raises
    ------
    UsageError
        MALFORMED: a value is not an int, or is out of range.
    """

    address: int
    rkey: int
    length_bytes: int

    def __post_init__(self) -> None:
        self._check_integers(address=2**64 - 1, rkey=2**32 - 1, length_bytes=2**63)

    def part(self, *, offset_bytes: int, length_bytes: int) -> RemoteRange:
        """Return a part of the range."""
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        return RemoteRange(address=self.address + offset_bytes, rkey=self.rkey, length_bytes=length_bytes)


@dataclass(frozen=True, slots=True)
class Endpoint(_PeerValue):
    """One side of a reliable connection.

    Parameters
    ----------
    qp_number : int
        Number of the queue pair, 24 bits.
    psn : int
        Packet sequence number of its first packet, 24 bits.
    gid : str
        GID of its port, eight words of four hex digits.
    lid : int
        LID of its port; 0 on Ethernet.
    mtu_bytes : int
        Largest packet of its port in bytes: 256, 512, 1024, 2048 or 4096.

    Raises
    ------
    UsageError
        MALFORMED: a value has another type or is out of range.
    """

    qp_number: int
    psn: int
    gid: str
    lid: int
    mtu_bytes: int

    def __post_init__(self) -> None:
        self._check_integers(qp_number=2**24 - 1, psn=2**24 - 1, lid=2**16 - 1, mtu_bytes=4096)
        gid: object = self.gid  # A peer is untrusted, so the value may have any type.
        if not isinstance(gid, str) or not _GID_PATTERN.fullmatch(gid):
            self._refuse(f"has gid {self.gid!r}, which is not eight words of four hex digits")
        if self.mtu_bytes not in _VALID_MTU_BYTES:
            self._refuse(f"has mtu_bytes {self.mtu_bytes}, which is not one of {sorted(_VALID_MTU_BYTES)}")
