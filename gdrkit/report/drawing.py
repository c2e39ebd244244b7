"""Layout of the drawing of a host in the report page: NUMA nodes, their devices, and lines between GPUs and NICs.

The colour of a line shows the state of the routes between the GPU and the NIC. A device without a known NUMA node is
drawn in a box "unknown NUMA node". All coordinates and sizes are in pixels. A template draws the SVG from this layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report.routes import RouteOutcome
from gdrkit.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gdrkit.inventory import Facts
    from gdrkit.report.routes import RouteStatus

__all__ = ["Box", "Drawing", "DrawnDevice", "Link", "NumaFrame", "drawn_devices", "make_drawing", "select_drawn_state"]

WIDTH = 380
_BOX_WIDTH, _BOX_HEIGHT, _ROW_HEIGHT = 122.0, 30.0, 37.0
# Left edges of the boxes of GPUs, and of the boxes of other devices.
_GPU_BOX_X, _OTHER_BOX_X = 10.0, 248.0
_HEADER_HEIGHT, _FRAME_GAP = 24.0, 10.0
_NAME_CHARACTERS_MAX, _DETAIL_CHARACTERS_MAX = 16, 21
# If a GPU and a NIC have several routes, the first of these states that occurs is drawn.
_STATES_BY_IMPORTANCE = (RouteOutcome.FELL_BACK, RouteOutcome.PROVEN, RouteOutcome.UNPROVEN, RouteOutcome.NOT_POSSIBLE)


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
        PCI address and link width of a GPU, rate of a NIC, or model of an NVMe controller. Empty if unknown.
    numa_node : int or None
        The nearest NUMA node, or None if unknown.
    """

    name: str
    kind: str
    detail: str
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Box:
    """The box of a device in the drawing, with its left edge ``x``, its upper edge ``y`` and two lines of text."""

    device: DrawnDevice
    x: float
    y: float
    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class NumaFrame:
    """The frame around the devices of a NUMA node, with its upper edge ``y``."""

    label: str
    y: float
    height: float


@dataclass(frozen=True, slots=True)
class Link:
    """A line from (``x1``, ``y1``) at the box of a GPU to (``x2``, ``y2``) at the box of a NIC."""

    x1: float
    y1: float
    x2: float
    y2: float
    state: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """The layout of the whole drawing. ``description`` is a text for readers who cannot see the drawing."""

    frames: tuple[NumaFrame, ...]
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]
    height: float
    description: str
    width: int = WIDTH
    box_width: float = _BOX_WIDTH
    box_height: float = _BOX_HEIGHT


def make_drawing(facts: Facts, routes: Sequence[RouteStatus]) -> Drawing | None:
    """Return the layout of the drawing, or None if there is nothing to draw."""
    devices = drawn_devices(facts, routes)
    if not devices:
        return None
    numa_nodes = sorted({device.numa_node for device in devices}, key=lambda node: (node is None, node or 0))
    frames: list[NumaFrame] = []
    boxes: list[Box] = []
    y = 0.0
    for numa_node in numa_nodes:
        devices_at_node = [device for device in devices if device.numa_node == numa_node]
        gpus = [device for device in devices_at_node if device.kind == "gpu"]
        other_devices = [device for device in devices_at_node if device.kind != "gpu"]
        height = _HEADER_HEIGHT + _ROW_HEIGHT * max(len(gpus), len(other_devices))
        frames.append(NumaFrame("unknown NUMA node" if numa_node is None else f"NUMA node {numa_node}", y, height))
        for x, column_devices in ((_GPU_BOX_X, gpus), (_OTHER_BOX_X, other_devices)):
            boxes += [
                Box(
                    device,
                    x,
                    y + _HEADER_HEIGHT + _ROW_HEIGHT * row_index,
                    _truncate(device.name, _NAME_CHARACTERS_MAX),
                    _truncate(device.detail, _DETAIL_CHARACTERS_MAX),
                )
                for row_index, device in enumerate(column_devices)
            ]
        y += height + _FRAME_GAP
    links = _make_links(boxes, routes)
    return Drawing(
        tuple(frames), tuple(boxes), links, round(y - _FRAME_GAP, 1), _describe_device_counts(devices, len(frames))
    )


def drawn_devices(facts: Facts, routes: Iterable[RouteStatus]) -> tuple[DrawnDevice, ...]:
    """Return every GPU, NIC and NVMe controller that occurs in the facts or in a route."""
    return (*_list_gpus(facts, routes), *_list_nics(facts, routes), *_list_controllers(facts))


