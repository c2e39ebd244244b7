"""The state of each route between GPUs and NICs, and between GPUs and files, derived from the records of a run.

A route is ``proven`` under three conditions. A case that tested the route passed. Every API that the route needs ran on
hardware. The bytes took the route: between a GPU and a NIC, the counters of both ports grew by at least the transferred
bytes; between a GPU and files, the case observed a direct route. A route in any other state has a cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from gdrkit.report.record import COUNTERS_NOT_READ, ClaimedRoute, Verdict
from gdrkit.report.substrate import Substrate
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gdrkit.inventory import Facts, Profile, RouteFacts
    from gdrkit.inventory.profile import RequiredRoute
    from gdrkit.report.record import ClaimedFile, Record

__all__ = [
    "FAILED_CASE_PREFIX",
    "FileStatus",
    "RouteOutcome",
    "RouteStatus",
    "file_statuses",
    "is_required",
    "route_name",
    "route_statuses",
    "unmet_requirements",
    "why_not_hardware",
]

# The cause of a route begins with this text, before the id of the case, if a case of the route failed.
FAILED_CASE_PREFIX = "failed: "
_NIC_ROUTE_APIS = ("verbs", "cuda")
_FILE_ROUTE_APIS = ("cuda", "cufile")
# On these routes, the bytes of a file reach device memory without passing through host memory.
_DIRECT_FILE_ROUTES = ("p2p", "nvfs")
# Why port counters do not prove a route, by the word in ClaimedRoute.unproven.
_COUNTER_CAUSES = {
    COUNTERS_NOT_READ: "no case compared the port counters with the bytes (counters_not_read)",
    "counters_missing": "a port has no byte counters (counters_missing)",
    "loopback_not_counted": "the bytes stayed inside one NIC, which does not count them (loopback_not_counted)",
    "counters_did_not_grow": "a port counter grew by less than the transferred bytes (counters_did_not_grow)",
}
_METHOD_NAMES = {"dmabuf": "dma-buf", "peer_memory": "peer memory"}


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """The state of a route between a device and a NIC.

    Attributes
    ----------
    device_index, nic
        See :class:`~gdrkit.report.record.ClaimedRoute`.
    method : str
        The method of registration: ``dmabuf`` or ``peer_memory``.
    state : RouteOutcome
        The state of the route.
    cause : str
        Why the route is not proven. Empty if the route is proven.
    cases : tuple of str
        The cases that tested the route.
    fallback_case : str
        The first case whose bytes took another route. Empty if there is none.
    path : str
        ``wire`` if the bytes of a passed case went from one NIC to another, ``loopback`` if they stayed inside this
        NIC, empty if no passed case recorded a path.
    """

    device_index: int
    nic: str
    method: str
    state: RouteOutcome
    cause: str
    cases: tuple[str, ...]
    fallback_case: str = ""
    path: str = ""

    @property
    def name(self) -> str:
        """Name of the route, e.g. ``GPU 0 <- NIC mlx5_0 by dma-buf``."""
        return route_name(self.device_index, self.nic, self.method)


@dataclass(frozen=True, slots=True)
class FileStatus:
    """The state of a route between a device and the files of a mount; see :class:`RouteStatus`.

    Its `method` is the route of the bytes, such as ``nvfs``; empty if no case tested the mount.
    """

    device_index: int
    mount: str
    method: str
    state: RouteOutcome
    cause: str
    cases: tuple[str, ...]
    fallback_case: str = ""

    @property
    def name(self) -> str:
        """Name of the route, e.g. ``GPU 0 <- files of /data by nvfs``."""
        return f"GPU {self.device_index} <- files of {self.mount}" + (f" by {self.method}" if self.method else "")


def route_name(device_index: int, nic: str, method: str) -> str:
    """Return the name of a route, e.g. ``GPU 0 <- NIC mlx5_0 by dma-buf``."""
    return f"GPU {device_index} <- NIC {nic} by {_METHOD_NAMES.get(method, method)}"


def route_statuses(facts: Facts, records: Iterable[Record]) -> tuple[RouteStatus, ...]:
    """Return the state of every route from a GPU to a NIC in the facts or records, sorted by GPU and NIC."""
    claims_by_route: dict[tuple[int, str, str], list[tuple[Record, ClaimedRoute]]] = {}
    for record in records:
        for claim in record.routes:
            claims_by_route.setdefault((claim.device_index, claim.nic, claim.way), []).append((record, claim))
    registration_by_route = {(route.device_index, route.nic, route.way): route for route in facts.routes}
    statuses = []
    for route_key in sorted(registration_by_route.keys() | claims_by_route.keys()):
        route_claims = claims_by_route.get(route_key, [])
        state, cause = _decide_state_and_cause(route_claims)
        registration = registration_by_route.get(route_key)
        if not route_claims and registration is not None and not registration.possible:
            state, cause = RouteOutcome.NOT_POSSIBLE, _describe_registration_error(registration)
        cases = tuple(dict.fromkeys(record.case for record, _ in route_claims))
        fallback_case = _find_fallback_case(route_claims)
        statuses.append(
            RouteStatus(
                *route_key,
                state=state,
                cause=cause,
                cases=cases,
                fallback_case=fallback_case,
                path=_find_path(route_claims),
            )
        )
    return tuple(statuses)


def file_statuses(facts: Facts, records: Iterable[Record]) -> tuple[FileStatus, ...]:
    """Return the state of every route from a GPU to a mount in the facts or records, sorted by GPU and mount.

    A pair of GPU and mount has one status for each route that a case observed, or a single status without a route name
    if no case tested the pair.
    """
    claims_by_pair: dict[tuple[int, str], list[tuple[Record, ClaimedFile]]] = {}
    for record in records:
        for claim in record.files:
            claims_by_pair.setdefault((claim.device_index, claim.mount), []).append((record, claim))
    device_indices = [device.index for device in facts.cuda.devices] if facts.cuda else []
    possible_pairs = {(index, mount) for index in device_indices for mount in _find_shortest_mounts(facts)}
    statuses = []
    for device_index, mount in sorted(possible_pairs | claims_by_pair.keys()):
        pair_claims = claims_by_pair.get((device_index, mount), [])
        methods = sorted(
            {claim.way for _, claim in pair_claims}, key=lambda method: (method not in _DIRECT_FILE_ROUTES, method)
        ) or [""]
        for method in methods:
            route_claims = [(record, claim) for record, claim in pair_claims if claim.way == method]
            state, cause = _decide_state_and_cause(route_claims, _FILE_ROUTE_APIS)
            caveats = dict.fromkeys(_explain_substrate_of_record(record, ("cuda",)) for record, _ in route_claims)
            caveat = "; ".join(filter(None, caveats))
            if state is RouteOutcome.FELL_BACK and caveat:
                # A fallback on a software twin (a library that emulates the hardware) proves nothing about the hardware
                # of this machine.
                state, cause = RouteOutcome.UNPROVEN, f"{caveat}: {cause}"
            if state is RouteOutcome.PROVEN and method not in _DIRECT_FILE_ROUTES:
                state, cause = RouteOutcome.UNPROVEN, f"the route of the bytes was {method}, which is not direct"
            cases = tuple(dict.fromkeys(record.case for record, _ in route_claims))
            fallback_case = _find_fallback_case(route_claims)
            statuses.append(
                FileStatus(
                    device_index, mount, method, state=state, cause=cause, cases=cases, fallback_case=fallback_case
                )
            )
    return tuple(statuses)


def _find_shortest_mounts(facts: Facts) -> list[str]:
    """Return the shortest mount point of each file system on a block device."""
    shortest_by_device: dict[str, str] = {}
    for mount in facts.mounts:
        shortest = shortest_by_device.get(mount.device)
        if shortest is None or len(mount.mount_point) < len(shortest):
            shortest_by_device[mount.device] = mount.mount_point
    return sorted(shortest_by_device.values())


def unmet_requirements(profile: Profile, statuses: Sequence[RouteStatus]) -> tuple[str, ...]:
    """Return one sentence for each route that the profile requires and that was not proven."""
    unmet_texts = []
    for requirement in profile.routes:
        matching_statuses = [status for status in statuses if _matches_requirement(requirement, status)]
        if not matching_statuses:
            unmet_texts.append(
                f"there is no route GPU {requirement.device} <- NIC {requirement.nic} by {requirement.way}"
            )
        elif requirement.enough == "each":
            unmet_texts += [
                f"{status.name}: {status.cause}"
                for status in matching_statuses
                if status.state is not RouteOutcome.PROVEN
            ]
        else:
            # One proven route to each device is enough.
            unmet_texts += _describe_devices_without_proven_route(matching_statuses)
    return tuple(unmet_texts)


def _describe_devices_without_proven_route(statuses: Sequence[RouteStatus]) -> list[str]:
    proven_device_indices = {status.device_index for status in statuses if status.state is RouteOutcome.PROVEN}
    return [
        f"no route to GPU {index} is proven"
        for index in sorted({status.device_index for status in statuses} - proven_device_indices)
    ]


def _describe_registration_error(registration: RouteFacts) -> str:
    if registration.failure is None:
        return "the registration failed"
    return "; ".join(text for text in (registration.failure.message, registration.failure.what_to_do) if text)


def _decide_state_and_cause(
    claims: Sequence[tuple[Record, ClaimedRoute | ClaimedFile]], apis: Sequence[str] = _NIC_ROUTE_APIS
) -> tuple[RouteOutcome, str]:
    """Return the state of a route and its cause.

    `claims` has each record of a case that tested the route, with the claim of the case about the route. A fallback or
    a failure in one record outweighs a pass in another.
    """
    for record, claim in claims:
        if claim.fell_back is not None:
            return RouteOutcome.FELL_BACK, f"{claim.fell_back} ({record.case})"
    failed_cases = [record.case for record, _ in claims if record.verdict is Verdict.FAIL]
    if failed_cases:
        return RouteOutcome.UNPROVEN, FAILED_CASE_PREFIX + failed_cases[0]
    causes = [_explain_missing_proof(record, claim, apis) for record, claim in claims if record.verdict is Verdict.PASS]
    if "" in causes:
        return RouteOutcome.PROVEN, ""
    if causes:
        # A cause that the counters showed tells the user more than the cause that no case read the counters.
        return RouteOutcome.UNPROVEN, min(causes, key=lambda cause: cause == _COUNTER_CAUSES[COUNTERS_NOT_READ])
    for record, _ in claims:
        if record.reasons:
            return RouteOutcome.UNPROVEN, record.reasons[0].text
    return RouteOutcome.UNPROVEN, "no case used this route"


def _find_fallback_case(claims: Iterable[tuple[Record, ClaimedRoute | ClaimedFile]]) -> str:
    """Return the id of the first case with a fallback, or an empty string."""
    return next((record.case for record, claim in claims if claim.fell_back is not None), "")


def _find_path(claims: Iterable[tuple[Record, ClaimedRoute]]) -> str:
    """Return ``wire`` if a passed case used two NICs, ``loopback`` if all used a single NIC, else an empty string."""
    paths = {claim.path for record, claim in claims if record.verdict is Verdict.PASS}
    return next((path for path in ("wire", "loopback") if path in paths), "")


def _explain_missing_proof(record: Record, claim: ClaimedRoute | ClaimedFile, apis: Sequence[str]) -> str:
    """Return why a passed case does not prove its route, or an empty string if it does."""
    cause = _explain_substrate_of_record(record, apis)
    if cause or not isinstance(claim, ClaimedRoute) or claim.unproven is None:
        return cause
    return _COUNTER_CAUSES.get(claim.unproven, claim.unproven)


def _explain_substrate_of_record(record: Record, apis: Sequence[str]) -> str:
    """Return why a case proves nothing about hardware; see :func:`why_not_hardware`."""
    return why_not_hardware(record.substrate, apis)


def why_not_hardware(substrate_by_api: Mapping[str, str], apis: Sequence[str] = _NIC_ROUTE_APIS) -> str:
    """Return why nothing is proven about hardware, or an empty string if all of `apis` ran on hardware."""
    substrates = {api: substrate_by_api.get(api, Substrate.UNKNOWN.value) for api in apis}
    if all(substrate == Substrate.TWIN.value for substrate in substrates.values()):
        return "ran on software twins"
    text_by_substrate = {
        Substrate.TWIN.value: "{} ran on a software twin",
        Substrate.KERNEL_SOFTWARE.value: "{} ran on software in the kernel",
        Substrate.UNKNOWN.value: "the substrate of {} is unknown",
    }
    return "; ".join(
        text_by_substrate[substrate].format(api)
        for api, substrate in substrates.items()
        if substrate in text_by_substrate
    )


def is_required(profile: Profile, status: RouteStatus) -> bool:
    """Return whether the profile requires this route to be direct."""
    return any(_matches_requirement(requirement, status) for requirement in profile.routes)


def _matches_requirement(requirement: RequiredRoute, status: RouteStatus) -> bool:
    return (
        fnmatchcase(str(status.device_index), requirement.device)
        and fnmatchcase(status.nic, requirement.nic)
        and fnmatchcase(status.method, requirement.way)
    )
