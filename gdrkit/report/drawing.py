"""A drawing of the host: its NUMA nodes, the devices at each, and the state of every pair of GPU and NIC.

The module is pure and uses facts alone. A NUMA node that the facts do not give is drawn as not known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.routes import RouteState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.inventory import Facts
    from gdrkit.report.routes import RouteStatus

__all__ = ["Box", "Drawing", "Link", "Node", "Place", "best_state", "make_drawing", "places"]

WIDTH = 380
_BOX_WIDTH, _BOX_HEIGHT, _ROW = 122.0, 30.0, 37.0
_LEFT_X, _RIGHT_X = 10.0, 248.0
_HEAD, _GAP = 24.0, 10.0
_NAME_CHARACTERS, _DETAIL_CHARACTERS = 16, 21
# The states are in the order of importance for the reader.
_BY_WEIGHT = (RouteState.FELL_BACK, RouteState.PROVEN, RouteState.UNPROVEN, RouteState.NOT_POSSIBLE)


@dataclass(frozen=True, slots=True)
class Place:
    """A device that is the source or the target of transfers.

    Attributes
    ----------
    name : str
        Name of the device: ``GPU 0``, ``mlx5_0``, ``nvme0``.
    kind : str
        Type of the device: ``gpu``, ``nic`` or ``nvme``.
    detail : str
        Its PCI function and link; empty if they are not known.
    numa_node : int or None
        The NUMA node nearest to it.
    """

    name: str
    kind: str
    detail: str
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Box:
    """A device in the drawing. ``y`` is its upper edge."""

    place: Place
    x: float
    y: float
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node in the drawing."""

    label: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Link:
    """A line between a GPU and a NIC."""

    x1: float
    y1: float
    x2: float
    y2: float
    state: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The whole drawing."""

    nodes: tuple[Node, ...]
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    height: float
    words: str
    width: int = WIDTH
    box_width: float = _BOX_WIDTH
    box_height: float = _BOX_HEIGHT


def make_drawing(facts: Facts, routes: Sequence[RouteStatus]) -> Drawing | None:
    """Return the layout of the drawing, or None if there is nothing to draw."""
    found = places(facts, routes)
    if not found:
        return None
    numbers = sorted({place.numa_node for place in found}, key=lambda node: (node is None, node or 0))
    nodes: list[Node] = []
    boxes: list[Box] = []
    y = 0.0
    for number in numbers:
        here = [place for place in found if place.numa_node == number]
        left = [place for place in here if place.kind == "gpu"]
        right = [place for place in here if place.kind != "gpu"]
        height = _HEAD + _ROW * max(len(left), len(right))
        nodes.append(Node("memory node not known" if number is None else f"memory node {number}", y, height))
        for x, column in ((_LEFT_X, left), (_RIGHT_X, right)):
            boxes += [
                Box(
                    place,
                    x,
                    y + _HEAD + _ROW * row,
                    _cut(place.name, _NAME_CHARACTERS),
                    _cut(place.detail, _DETAIL_CHARACTERS),
                )
                for row, place in enumerate(column)
            ]
        y += height + _GAP
    links = _links(boxes, routes)
    return Drawing(tuple(nodes), tuple(boxes), links, round(y - _GAP, 1), _words(found, len(nodes)))


def places(facts: Facts, routes: Iterable[RouteStatus]) -> tuple[Place, ...]:
    """Return every device that the facts or the routes name."""
    return (*_gpus(facts, routes), *_nics(facts, routes), *_controllers(facts))


def best_state(states: Iterable[RouteState]) -> RouteState:
    """Return the state to draw for a pair with several routes. A fallback is shown even if another route is proven."""
    found = set(states)
    return next((state for state in _BY_WEIGHT if state in found), RouteState.UNPROVEN)


def _gpus(facts: Facts, routes: Iterable[RouteStatus]) -> list[Place]:
    functions = {gpu.address.lower(): gpu for gpu in facts.gpus}
    found: list[Place] = []
    indices = set()
    for device in facts.cuda.devices if facts.cuda else ():
        function = functions.pop(device.pci_bus_id.lower(), None)
        link = _link_words(function.link_speed, function.link_width) if function else ""
        node = function.numa_node if function else None
        found.append(Place(f"GPU {device.index}", "gpu", f"{device.pci_bus_id} {link}".strip(), node))
        indices.add(device.index)
    if facts.cuda is None:
        found += [Place(f"GPU {index}", "gpu", "", None) for index in sorted({it.device_index for it in routes})]
    found += [Place("GPU", "gpu", address, function.numa_node) for address, function in functions.items()]
    return found


def _nics(facts: Facts, routes: Iterable[RouteStatus]) -> list[Place]:
    found = {}
    for device in facts.rdma_devices:
        rates = [port.rate for port in device.ports if port.rate]
        rate = (rates[0] or "").partition(" (")[0] if rates else ""
        detail = rate or device.pci_address or device.driver or ""
        found[device.name] = Place(device.name, "nic", detail, device.numa_node)
    for name in (*(nic.name for nic in (facts.verbs.nics if facts.verbs else ())), *(it.nic for it in routes)):
        found.setdefault(name, Place(name, "nic", "", None))
    return list(found.values())


def _controllers(facts: Facts) -> list[Place]:
    return [Place(item.name, "nvme", item.model or item.transport or "", None) for item in facts.nvme]


def _links(boxes: Sequence[Box], routes: Sequence[RouteStatus]) -> tuple[Link, ...]:
    pairs: dict[tuple[str, str], list[RouteState]] = {}
    for status in routes:
        pairs.setdefault((f"GPU {status.device_index}", status.nic), []).append(status.state)
    at = {(box.place.kind, box.place.name): box for box in boxes}
    found = []
    for (gpu, nic), states in pairs.items():
        one, other = at.get(("gpu", gpu)), at.get(("nic", nic))
        if one is not None and other is not None:
            middle = _BOX_HEIGHT / 2
            state = best_state(states).value
            found.append(Link(one.x + _BOX_WIDTH, one.y + middle, other.x, other.y + middle, state))
    # The most important links are drawn last, on top of the others.
    order = [state.value for state in reversed(_BY_WEIGHT)]
    return tuple(sorted(found, key=lambda link: order.index(link.state)))


def _link_words(speed: str | None, width: str | None) -> str:
    return f"x{width}" if speed and width and speed[:1].isdigit() else ""


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _words(found: Sequence[Place], nodes: int) -> str:
    kinds = {"gpu": "GPU", "nic": "NIC", "nvme": "NVMe controller"}
    counts = {kind: sum(place.kind == kind for place in found) for kind in kinds}
    said = [f"{count} {kinds[kind]}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    return f"{', '.join(said)} at {nodes} memory node{'s' if nodes > 1 else ''}"
