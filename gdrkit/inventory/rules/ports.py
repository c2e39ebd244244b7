"""Rules about the ports of NICs, the limits of the process and its container."""

from __future__ import annotations

import re

from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.text import format_count
from gdrkit.units import MIB, format_bytes

__all__ = ["RULES"]

# Smallest MTU of an interface, in bytes, with which RDMA packets of 4096 bytes are possible.
_MTU_BYTES_MIN = 4200
# The rule reports a limit of locked memory below this value, because a few large registrations would exceed it.
_MEMLOCK_BYTES_MIN = 512 * MIB
# Matches a GID whose bytes are all 0: an unused entry of the GID table.
_EMPTY_GID = re.compile(r"[0:]*")


@rule(
    code="port-down",
    title="a NIC without a usable port",
    why="A NIC without an active port cannot send. A port whose link goes up and down loses transfers.",
    remedy="check cable, switch and subnet manager (InfiniBand) or `ip link set IF up` (RoCE); see link_downed and "
    "symbol_error for a bad cable",
    reads="/sys/class/infiniband/*/ports/*/{state,phys_state,rate} and counters",
)
def _check_port_down(context: RuleContext) -> RuleResult:
    if not context.has_nic:
        return context.not_run("no RDMA device here")
    devices_down, usable_nic_count, link_down_texts = [], 0, []
    for device in context.facts.rdma_devices:
        for port in device.ports:
            folder = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
            context.record(f"{folder}/state", f"{port.state}, {port.physical_state}, {port.rate}")
            down_count = context.tree.number(f"{folder}/counters/link_downed")
            link_down_texts += [f"{device.name} was down {format_count(down_count, 'time')}"] if down_count else []
        is_usable = any(port.state == "ACTIVE" for port in device.ports)
        usable_nic_count += is_usable
        devices_down += [] if is_usable else [device.name]
    if not context.facts.rdma_devices:
        nics = context.facts.verbs.nics if context.facts.verbs else ()
        devices_down = [nic.name for nic in nics if not nic.active_ports]
        usable_nic_count = len(nics) - len(devices_down)
    devices_without_ports = [device.name for device in context.facts.rdma_devices if not device.ports]
    if devices_without_ports and not usable_nic_count:
        return context.not_run("the state of the ports is unknown")
    if devices_down:
        return context.fails(f"no active port on {', '.join(devices_down)}")
    return context.passes("; ".join([f"{format_count(usable_nic_count, 'NIC')} with an active port", *link_down_texts]))


def _list_roce_interfaces(context: RuleContext) -> dict[str, tuple[str, ...]]:
    """Return the names of the network interfaces of each RDMA device with an Ethernet port, by the device's name."""
    interfaces_by_device = {}
    for device in context.facts.rdma_devices:
        if any(port.link_layer == "Ethernet" for port in device.ports):
            interface_names = context.tree.names(f"/sys/class/infiniband/{device.name}/device/net")
            # An rxe device has no PCI device. Its file parent has the name of the interface.
            parent_interface = context.tree.text(f"/sys/class/infiniband/{device.name}/parent")
            interfaces_by_device[device.name] = interface_names or ((parent_interface,) if parent_interface else ())
    return interfaces_by_device


@rule(
    code="small-mtu",
    title="the MTU of a RoCE interface is too small for large RDMA packets",
    why="RDMA packets of 4096 bytes need an interface MTU of 4200. With an MTU of 1500 the packets have 1024 bytes, "
    "which costs more processing per byte.",
    remedy="`ip link set IF mtu 4200` (or 9000) on both ends and on the switch",
    reads="/sys/class/net/*/mtu of the interfaces of RoCE devices",
)
def _check_small_mtu(context: RuleContext) -> RuleResult:
    interfaces_by_device = _list_roce_interfaces(context)
    if not interfaces_by_device:
        return context.not_run("no RoCE device here")
    mtu_by_interface = {
        name: mtu
        for names in interfaces_by_device.values()
        for name in names
        if (mtu := context.tree.number(f"/sys/class/net/{name}/mtu")) is not None
    }
    for name, mtu in mtu_by_interface.items():
        context.record(f"/sys/class/net/{name}/mtu", mtu)
    small_mtu_texts = [f"{name} has {mtu}" for name, mtu in mtu_by_interface.items() if mtu < _MTU_BYTES_MIN]
    if small_mtu_texts:
        return context.fails("; ".join(small_mtu_texts))
    return (
        context.passes("every MTU is at least 4200")
        if mtu_by_interface
        else context.not_run("the network interfaces of the RoCE devices cannot be read")
    )


