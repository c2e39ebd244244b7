"""The evidence that a case keeps for the reader of its record."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute

if TYPE_CHECKING:
    import enum

__all__ = ["Evidence"]

_UNITS = frozenset(
    [
        "bytes",
        "kib",
        "mib",
        "gib",
        "count",
        "ns",
        "us",
        "ms",
        "s",
        "s_per_gib",
        "percent",
        "ratio",
        "per_s",
        "bytes_per_s",
        "gb_per_s",
        "gib_per_s",
        "gbit_per_s",
        "mhz",
    ]
)
_STATISTIC = re.compile(r"_(p\d+|min|max|mean|median)$")


class _Device(Protocol):
    @property
    def index(self) -> int: ...


class _Nic(Protocol):
    @property
    def name(self) -> str: ...


class Evidence:
    """The evidence of one case; the fixture ``evidence``.

    ``evidence["key"] = value`` keeps any value that has a JSON form.
    """

    def __init__(self) -> None:
        self.kept: dict[str, object] = {}
        self.numbers: dict[str, float] = {}
        self.routes: list[ClaimedRoute] = []
        self.files: list[ClaimedFile] = []
        self.missing: list[CaseReason] = []

    def __setitem__(self, key: str, value: object) -> None:
        self.kept[key] = serialization.to_json_data(value)

    def __getitem__(self, key: str) -> object:
        return self.kept[key]

    def number(self, name: str, value: float) -> None:
        """Keep a measurement.

        Parameters
        ----------
        name : str
            Name with the unit at its end, before a statistic if there is one: ``write_us``, ``latency_ns_p50``,
            ``rate_gb_per_s``.
        value : float
            Value in that unit.

        Raises
        ------
        UsageError
            The name has no unit.
        """
        bare = _STATISTIC.sub("", name)
        if not any(bare.endswith(f"_{unit}") for unit in _UNITS):
            message = f"number {name!r} has no unit at its end"
            raise UsageError(message, what_to_do="end the name with one of " + ", ".join(sorted(_UNITS)))
        self.numbers[name] = float(value)

    def unproven(self, missing: str) -> None:
        """Report what was not shown although the data is right. The verdict becomes ``unproven``."""
        self.missing.append(CaseReason(text=missing))

    def route(self, *, device: _Device | int, nic: _Nic | str, way: enum.Enum | str) -> None:
        """Report the route that the bytes of this case took. It counts only if the case passes."""
        self.routes.append(_route(device, nic, way, None))

    def fell_back(self, cause: str, *, device: _Device | int, nic: _Nic | str, way: enum.Enum | str) -> None:
        """Report that the requested route was not taken, the route that the bytes took instead, and the cause."""
        self.routes.append(_route(device, nic, way, cause))

    def file(self, *, device: _Device | int, mount: str, way: enum.Enum | str, fell_back: str | None = None) -> None:
        """Report the route of the bytes between a device and the files of a mount. It counts only if the case passes.

        Parameters
        ----------
        device : Device or int
            The CUDA device.
        mount : str
            Mount point of the file system.
        way : Route or str
            The route: ``p2p`` or ``nvfs``, which are direct; ``posix``, ``engine`` or ``unknown``.
        fell_back : str or None
            Why the bytes took this route although a direct one was requested.
        """
        self.files.append(
            ClaimedFile(
                device_index=device if isinstance(device, int) else device.index,
                mount=mount,
                way=way if isinstance(way, str) else str(way.value),
                fell_back=fell_back,
            )
        )


def _route(device: _Device | int, nic: _Nic | str, way: enum.Enum | str, cause: str | None) -> ClaimedRoute:
    return ClaimedRoute(
        device_index=device if isinstance(device, int) else device.index,
        nic=nic if isinstance(nic, str) else nic.name,
        way=way if isinstance(way, str) else str(way.value),
        fell_back=cause,
    )
