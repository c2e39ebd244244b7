"""A drawing of the host: its NUMA nodes, the devices at each, and the state of every pair of GPU and NIC.

The module is pure and uses facts alone. A device whose NUMA node the facts do not state is drawn at an unknown node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.routes import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.inventory import Facts
    from gdrkit.report.routes import RouteStatus

__all__ = ["Box", "Drawing", "DrawnDevice", "Link", "Node", "best_state", "drawn_devices", "make_drawing"]

WIDTH = 380
_BOX_WIDTH, _BOX_HEIGHT, _ROW = 122.0, 30.0, 37.0
_LEFT_X, _RIGHT_X = 10.0, 248.0
_HEAD, _GAP = 24.0, 10.0
_NAME_CHARACTERS, _DETAIL_CHARACTERS = 16, 21
# The states are in the order of importance for the reader.
_BY_WEIGHT = (RouteOutcome.FELL_BACK, RouteOutcome.PROVEN, RouteOutcome.UNPROVEN, RouteOutcome.NOT_POSSIBLE)


@dataclass(frozen=True, slots=True)
class DrawnDevice:
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
    """The box of a device in the drawing. ``y`` is its upper edge."""

    device: DrawnDevice
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
    devices = drawn_devices(facts, routes)
    if not devices:
        return None
    numbers = sorted({device.numa_node for device in devices}, key=lambda node: (node is None, node or 0))
    nodes: list[Node] = []
    boxes: list[Box] = []
    y = 0.0
    for number in numbers:
        of_node = [device for device in devices if device.numa_node == number]
        left = [device for device in of_node if device.kind == "gpu"]
        right = [device for device in of_node if device.kind != "gpu"]
        height = _HEAD + _ROW * max(len(left), len(right))
        nodes.append(Node("unknown NUMA node" if number is None else f"NUMA node {number}", y, height))
        for x, column in ((_LEFT_X, left), (_RIGHT_X, right)):
            boxes += [
                Box(
                    device,
                    x,
                    y + _HEAD + _ROW * row,
                    _truncate(device.name, _NAME_CHARACTERS),
                    _truncate(device.detail, _DETAIL_CHARACTERS),
                )
                for row, device in enumerate(column)
            ]
        y += height + _GAP
    links = _links(boxes, routes)
    return Drawing(tuple(nodes), tuple(boxes), links, round(y - _GAP, 1), _describe(devices, len(nodes)))


def drawn_devices(facts: Facts, routes: Iterable[RouteStatus]) -> tuple[DrawnDevice, ...]:
    """Return every device that the facts or the routes name."""
    return (*_gpus(facts, routes), *_nics(facts, routes), *_controllers(facts))


def best_state(states: Iterable[RouteOutcome]) -> RouteOutcome:
    """Return the state to draw for a pair with several routes. A fallback is shown even if another route is proven."""
    present = set(states)
    return next((state for state in _BY_WEIGHT if state in present), RouteOutcome.UNPROVEN)


def _gpus(facts: Facts, routes: Iterable[RouteStatus]) -> list[DrawnDevice]:
    functions = {gpu.address.lower(): gpu for gpu in facts.gpus}
    gpus: list[DrawnDevice] = []
    indices = set()
    for device in facts.cuda.devices if facts.cuda else ():
        function = functions.pop(device.pci_bus_id.lower(), None)
        link = _link_text(function.link_speed, function.link_width) if function else ""
        node = function.numa_node if function else None
        gpus.append(DrawnDevice(f"GPU {device.index}", "gpu", f"{device.pci_bus_id} {link}".strip(), node))
        indices.add(device.index)
    if facts.cuda is None:
        numbers = sorted({route.device_index for route in routes})
        gpus += [DrawnDevice(f"GPU {number}", "gpu", "", None) for number in numbers]
    gpus += [DrawnDevice("GPU", "gpu", address, function.numa_node) for address, function in functions.items()]
    return gpus


def _nics(facts: Facts, routes: Iterable[RouteStatus]) -> list[DrawnDevice]:
    nics = {}
    for device in facts.rdma_devices:
        rates = [port.rate for port in device.ports if port.rate]
        rate = (rates[0] or "").partition(" (")[0] if rates else ""
        detail = rate or device.pci_address or device.driver or ""
        nics[device.name] = DrawnDevice(device.name, "nic", detail, device.numa_node)
    of_verbs = [nic.name for nic in facts.verbs.nics] if facts.verbs else []
    for name in (*of_verbs, *(route.nic for route in routes)):
        nics.setdefault(name, DrawnDevice(name, "nic", "", None))
    return list(nics.values())


def _controllers(facts: Facts) -> list[DrawnDevice]:
    return [DrawnDevice(item.name, "nvme", item.model or item.transport or "", None) for item in facts.nvme]


def _links(boxes: Sequence[Box], routes: Sequence[RouteStatus]) -> tuple[Link, ...]:
    pairs: dict[tuple[str, str], list[RouteOutcome]] = {}
    for status in routes:
        pairs.setdefault((f"GPU {status.device_index}", status.nic), []).append(status.state)
    box_of = {(box.device.kind, box.device.name): box for box in boxes}
    links = []
    for (gpu, nic), states in pairs.items():
        left, right = box_of.get(("gpu", gpu)), box_of.get(("nic", nic))
        if left is not None and right is not None:
            middle = _BOX_HEIGHT / 2
            state = best_state(states).value
            links.append(Link(left.x + _BOX_WIDTH, left.y + middle, right.x, right.y + middle, state))
    # The most important links are drawn last, on top of the others.
    order = [state.value for state in reversed(_BY_WEIGHT)]
    return tuple(sorted(links, key=lambda link: order.index(link.state)))


def _link_text(speed: str | None, width: str | None) -> str:
    return f"x{width}" if speed and width and speed[:1].isdigit() else ""


def _truncate(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _describe(devices: Sequence[DrawnDevice], nodes: int) -> str:
    names = {"gpu": "GPU", "nic": "NIC", "nvme": "NVMe controller"}
    counts = {kind: sum(device.kind == kind for device in devices) for kind in names}
    parts = [f"{count} {names[kind]}{'s' if count > 1 else ''}" for kind, count in counts.items() if count]
    return f"{', '.join(parts)} at {nodes} NUMA node{'s' if nodes > 1 else ''}"
