"""The evidence of a case: values, measurements and routes for its record."""

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
    """The evidence of one case, the value of the fixture ``evidence``.

    ``evidence["key"] = value`` records any value that has a JSON form.

    Attributes
    ----------
    values : mapping
        The recorded values as JSON data, by key.
    numbers : mapping
        The measurements, by name.
    routes : list of ClaimedRoute
        The routes between devices and NICs.
    files : list of ClaimedFile
        The routes between devices and file systems.
    missing : list of CaseReason
        The missing proofs.
    """

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.numbers: dict[str, float] = {}
        self.routes: list[ClaimedRoute] = []
        self.files: list[ClaimedFile] = []
        self.missing: list[CaseReason] = []

    def __setitem__(self, key: str, value: object) -> None:
        self.values[key] = serialization.to_json_data(value)

    def __getitem__(self, key: str) -> object:
        return self.values[key]

    def number(self, name: str, value: float) -> None:
        """Record a measurement.

        Parameters
        ----------
        name : str
            Name that ends with the unit and, if the value is a statistic, its name: ``write_us``, ``latency_ns_p50``,
            ``rate_gb_per_s``.
        value : float
            Value in that unit.

        Raises
        ------
        UsageError
            The name has no unit.
        """
        without_statistic = _STATISTIC.sub("", name)
        if not any(without_statistic.endswith(f"_{unit}") for unit in _UNITS):
            message = f"the name of the number {name!r} has no unit"
            raise UsageError(message, what_to_do="end the name with one of " + ", ".join(sorted(_UNITS)))
        self.numbers[name] = float(value)

    def unproven(self, missing: str) -> None:
        """Record a missing proof of a case whose data is correct. The verdict becomes ``unproven``."""
        self.missing.append(CaseReason(text=missing))

    def route(self, *, device: _Device | int, nic: _Nic | str, way: enum.Enum | str) -> None:
        """Record the route of the data of this case. It counts only if the case passes."""
        self.routes.append(_route(device, nic, way, None))

    def fell_back(self, cause: str, *, device: _Device | int, nic: _Nic | str, way: enum.Enum | str) -> None:
        """Record that the data took the route `way` instead of the requested one, and the cause."""
        self.routes.append(_route(device, nic, way, cause))

    def file(self, *, device: _Device | int, mount: str, way: enum.Enum | str, fell_back: str | None = None) -> None:
        """Record the route of the data between a device and a file system. It counts only if the case passes.

        Parameters
        ----------
        device : Device or int
            The CUDA device.
        mount : str
            Mount point of the file system.
        way : Route or str
            The route: ``p2p`` or ``nvfs``, which are direct; ``posix``, ``engine`` or ``unknown``.
        fell_back : str or None
            Why the data took this route although a direct one was requested, or None.
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
