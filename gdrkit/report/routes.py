"""The state of each route between devices and NICs, and between devices and files, with its cause.

A route is ``proven`` if a case on it passed and every API of the route ran on hardware. Every other state has a cause.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.substrate import Substrate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.inventory import Facts, Profile, RouteFacts
    from gdrkit.inventory.profile import RequiredRoute
    from gdrkit.report.record import ClaimedFile, ClaimedRoute, Record

__all__ = [
    "FileStatus",
    "RouteState",
    "RouteStatus",
    "file_statuses",
    "is_required",
    "route_name",
    "route_statuses",
    "unmet_requirements",
]

_APIS = ("verbs", "cuda")
_FILE_APIS = ("cuda", "cufile")
# These routes from a file into device memory do not pass through host memory.
_DIRECT = ("p2p", "nvfs")
_WAYS = {"dmabuf": "dma-buf", "peer_memory": "peer memory"}


class RouteState(enum.Enum):
    """The state of a route on this machine."""

    PROVEN = "proven"
    UNPROVEN = "unproven"
    FELL_BACK = "fell_back"
    NOT_POSSIBLE = "not_possible"


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """The state of a route between a device and a NIC.

    Attributes
    ----------
    device_index, nic, way
        See :class:`~gdrkit.report.record.ClaimedRoute`.
    state : RouteState
        The state of the route.
    cause : str
        Why the route is not proven.
    cases : tuple of str
        The cases that were about the route.
    shown_by : str
        The case that showed that the route fell back; empty if none did.
    """

    device_index: int
    nic: str
    way: str
    state: RouteState
    cause: str
    cases: tuple[str, ...]
    shown_by: str = ""

    @property
    def name(self) -> str:
        """Name of the route, e.g. ``GPU 0 <- NIC mlx5_0 by dma-buf``."""
        return route_name(self.device_index, self.nic, self.way)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The state of a route between a device and the files of a mount; see :class:`RouteStatus`."""

    device_index: int
    mount: str
    way: str
    state: RouteState
    cause: str
    cases: tuple[str, ...]
    shown_by: str = ""

    @property
    def name(self) -> str:
        """Name of the route, e.g. ``GPU 0 <- files of /data by nvfs``."""
        return f"GPU {self.device_index} <- files of {self.mount}" + (f" by {self.way}" if self.way else "")


def route_name(device_index: int, nic: str, way: str) -> str:
    """Return the name of a route, e.g. ``GPU 0 <- NIC mlx5_0 by dma-buf``."""
    return f"GPU {device_index} <- NIC {nic} by {_WAYS.get(way, way)}"


def route_statuses(facts: Facts, records: Iterable[Record]) -> tuple[RouteStatus, ...]:
    """Return every route that the facts or a case name, in order of device, NIC and path."""
    claims: dict[tuple[int, str, str], list[tuple[Record, ClaimedRoute]]] = {}
    for record in records:
        for route in record.routes:
            claims.setdefault((route.device_index, route.nic, route.way), []).append((record, route))
    asked = {(route.device_index, route.nic, route.way): route for route in facts.routes}
    found = []
    for key in sorted(asked.keys() | claims.keys()):
        about = claims.get(key, [])
        state, cause = _judge(about)
        tried = asked.get(key)
        if not about and tried is not None and not tried.possible:
            state, cause = RouteState.NOT_POSSIBLE, _refusal(tried)
        cases = tuple(dict.fromkeys(record.case for record, _ in about))
        found.append(RouteStatus(*key, state=state, cause=cause, cases=cases, shown_by=_fallen(about)))
    return tuple(found)


def file_statuses(facts: Facts, records: Iterable[Record]) -> tuple[FileStatus, ...]:
    """Return every pair of device and mount that the facts or a case name, in order of device and mount."""
    claims: dict[tuple[int, str], list[tuple[Record, ClaimedFile]]] = {}
    for record in records:
        for file in record.files:
            claims.setdefault((file.device_index, file.mount), []).append((record, file))
    devices = [device.index for device in facts.cuda.devices] if facts.cuda else []
    known = {(index, mount) for index in devices for mount in _file_systems(facts)}
    found = []
    for device_index, mount in sorted(known | claims.keys()):
        about = claims.get((device_index, mount), [])
        ways = sorted({file.way for _, file in about}, key=lambda way: (way not in _DIRECT, way)) or [""]
        for way in ways:
            mine = [(record, file) for record, file in about if file.way == way]
            state, cause = _judge(mine, _FILE_APIS)
            beneath = "; ".join(dict.fromkeys(filter(None, (_not_hardware(record, ("cuda",)) for record, _ in mine))))
            if state is RouteState.FELL_BACK and beneath:
                # The behaviour of software says nothing about this machine.
                state, cause = RouteState.UNPROVEN, f"{beneath}: {cause}"
            if state is RouteState.PROVEN and way not in _DIRECT:
                state, cause = RouteState.UNPROVEN, f"the bytes went by {way}, which is not direct"
            cases = tuple(dict.fromkeys(record.case for record, _ in mine))
            shown_by = _fallen(mine)
            found.append(FileStatus(device_index, mount, way, state=state, cause=cause, cases=cases, shown_by=shown_by))
    return tuple(found)


