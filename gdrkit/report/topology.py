"""A topology as a tree for a terminal."""

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

_WIDTH = 120
_NAMED_MAX = 4
_WORDS = {
    Distance.PIX: "below one PCIe switch",
    Distance.PXB: "several PCIe switches, one host bridge",
    Distance.PHB: "over a PCIe host bridge",
    Distance.NODE: "over host bridges of one NUMA node",
    Distance.SYS: "over the link between NUMA nodes",
    Distance.UNKNOWN: "unknown",
}


def describe_topology(topology: Topology) -> str:
    """Return NUMA nodes, host bridges, bridges and devices as a tree, then the distances from each GPU."""
    if not topology.places:
        return "no GPU, NIC or NVMe on PCI"
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None, highlight=False).print(_tree(topology))
    lines = [text.getvalue().rstrip(), "", *_distances(topology)]
    if topology.virtual_machine:
        lines += ["", f"A virtual machine ({topology.virtual_machine}): this tree may differ from the hardware."]
    return "\n".join(lines)


def _tree(topology: Topology) -> Tree:
    root = Tree(Text("this host"))
    branches: dict[tuple[str, ...], Tree] = {}

    def branch(path: tuple[str, ...]) -> Tree:
        if path not in branches:
            parent = branch(path[:-1]) if len(path) > 1 else root
            branches[path] = parent.add(Text(_label(path, topology)))
        return branches[path]

    for device in sorted(
        topology.places, key=lambda device: (-1 if device.numa_node is None else device.numa_node, device.address)
    ):
        node = "unknown NUMA node" if device.numa_node is None else f"NUMA node {device.numa_node}"
        branch((node, *device.path)).add(Text(_describe_device(device)))
    return root


def _label(path: tuple[str, ...], topology: Topology) -> str:
    last = path[-1]
    if len(path) == 1:
        return last
    return f"host bridge {last}" if last.startswith("pci") else f"{topology.bridges.get(last, 'bridge')} {last}"


def _describe_device(device: TopologyDevice) -> str:
    kind = {"gpu": "", "nic": "NIC ", "nvme": "NVMe "}[device.kind]
    name = "" if device.name == device.address else f"{device.name} "
    return f"{kind}{name}{device.address}" + (f"  {device.link}" if device.link else "")


def _distances(topology: Topology) -> list[str]:
    lines: list[str] = []
    others = [device for device in topology.places if device.kind != "gpu"]
    gpus = [device for device in topology.places if device.kind == "gpu"]
    used: set[Distance] = set()
    for gpu in gpus:
        groups: dict[Distance, list[str]] = {}
        for other in (*others, *(each for each in gpus if each.name != gpu.name)):
            groups.setdefault(topology.distance(gpu.name, other.name), []).append(other.name)
        used |= groups.keys()
        parts = [f"{distance.name} {_describe_group(groups[distance], distance)}" for distance in sorted(groups)]
        lines.append(f"{gpu.name}: {'; '.join(parts) or 'no other device on PCI'}")
    return lines + ([""] if used else []) + [f"{distance.name:7} {_WORDS[distance]}" for distance in sorted(used)]


def _describe_group(names: list[str], distance: Distance) -> str:
    # Distant devices are only counted, because users do not look for their names. The JSON output names all.
    is_named = distance < Distance.NODE or len(names) <= _NAMED_MAX
    return ", ".join(names) if is_named else f"{len(names)} others"