@rule(
    code="no-roce-gid",
    title="a RoCE port without a RoCE v2 address",
    why="Without a GID of type RoCE v2 a connection fails, or it uses RoCE v1, which routers do not forward.",
    remedy="give the interface an address (`ip addr add`); in a container, map the interface into it, since a GID "
    "belongs to a network namespace",
    reads="/sys/class/infiniband/*/ports/*/gids and gid_attrs/types",
)
def _check_no_roce_gid(context: RuleContext) -> RuleResult:
    ports_without_gid, known_port_count = [], 0
    for device in context.facts.rdma_devices:
        for port in device.ports:
            folder = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
            if port.link_layer != "Ethernet" or not (gid_indices := context.tree.names(f"{folder}/gids")):
                continue
            known_port_count += 1
            gid_types = set()
            for gid_index in gid_indices:
                gid = context.tree.text(f"{folder}/gids/{gid_index}") or ""
                if not _EMPTY_GID.fullmatch(gid):
                    gid_types.add(context.tree.text(f"{folder}/gid_attrs/types/{gid_index}") or "unknown")
            context.record(f"{folder}/gid_attrs/types", ", ".join(sorted(gid_types)) or "no GID")
            ports_without_gid += [] if "RoCE v2" in gid_types else [f"{device.name} port {port.number}"]
    if ports_without_gid:
        return context.fails(f"no RoCE v2 address on {', '.join(ports_without_gid)}")
    return (
        context.passes("every RoCE port has a RoCE v2 address")
        if known_port_count
        else context.not_run("no RoCE port with readable addresses")
    )


@rule(
    code="memlock-low",
    title="the limit of locked memory is low",
    why="Registration pins memory. Beyond RLIMIT_MEMLOCK it fails with ENOMEM, and older UCX then does not use RDMA.",
    remedy="`ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit, `--ulimit memlock=-1` for a container, or "
    "CAP_IPC_LOCK",
    reads="/proc/self/limits, CapEff of /proc/self/status",
)
def _check_memlock_low(context: RuleContext) -> RuleResult:
    if not context.has_nic:
        return context.not_run("no RDMA device here")
    limits = context.facts.limits
    if not limits.memlock_known:
        return context.not_run("the limit cannot be read")
    limit_bytes = limits.memlock_bytes
    context.record(
        "/proc/self/limits", f"Max locked memory {'unlimited' if limit_bytes is None else format_bytes(limit_bytes)}"
    )
    if "CAP_IPC_LOCK" in limits.capabilities:
        context.record("/proc/self/status", "CAP_IPC_LOCK")
        return context.passes("CAP_IPC_LOCK lifts the limit")
    if limit_bytes is None or limit_bytes >= _MEMLOCK_BYTES_MIN:
        return context.passes("no limit" if limit_bytes is None else f"{format_bytes(limit_bytes)} may be locked")
    return context.fails(f"{format_bytes(limit_bytes)} may be locked, and a few large registrations need more")


@rule(
    code="no-device-nodes",
    title="device nodes are missing in this container",
    why="A container shows all devices in /sys, but has only those device nodes that were passed to it.",
    remedy="start the container with `--device /dev/infiniband`, with the NVIDIA container toolkit (`--gpus all`), and "
    "with /dev/nvidia-fs* where nvidia-fs is loaded",
    reads="/dev/infiniband/uverbs*, /dev/nvidiactl, /dev/nvidia-fs*, /sys/class/infiniband",
)
def _check_no_device_nodes(context: RuleContext) -> RuleResult:
    has_driver = context.facts.nvidia_driver_version is not None
    if not context.facts.rdma_devices and not has_driver:
        return context.not_run("neither an RDMA device nor the NVIDIA driver here")
    if not context.tree.names("/dev"):
        return context.not_run("/dev cannot be read")
    missing_nodes = []
    if context.facts.rdma_devices and not any(name.startswith("uverbs") for name in context.names("/dev/infiniband")):
        missing_nodes.append("/dev/infiniband/uverbs*")
    if has_driver and not context.exists("/dev/nvidiactl"):
        missing_nodes.append("/dev/nvidiactl")
    has_nvfs = context.exists("/proc/driver/nvidia-fs")
    if has_nvfs and not any(name.startswith("nvidia-fs") for name in context.tree.names("/dev")):
        missing_nodes.append("/dev/nvidia-fs*")
    container_text = f" ({', '.join(context.facts.container)})" if context.facts.container else ""
    return (
        context.fails(f"missing: {', '.join(missing_nodes)}{container_text}")
        if missing_nodes
        else context.passes("every device node exists")
    )


RULES = (_check_port_down, _check_small_mtu, _check_no_roce_gid, _check_memlock_low, _check_no_device_nodes)
