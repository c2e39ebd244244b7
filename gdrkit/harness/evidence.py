"""The object through which a case adds values, measurements and routes to its record (the fixture ``evidence``)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gdrkit import serialization
from gdrkit.errors import UsageError
from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    import enum

    from gdrkit.errors import Api
    from gdrkit.registration import Reach

__all__ = ["Evidence"]

# The name of a number must end with one of these units.
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
_STATISTIC_SUFFIX = re.compile(r"_(p\d+|min|max|mean|median)$")


class _Device(Protocol):
    @property
    def index(self) -> int: ...


class _Nic(Protocol):
    @property
    def name(self) -> str: ...


class Evidence:
    """The evidence of one case, which the fixture ``evidence`` returns.

    ``evidence["key"] = value`` records any value that :func:`gdrkit.serialization.to_json_data` accepts.

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
        Sentences that say what the case could not prove. If there is one, the verdict is ``unproven``.
    hardware_apis : tuple of Api
        The APIs about whose hardware the case claims something; see :meth:`claim_hardware`.
    """

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.numbers: dict[str, float] = {}
        self.routes: list[ClaimedRoute] = []
        self.files: list[ClaimedFile] = []
        self.missing: list[CaseReason] = []
        self.hardware_apis: tuple[Api, ...] = ()

    def __setitem__(self, key: str, value: object) -> None:
        self.values[key] = serialization.to_json_data(value)

    def __getitem__(self, key: str) -> object:
        return self.values[key]

    def number(self, name: str, value: float) -> None:
        """Record a measurement.

        Parameters
        ----------
        name : str
            Name that ends with the unit, such as ``write_us`` or ``rate_gb_per_s``. If the value is a statistic, its
            name follows the unit, as in ``latency_ns_p50``.
        value : float
            Value in the unit that the name states.

        Raises
        ------
        UsageError
            The name has no unit.
        """
        name_without_statistic = _STATISTIC_SUFFIX.sub("", name)
        if not any(name_without_statistic.endswith(f"_{unit}") for unit in _UNITS):
            message = f"the name of the number {name!r} has no unit"
            raise UsageError(message, what_to_do="end the name with one of " + ", ".join(sorted(_UNITS)))
        self.numbers[name] = float(value)

    def unproven(self, missing: str) -> None:
        """Record that the data is correct, but `missing` was not proven. The verdict becomes ``unproven``."""
        self.missing.append(CaseReason(text=missing))

    def claim_hardware(self, *apis: Api) -> None:
        """Record that the case claims something about the hardware of these APIs.

        If one of these APIs did not run on hardware, the verdict becomes ``unproven``, with the substrate as reason.
        """
        self.hardware_apis = apis

    def route(
        self, *, device: _Device | int, nic: _Nic | str, method: enum.Enum | str, reach: Reach | None = None
    ) -> None:
        """Record the route that the data of this case took. The report uses the route only if the case passes.

        `method` is the method of registration (:class:`~gdrkit.registration.RegistrationRoute`). `reach` is the
        measurement with port counters. Without `reach`, the case does not prove the route.
        """
        claim = _make_claim(device, nic, method, None)
        if reach is not None:
            why_unproven = None if reach.state is RouteOutcome.PROVEN else reach.reason or reach.state.value
            claim = replace(claim, path=reach.path.value, peer_nic=reach.peer_nic, unproven=why_unproven)
        self.routes.append(claim)

    def fell_back(self, cause: str, *, device: _Device | int, nic: _Nic | str, method: enum.Enum | str) -> None:
        """Record that the data did not take the route of the requested `method`, and the `cause`."""
        self.routes.append(_make_claim(device, nic, method, cause))

    def file(
        self, *, device: _Device | int, mount: str, route: enum.Enum | str, fallback_cause: str | None = None
    ) -> None:
        """Record the route that the data took between a device and a file system.

        Parameters
        ----------
        device : Device or int
            The CUDA device.
        mount : str
            Mount point of the file system.
        route : Route or str
            The route: ``p2p`` or ``nvfs``, which are direct; ``posix``, ``engine`` or ``unknown``.
        fallback_cause : str or None
            Why the data took this route although a direct one was requested, or None.
        """
        self.files.append(
            ClaimedFile(
                device_index=device if isinstance(device, int) else device.index,
                mount=mount,
                way=route if isinstance(route, str) else str(route.value),
                fell_back=fallback_cause,
            )
        )


def _make_claim(
    device: _Device | int, nic: _Nic | str, method: enum.Enum | str, fallback_cause: str | None
) -> ClaimedRoute:
    return ClaimedRoute(
        device_index=device if isinstance(device, int) else device.index,
        nic=nic if isinstance(nic, str) else nic.name,
        way=method if isinstance(method, str) else str(method.value),
        fell_back=fallback_cause,
    )
