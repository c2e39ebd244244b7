"""Rules about the ports of NICs, the limits of the process and its container."""

from __future__ import annotations

import re

from gdrkit.inventory.rules.base import Answer, Look, rule
from gdrkit.units import MIB, format_bytes

__all__ = ["RULES"]

_MTU_MIN = 4200
_MEMLOCK_BYTES_MIN = 512 * MIB
_NO_GID = re.compile(r"[0:]*")


@rule(
    code="port-down",
    title="a NIC without a usable port",
    why="What cannot send is no NIC; a port that flaps loses transfers.",
    remedy="check cable, switch and subnet manager (InfiniBand) or `ip link set IF up` (RoCE); see link_downed and "
    "symbol_error for a bad cable",
    reads="/sys/class/infiniband/*/ports/*/{state,phys_state,rate} and counters",
)
def _port(look: Look) -> Answer:
    if not look.has_nic:
        return look.not_run("no RDMA device here")
    down, up, counted = [], 0, []
    for device in look.facts.rdma_devices:
        states = {port.number: (port.state, port.physical_state) for port in device.ports}
        for port in device.ports:
            folder = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
            look.saw(f"{folder}/state", f"{port.state}, {port.physical_state}, {port.rate}")
            times = look.tree.number(f"{folder}/counters/link_downed")
            counted += [f"{device.name} was down {times} times"] if times else []
        usable = any(state == "ACTIVE" for state, _ in states.values())
        up += usable
        down += [] if usable else [device.name]
    if not look.facts.rdma_devices:
        nics = look.facts.verbs.nics if look.facts.verbs else ()
        down = [nic.name for nic in nics if not nic.active_ports]
        up = len(nics) - len(down)
    unstated = [device.name for device in look.facts.rdma_devices if not device.ports]
    if unstated and not up:
        return look.not_run("nothing says in which state their ports are")
    if down:
        return look.fails(f"no active port on {', '.join(down)}")
    return look.passes("; ".join([f"{up} NICs have an active port", *counted]))


def _interfaces(look: Look) -> dict[str, tuple[str, ...]]:
    """Return the RDMA devices with an Ethernet port, and their network interfaces."""
    found = {}
    for device in look.facts.rdma_devices:
        if any(port.link_layer == "Ethernet" for port in device.ports):
            names = look.tree.names(f"/sys/class/infiniband/{device.name}/device/net")
            parent = look.tree.text(f"/sys/class/infiniband/{device.name}/parent")
            found[device.name] = names or ((parent,) if parent else ())
    return found


@rule(
    code="small-mtu",
    title="a RoCE interface whose MTU keeps RDMA packets small",
    why="RDMA packets of 4096 bytes need an interface MTU of 4200; at 1500 they have 1024 bytes, and cost more each.",
    remedy="`ip link set IF mtu 4200` (or 9000) on both ends and on the switch",
    reads="/sys/class/net/*/mtu of the interfaces of RoCE devices",
)
def _mtu(look: Look) -> Answer:
    found = _interfaces(look)
    if not found:
        return look.not_run("no RoCE device here")
    sizes = {
        name: number
        for names in found.values()
        for name in names
        if (number := look.tree.number(f"/sys/class/net/{name}/mtu")) is not None
    }
    for name, number in sizes.items():
        look.saw(f"/sys/class/net/{name}/mtu", number)
    small = [f"{name} has {number}" for name, number in sizes.items() if number < _MTU_MIN]
    if small:
        return look.fails("; ".join(small))
    return look.passes("every MTU is at least 4200") if sizes else look.not_run("their interfaces cannot be seen here")