def select_drawn_state(states: Iterable[RouteOutcome]) -> RouteOutcome:
    """Return the state to draw for a GPU and a NIC with several routes.

    A fallback is shown even if another route is proven.
    """
    present_states = set(states)
    return next((state for state in _STATES_BY_IMPORTANCE if state in present_states), RouteOutcome.UNPROVEN)


def _list_gpus(facts: Facts, routes: Iterable[RouteStatus]) -> list[DrawnDevice]:
    pci_function_by_address = {gpu.address.lower(): gpu for gpu in facts.gpus}
    gpus: list[DrawnDevice] = []
    for device in facts.cuda.devices if facts.cuda else ():
        pci_function = pci_function_by_address.pop(device.pci_bus_id.lower(), None)
        link_text = _describe_link_width(pci_function.link_speed, pci_function.link_width) if pci_function else ""
        numa_node = pci_function.numa_node if pci_function else None
        gpus.append(DrawnDevice(f"GPU {device.index}", "gpu", f"{device.pci_bus_id} {link_text}".strip(), numa_node))
    # Without facts from CUDA, the routes show which GPUs the run used.
    if facts.cuda is None:
        device_indices = sorted({route.device_index for route in routes})
        gpus += [DrawnDevice(f"GPU {device_index}", "gpu", "", None) for device_index in device_indices]
    # These GPUs are on PCI, but CUDA does not list them.
    gpus += [
        DrawnDevice("GPU", "gpu", address, pci_function.numa_node)
        for address, pci_function in pci_function_by_address.items()
    ]
    return gpus


def _list_nics(facts: Facts, routes: Iterable[RouteStatus]) -> list[DrawnDevice]:
    nic_by_name = {}
    for device in facts.rdma_devices:
        rates = [port.rate for port in device.ports if port.rate]
        rate = (rates[0] or "").partition(" (")[0] if rates else ""
        detail = rate or device.pci_address or device.driver or ""
        nic_by_name[device.name] = DrawnDevice(device.name, "nic", detail, device.numa_node)
    verbs_names = [nic.name for nic in facts.verbs.nics] if facts.verbs else []
    for name in (*verbs_names, *(route.nic for route in routes)):
        nic_by_name.setdefault(name, DrawnDevice(name, "nic", "", None))
    return list(nic_by_name.values())


def _list_controllers(facts: Facts) -> list[DrawnDevice]:
    return [
        DrawnDevice(controller.name, "nvme", controller.model or controller.transport or "", None)
        for controller in facts.nvme
    ]


def _make_links(boxes: Sequence[Box], routes: Sequence[RouteStatus]) -> tuple[Link, ...]:
    states_by_pair: dict[tuple[str, str], list[RouteOutcome]] = {}
    for status in routes:
        states_by_pair.setdefault((f"GPU {status.device_index}", status.nic), []).append(status.state)
    box_by_device = {(box.device.kind, box.device.name): box for box in boxes}
    links = []
    for (gpu, nic), states in states_by_pair.items():
        gpu_box, nic_box = box_by_device.get(("gpu", gpu)), box_by_device.get(("nic", nic))
        if gpu_box is not None and nic_box is not None:
            half_height = _BOX_HEIGHT / 2
            state = select_drawn_state(states).value
            links.append(
                Link(gpu_box.x + _BOX_WIDTH, gpu_box.y + half_height, nic_box.x, nic_box.y + half_height, state)
            )
    # The most important links are drawn last, on top of the others.
    drawing_order = [state.value for state in reversed(_STATES_BY_IMPORTANCE)]
    return tuple(sorted(links, key=lambda link: drawing_order.index(link.state)))


def _describe_link_width(speed: str | None, width: str | None) -> str:
    """Return the width as text (``x16``). The text is empty if sysfs does not show a speed in numbers."""
    return f"x{width}" if speed and width and speed[:1].isdigit() else ""


def _truncate(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _describe_device_counts(devices: Sequence[DrawnDevice], numa_node_count: int) -> str:
    noun_by_kind = {"gpu": "GPU", "nic": "NIC", "nvme": "NVMe controller"}
    count_by_kind = {kind: sum(device.kind == kind for device in devices) for kind in noun_by_kind}
    texts = [format_count(count, noun_by_kind[kind]) for kind, count in count_by_kind.items() if count]
    return f"{', '.join(texts)} at {format_count(numa_node_count, 'NUMA node')}"