def _file_systems(facts: Facts) -> list[str]:
    """Return one mount of each file system on a block device: the one with the shortest path."""
    nearest: dict[str, str] = {}
    for mount in facts.mounts:
        before = nearest.get(mount.device)
        if before is None or len(mount.mount_point) < len(before):
            nearest[mount.device] = mount.mount_point
    return sorted(nearest.values())


def unmet_requirements(profile: Profile, statuses: Sequence[RouteStatus]) -> tuple[str, ...]:
    """Return one sentence for each route that the profile requires and that was not proven.

    The result is empty if all required routes are proven, or none is required.
    """
    missing = []
    for required in profile.routes:
        matching = [status for status in statuses if _matches(required, status)]
        if not matching:
            missing.append(f"no route GPU {required.device} <- NIC {required.nic} by {required.way} exists here")
        elif required.enough == "each":
            missing += [
                f"{status.name}: {status.cause}" for status in matching if status.state is not RouteState.PROVEN
            ]
        else:
            missing += _devices_without(matching)
    return tuple(missing)


def _devices_without(statuses: Sequence[RouteStatus]) -> list[str]:
    proven = {status.device_index for status in statuses if status.state is RouteState.PROVEN}
    return [
        f"no route to GPU {index} is proven" for index in sorted({status.device_index for status in statuses} - proven)
    ]


def _refusal(tried: RouteFacts) -> str:
    if tried.failure is None:
        return "registration refused it"
    return "; ".join(text for text in (tried.failure.message, tried.failure.what_to_do) if text)


def _judge(
    about: Sequence[tuple[Record, ClaimedRoute | ClaimedFile]], apis: Sequence[str] = _APIS
) -> tuple[RouteState, str]:
    """Return the state of a route and its cause. A fallback or failure of any case outweighs a pass."""
    for record, route in about:
        if route.fell_back is not None:
            return RouteState.FELL_BACK, f"{route.fell_back} ({record.case})"
    failed = [record.case for record, _ in about if record.verdict is Verdict.FAIL]
    if failed:
        return RouteState.UNPROVEN, f"failed: {failed[0]}"
    passed = [record for record, _ in about if record.verdict is Verdict.PASS]
    causes = [_not_hardware(record, apis) for record in passed]
    if "" in causes:
        return RouteState.PROVEN, ""
    if causes:
        return RouteState.UNPROVEN, causes[0]
    for record, _ in about:
        if record.reasons:
            return RouteState.UNPROVEN, record.reasons[0].text
    return RouteState.UNPROVEN, "no case went this way"


def _fallen(about: Iterable[tuple[Record, ClaimedRoute | ClaimedFile]]) -> str:
    """Return the case that :func:`_judge` reports as fallen back, or an empty text."""
    return next((record.case for record, route in about if route.fell_back is not None), "")


def _not_hardware(record: Record, apis: Sequence[str]) -> str:
    """Return why a case that passed proves nothing about hardware; empty if it proves something."""
    on = {api: record.substrate.get(api, Substrate.UNKNOWN.value) for api in apis}
    if all(name == Substrate.TWIN.value for name in on.values()):
        return "ran on software twins"
    words = {
        Substrate.TWIN.value: "{} ran on a software twin",
        Substrate.KERNEL_SOFTWARE.value: "{} ran on software in the kernel",
        Substrate.UNKNOWN.value: "it is not known on what {} ran",
    }
    return "; ".join(words[name].format(api) for api, name in on.items() if name in words)


def is_required(profile: Profile, status: RouteStatus) -> bool:
    """Return whether the profile requires this route to be direct."""
    return any(_matches(required, status) for required in profile.routes)


def _matches(required: RequiredRoute, status: RouteStatus) -> bool:
    return (
        fnmatchcase(str(status.device_index), required.device)
        and fnmatchcase(status.nic, required.nic)
        and fnmatchcase(status.way, required.way)
    )