@rule(
    code="no-roce-gid",
    title="a RoCE port without a RoCE v2 address",
    why="Without a GID of type RoCE v2 a connection fails, or takes RoCE v1, which no router passes.",
    remedy="give the interface an address (`ip addr add`); in a container, map the interface into it, since a GID "
    "belongs to a network namespace",
    reads="/sys/class/infiniband/*/ports/*/gids and gid_attrs/types",
)
def _gid(look: Look) -> Answer:
    without, known = [], 0
    for device in look.facts.rdma_devices:
        for port in device.ports:
            folder = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
            if port.link_layer != "Ethernet" or not (numbers := look.tree.names(f"{folder}/gids")):
                continue
            known += 1
            kinds = set()
            for number in numbers:
                gid = look.tree.text(f"{folder}/gids/{number}") or ""
                if not _NO_GID.fullmatch(gid):
                    kinds.add(look.tree.text(f"{folder}/gid_attrs/types/{number}") or "unknown")
            look.saw(f"{folder}/gid_attrs/types", ", ".join(sorted(kinds)) or "no GID")
            without += [] if "RoCE v2" in kinds else [f"{device.name} port {port.number}"]
    if without:
        return look.fails(f"no RoCE v2 address on {', '.join(without)}")
    return look.passes("every RoCE port has one") if known else look.not_run("no RoCE port whose addresses can be seen")


@rule(
    code="memlock-low",
    title="too little memory may be locked",
    why="Registration pins memory; beyond RLIMIT_MEMLOCK it ends in ENOMEM, and older UCX gives up RDMA altogether.",
    remedy="`ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit, `--ulimit memlock=-1` for a container, or "
    "CAP_IPC_LOCK",
    reads="/proc/self/limits, CapEff of /proc/self/status",
)
def _memlock(look: Look) -> Answer:
    if not look.has_nic:
        return look.not_run("no RDMA device here")
    limits = look.facts.limits
    if not limits.memlock_known:
        return look.not_run("the limit cannot be read")
    size = limits.memlock_bytes
    look.saw("/proc/self/limits", f"Max locked memory {'unlimited' if size is None else format_bytes(size)}")
    if "CAP_IPC_LOCK" in limits.capabilities:
        look.saw("/proc/self/status", "CAP_IPC_LOCK")
        return look.passes("CAP_IPC_LOCK lifts the limit")
    if size is None or size >= _MEMLOCK_BYTES_MIN:
        return look.passes("no limit" if size is None else f"{format_bytes(size)} may be locked")
    return look.fails(f"{format_bytes(size)} may be locked, and a few large registrations need more")


@rule(
    code="no-device-nodes",
    title="device nodes are missing in this container",
    why="A container shows the devices in /sys, and the nodes by which they are opened only where it was told to.",
    remedy="start the container with `--device /dev/infiniband`, with the NVIDIA container toolkit (`--gpus all`), and "
    "with /dev/nvidia-fs* where nvidia-fs is loaded",
    reads="/dev/infiniband/uverbs*, /dev/nvidiactl, /dev/nvidia-fs*, /sys/class/infiniband",
)
def _nodes(look: Look) -> Answer:
    driver = look.facts.nvidia_driver_version is not None
    if not look.facts.rdma_devices and not driver:
        return look.not_run("neither an RDMA device nor the NVIDIA driver here")
    if not look.tree.names("/dev"):
        return look.not_run("/dev cannot be seen")
    missing = []
    if look.facts.rdma_devices and not any(name.startswith("uverbs") for name in look.names("/dev/infiniband")):
        missing.append("/dev/infiniband/uverbs*")
    if driver and not look.exists("/dev/nvidiactl"):
        missing.append("/dev/nvidiactl")
    has_nvfs = look.exists("/proc/driver/nvidia-fs")
    if has_nvfs and not any(name.startswith("nvidia-fs") for name in look.tree.names("/dev")):
        missing.append("/dev/nvidia-fs*")
    where = f" ({', '.join(look.facts.container)})" if look.facts.container else ""
    return look.fails(f"not here: {', '.join(missing)}{where}") if missing else look.passes("every node is here")


RULES = (_port, _mtu, _gid, _memlock, _nodes)
