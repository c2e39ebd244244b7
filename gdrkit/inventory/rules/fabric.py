"""Rules about the PCIe fabric, the IOMMU and virtual machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.host import Distance, config_space, pci_path
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule

if TYPE_CHECKING:
    from gdrkit.host import PciDevice

__all__ = ["RULES"]

_REVERSED_BEFORE = (6, 11)
_REQUEST_BYTES_MIN = 512
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@rule(
    code="acs-redirect",
    title="a bridge between GPU and NIC or NVMe sends peer traffic up to the root",
    why="With ACS redirection, a switch does not forward traffic between its ports. The traffic goes through the CPU, "
    "which is slower, or is dropped.",
    remedy="switch off ACS in the firmware of the host, or clear ReqRedir, CmpltRedir and UpstreamFwd of the bridge "
    "with setpci after each boot; in a virtual machine with ATS leave it on",
    reads="extended capability 0x000D, control word, of every bridge between two devices below one host bridge",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _acs(context: RuleContext) -> RuleResult:
    near = [
        (gpu, other)
        for gpu, other, distance in context.pairs()
        if distance in (Distance.PIX, Distance.PXB, Distance.PHB)
    ]
    if not near:
        return context.not_run("no GPU has a NIC or NVMe below its host bridge")
    bridges = dict.fromkeys(part for gpu, other in near for part in context.bridges_between(gpu.address, other.address))
    unreadable, redirecting = [], []
    for address in bridges:
        if not address[:1].isalnum() or address.startswith("pci"):
            continue
        space = config_space(context.tree, address)
        if space is None or not space.is_whole:
            unreadable.append(address)
        elif space.acs is not None:
            context.record(f"ACSCtl of {address}", space.acs)
            redirecting += [address] if space.acs.redirects else []
    if redirecting:
        return context.fails(f"{', '.join(redirecting)} redirect traffic between GPU and NIC or NVMe")
    if unreadable:
        return context.not_run(f"config space of {len(unreadable)} bridges cannot be read: {', '.join(unreadable[:4])}")
    return context.passes(f"none of {len(bridges)} bridges between GPUs and NICs or NVMe redirects")


@rule(
    code="ats-off-in-vm",
    title="ATS is off on a NIC of a virtual machine",
    why="In a virtual machine, peer traffic without address translation services goes through the IOMMU.",
    remedy="on the host, enable ATS on the NIC (mlxconfig ATS_ENABLED=1) and ACS on the switch above it",
    reads="extended capability 0x000F, control word, of each NIC; the cpu flag hypervisor",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _ats(context: RuleContext) -> RuleResult:
    hint = context.facts.virtual_machine
    if hint is None:
        return context.not_run("no sign of a virtual machine")
    context.record(hint.rpartition("(")[2].rstrip(")"), hint)
    if not context.nic_functions:
        return context.not_run("no NIC on PCI")
    states = {}
    for nic in context.nic_functions:
        space = config_space(context.tree, nic.address)
        states[nic.address] = None if space is None or not space.is_whole else space.ats_enabled
        context.record(
            f"ATSCtl of {nic.address}",
            {None: "no such capability, or not readable", True: "Enable+", False: "Enable-"}[states[nic.address]],
        )
    off = [address for address, state in states.items() if state is False]
    if off:
        return context.fails(f"ATS is off on {', '.join(off)}")
    if all(states.values()):
        return context.passes("ATS is on")
    return context.unproven("the guest does not see ATS of its NICs; the host may still use it")


@rule(
    code="iommu-translates",
    title="the IOMMU translates the addresses of GPU, NIC or NVMe",
    why="On x86, translated peer traffic goes up to the root complex and back, or fails. On Arm before Linux 6.11 it "
    "is the reverse: pass-through with ACS breaks CUDA.",
    remedy="x86: boot with iommu=pt, or switch the IOMMU off in the firmware; Arm64 before Linux 6.11: boot with "
    "iommu.passthrough=0",
    reads="/proc/cmdline, /sys/bus/pci/devices/*/iommu_group, /sys/kernel/iommu_groups/*/type",
)
def _iommu(context: RuleContext) -> RuleResult:
    if not context.gpus:
        return context.not_run("no GPU on PCI")
    words = [word for word in (context.text("/proc/cmdline") or "").split() if "iommu" in word]
    types = {}
    for one in (*context.gpus, *context.nic_functions, *context.nvme_functions):
        if one.iommu_group is not None:
            types[one.address] = context.text(f"/sys/kernel/iommu_groups/{one.iommu_group}/type") or "unknown"
    translated = [address for address, group_type in types.items() if group_type.startswith("DMA")]
    if context.facts.machine == "aarch64" and _kernel(context) < _REVERSED_BEFORE:
        passed = [
            address for address, group_type in types.items() if group_type == "identity"
        ] or "iommu.passthrough=1" in words
        return context.fails("pass-through on Arm64 before Linux 6.11") if passed else context.passes("no pass-through")
    if translated:
        return context.fails(f"translated: {', '.join(translated)}")
    if context.is_uncaptured("/proc/cmdline") and not types:
        return context.not_run("the capture has neither the command line of the kernel nor IOMMU groups")
    if "unknown" in types.values() and not {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(words):
        return context.unproven("the kernel does not report the type of all IOMMU groups")
    return context.passes(
        "no IOMMU translates for these devices" if not types else "the IOMMU groups are passed through"
    )


def _kernel(context: RuleContext) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", context.text("/proc/sys/kernel/osrelease") or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@rule(
    code="far-apart",
    title="a GPU whose nearest NIC or NVMe is not below its PCIe switch",
    why="Across a host bridge, peer traffic goes through the CPU, at half the rate or less, and often far less between "
    "sockets.",
    remedy="use for each GPU the NIC or NVMe that `gdrkit topology` shows nearest, or move the card to a slot below "
    "the same switch",
    reads="/sys/bus/pci/devices links (common bridges), numa_node",
)
def _far(context: RuleContext) -> RuleResult:
    nearest: dict[tuple[str, str], tuple[Distance, str]] = {}
    nics = {nic.address for nic in context.nic_functions}
    for gpu, other, distance in context.pairs():
        key = (gpu.address, "NIC" if other.address in nics else "NVMe")
        nearest[key] = min(nearest.get(key, (Distance.UNKNOWN, other.address)), (distance, other.address))
    if not nearest:
        return context.not_run("no GPU, or neither NIC nor NVMe on PCI")
    for (gpu_address, kind), (distance, address) in nearest.items():
        context.record(f"nearest {kind} of {gpu_address}", f"{address} at {distance.name}")
    far = [
        f"{gpu} to its nearest {kind} is {distance.name}"
        for (gpu, kind), (distance, _) in nearest.items()
        if distance > Distance.PXB
    ]
    if not far:
        return context.passes("every GPU has a NIC or NVMe below its own switch")
    if context.facts.virtual_machine is not None:
        return context.unproven(f"{far[0]} in this virtual machine, whose PCI tree may differ from the hardware")
    return context.fails("; ".join(far[:4]) + (f" and {len(far) - 4} more" if len(far) > 4 else ""))  # noqa: PLR2004 - enough to know.


@rule(
    code="link-downgraded",
    title="a PCIe link is slower than both ends support",
    why="A link that was trained with fewer lanes or a lower speed slows down every transfer. An idle GPU lowers the "
    "speed of its link, so this speed is read under load.",
    remedy="reseat the card, clean the contacts and check the AER errors of the slot; a link does not regain its "
    "width by itself",
    reads="current and max_link_speed and _width of every hop above GPUs, NICs and NVMe; for a GPU that is slow when "
    "idle, again during copies",
    experiment="load",
)
def _link(context: RuleContext) -> RuleResult:
    narrow, slow, known = [], [], 0
    for upper, lower in _hops(context):
        width_max, speed_max = _link_maximum(upper, lower)
        width, speed = _number(lower.link_width), _number(lower.link_speed)
        if not (width_max and width in _WIDTHS) and not (speed_max and speed):
            continue
        known += 1
        context.record(
            f"link of {lower.address}",
            f"{lower.link_speed} x{lower.link_width} of {speed_max} GT/s x{width_max:g}"
            if speed_max and width_max
            else "partly known",
        )
        if width_max and width in _WIDTHS and width < width_max:
            narrow.append(f"{lower.address} has x{width:g} of x{width_max:g}")
        elif speed_max and speed and speed < speed_max:
            slow.append((lower, speed_max))
    if context.facts.virtual_machine is not None and (narrow or slow):
        links = "; ".join([*narrow, *(f"{one.address} at {one.link_speed} of {maximum} GT/s" for one, maximum in slow)])
        return context.unproven(f"{links} in this virtual machine, whose links may differ from the hardware")
    if narrow:
        return context.fails("; ".join(narrow))
    if not known:
        return context.not_run("no link of a GPU, NIC or NVMe reports its maximum")
    gpus = {part for gpu in context.gpus for part in pci_path(context.tree, gpu.address)}
    always_slow = [
        f"{one.address} at {one.link_speed} of {maximum} GT/s" for one, maximum in slow if one.address not in gpus
    ]
    if always_slow:
        return context.fails("; ".join(always_slow))
    return _under_load(context, slow) if slow else context.passes(f"{known} links run at the maximum of both ends")


def _under_load(context: RuleContext, slow: list[tuple[PciDevice, float]]) -> RuleResult:
    idle = ", ".join(one.address for one, _ in slow)
    observation = context.observe("load") if context.facts.cuda and context.facts.cuda.devices else None
    if observation is None or observation.failure is not None:
        return context.unproven(f"{idle} is slow when idle, and was not read under load")
    speeds = observation.seen
    still_slow = [one.address for one, maximum in slow if (_number(speeds.get(one.address, "")) or 0) < maximum]
    if still_slow:
        return context.fails(f"{', '.join(still_slow)} is slow also during copies")
    return context.passes(f"{idle} is slow when idle and fast during copies")


def _hops(context: RuleContext) -> list[tuple[PciDevice | None, PciDevice]]:
    """Return each link above the GPUs, NICs and NVMe controllers, as the port above it and the function below it."""
    known = {one.address: one for one in context.machine.functions}
    hops: dict[str, tuple[PciDevice | None, PciDevice]] = {}
    for end in (*context.gpus, *context.nic_functions, *context.nvme_functions):
        path = [known.get(part) for part in pci_path(context.tree, end.address)[1:]]
        # The path has the two ends of each link, from the device up. Between the ports of a switch there is no link.
        # The registers of the lower end describe the link.
        for at in range(len(path) - 1, -1, -2):
            lower = path[at]
            if lower is not None and (at > 0 or lower is end or lower.address == end.address):
                hops[lower.address] = (path[at - 1] if at > 0 else None, lower)
    return list(hops.values())


def _link_maximum(upper: PciDevice | None, lower: PciDevice) -> tuple[float | None, float | None]:
    """Return the width and speed that both ends support, each None if the lower end does not state it."""
    ends = [lower] if upper is None else [upper, lower]
    widths = [width for end in ends if (width := _number(end.link_width_max)) in _WIDTHS]
    speeds = [speed for end in ends if (speed := _number(end.link_speed_max))]
    has_width, has_speed = _number(lower.link_width_max) in _WIDTHS, bool(_number(lower.link_speed_max))
    return (min(widths) if widths and has_width else None), (min(speeds) if speeds and has_speed else None)


def _number(text: str | None) -> float | None:
    match = re.match(r"\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None


@rule(
    code="small-read-request",
    title="the maximum read request size of a NIC is below 512 bytes",
    why="Small read requests limit how fast a NIC reads GPU memory. Without relaxed ordering it reads more slowly, "
    "too, above all in virtual machines.",
    remedy="set MaxReadReq to 4096 in the firmware (or with setpci), and PCI_WR_ORDERING=1 with mlxconfig",
    reads="device control word of the PCIe capability of each NIC: bits 14:12 and 4",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _read_request(context: RuleContext) -> RuleResult:
    if not context.nic_functions:
        return context.not_run("no NIC on PCI")
    small, known, strict = [], 0, 0
    for nic in context.nic_functions:
        space = config_space(context.tree, nic.address)
        if space is None or space.max_read_request_bytes is None:
            continue
        known += 1
        strict += not space.relaxed_ordering
        context.record(
            f"DevCtl of {nic.address}",
            f"MaxReadReq {space.max_read_request_bytes}, RlxdOrd{'+' if space.relaxed_ordering else '-'}",
        )
        if space.max_read_request_bytes < _REQUEST_BYTES_MIN:
            small.append(f"MaxReadReq of {nic.address} is {space.max_read_request_bytes} bytes")
    if small:
        return context.fails("; ".join(small))
    if not known:
        return context.not_run("config space of the NICs cannot be read")
    ordering = f"; relaxed ordering is off on {strict}" if strict else ""
    return context.passes(f"MaxReadReq of {known} NICs is at least {_REQUEST_BYTES_MIN} bytes{ordering}")


RULES = (_acs, _ats, _iommu, _far, _link, _read_request)
