"""A topology as a tree for a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from gdrkit.host import Distance

if TYPE_CHECKING:
    from gdrkit.inventory import Place, Topology

__all__ = ["describe_topology"]

_WIDTH = 120
_FAR_MAX = 4
_WORDS = {
    Distance.PIX: "below one PCIe switch",
    Distance.PXB: "several PCIe switches, one host bridge",
    Distance.PHB: "over a PCIe host bridge",
    Distance.NODE: "over host bridges of one memory node",
    Distance.SYS: "over the link between memory nodes",
    Distance.UNKNOWN: "nobody says where",
}


def describe_topology(found: Topology) -> str:
    """Return NUMA nodes, host bridges, bridges and devices as a tree, then the distances from each GPU."""
    if not found.places:
        return "no GPU, NIC or NVMe on PCI"
    drawn = io.StringIO()
    Console(file=drawn, width=_WIDTH, color_system=None, highlight=False).print(_tree(found))
    lines = [drawn.getvalue().rstrip(), "", *_distances(found)]
    if found.virtual_machine:
        lines += ["", f"A virtual machine ({found.virtual_machine}): this tree need not be that of the hardware."]
    return "\n".join(lines)


def _tree(found: Topology) -> Tree:
    root = Tree(Text("this host"))
    branches: dict[tuple[str, ...], Tree] = {}

    def branch(path: tuple[str, ...]) -> Tree:
        if path not in branches:
            above = branch(path[:-1]) if len(path) > 1 else root
            branches[path] = above.add(Text(_label(path, found)))
        return branches[path]

    for place in sorted(
        found.places, key=lambda place: (-1 if place.numa_node is None else place.numa_node, place.address)
    ):
        node = "memory node not stated" if place.numa_node is None else f"memory node {place.numa_node}"
        branch((node, *place.path)).add(Text(_device(place)))
    return root


def _label(path: tuple[str, ...], found: Topology) -> str:
    last = path[-1]
    if len(path) == 1:
        return last
    return f"host bridge {last}" if last.startswith("pci") else f"{found.bridges.get(last, 'bridge')} {last}"


def _device(place: Place) -> str:
    kind = {"gpu": "", "nic": "NIC ", "nvme": "NVMe "}[place.kind]
    name = "" if place.name == place.address else f"{place.name} "
    return f"{kind}{name}{place.address}" + (f"  {place.link}" if place.link else "")


def _distances(found: Topology) -> list[str]:
    lines: list[str] = []
    others = [place for place in found.places if place.kind != "gpu"]
    used: set[Distance] = set()
    for gpu in (place for place in found.places if place.kind == "gpu"):
        groups: dict[Distance, list[str]] = {}
        for other in (*others, *(one for one in found.places if one.kind == "gpu" and one.name != gpu.name)):
            groups.setdefault(found.distance(gpu.name, other.name), []).append(other.name)
        used |= groups.keys()
        parts = [f"{distance.name} {_named(groups[distance], distance)}" for distance in sorted(groups)]
        lines.append(f"{gpu.name}: {'; '.join(parts) or 'nothing else on PCI'}")
    return lines + ([""] if used else []) + [f"{distance.name:7} {_WORDS[distance]}" for distance in sorted(used)]


def _named(names: list[str], distance: Distance) -> str:
    # Distant devices are only counted, because users do not look for their names. The JSON output names all.
    few = distance < Distance.NODE or len(names) <= _FAR_MAX
    return ", ".join(names) if few else f"{len(names)} others"
