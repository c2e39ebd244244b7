"""Text of ``gdrkit topology``: PCI devices as a tree, and the distances between GPUs and other devices."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from gdrkit.host import Distance

if TYPE_CHECKING:
    from gdrkit.inventory import Topology, TopologyDevice

__all__ = ["describe_topology"]

_LINE_WIDTH = 120
_DISTANT_NAMES_MAX = 4
_DISTANCE_TEXTS = {
    Distance.PIX: "below one PCIe switch",
    Distance.PXB: "several PCIe switches, one host bridge",
    Distance.PHB: "over a PCIe host bridge",
    Distance.NODE: "over host bridges of one NUMA node",
    Distance.SYS: "over the link between NUMA nodes",
    Distance.UNKNOWN: "unknown",
}


def describe_topology(topology: Topology) -> str:
    """Return a tree of NUMA nodes, host bridges, PCIe bridges and devices, then the distances from each GPU."""
    if not topology.places:
        return "no GPU, NIC or NVMe on PCI"
    output = io.StringIO()
    Console(file=output, width=_LINE_WIDTH, color_system=None, highlight=False).print(_make_tree(topology))
    lines = [output.getvalue().rstrip(), "", *_describe_distances(topology)]
    if topology.virtual_machine:
        lines += ["", f"A virtual machine ({topology.virtual_machine}): this tree may differ from the hardware."]
    return "\n".join(lines)


def _make_tree(topology: Topology) -> Tree:
    root = Tree(Text("this host"))
    branches: dict[tuple[str, ...], Tree] = {}

    def get_branch(path: tuple[str, ...]) -> Tree:
        if path not in branches:
            parent = get_branch(path[:-1]) if len(path) > 1 else root
            branches[path] = parent.add(Text(_describe_branch(path, topology)))
        return branches[path]

    for device in sorted(
        topology.places, key=lambda device: (-1 if device.numa_node is None else device.numa_node, device.address)
    ):
        numa_node_text = "unknown NUMA node" if device.numa_node is None else f"NUMA node {device.numa_node}"
        get_branch((numa_node_text, *device.path)).add(Text(_describe_device(device)))
    return root


def _describe_branch(path: tuple[str, ...], topology: Topology) -> str:
    """Return the text of the NUMA node, host bridge or PCIe bridge at the end of `path`."""
    last_part = path[-1]
    if len(path) == 1:
        return last_part
    # Host bridges have names such as pci0000:00. PCIe bridges have PCI addresses.
    return (
        f"host bridge {last_part}"
        if last_part.startswith("pci")
        else f"{topology.bridges.get(last_part, 'bridge')} {last_part}"
    )


def _describe_device(device: TopologyDevice) -> str:
    kind_text = {"gpu": "", "nic": "NIC ", "nvme": "NVMe "}[device.kind]
    name = "" if device.name == device.address else f"{device.name} "
    return f"{kind_text}{name}{device.address}" + (f"  {device.link}" if device.link else "")


def _describe_distances(topology: Topology) -> list[str]:
    lines: list[str] = []
    other_devices = [device for device in topology.places if device.kind != "gpu"]
    gpus = [device for device in topology.places if device.kind == "gpu"]
    used_distances: set[Distance] = set()
    for gpu in gpus:
        names_by_distance: dict[Distance, list[str]] = {}
        for other_device in (*other_devices, *(other_gpu for other_gpu in gpus if other_gpu.name != gpu.name)):
            names_by_distance.setdefault(topology.distance(gpu.name, other_device.name), []).append(other_device.name)
        used_distances |= names_by_distance.keys()
        group_texts = [
            f"{distance.name} {_describe_group(names_by_distance[distance], distance)}"
            for distance in sorted(names_by_distance)
        ]
        lines.append(f"{gpu.name}: {'; '.join(group_texts) or 'no other device on PCI'}")
    return (
        lines
        + ([""] if used_distances else [])
        + [f"{distance.name:7} {_DISTANCE_TEXTS[distance]}" for distance in sorted(used_distances)]
    )


def _describe_group(names: list[str], distance: Distance) -> str:
    # Many distant devices are only counted, because users rarely need their names. The JSON output has the names.
    is_named = distance < Distance.NODE or len(names) <= _DISTANT_NAMES_MAX
    return ", ".join(names) if is_named else f"{len(names)} others"
