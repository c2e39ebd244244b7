"""Rules about the PCIe fabric, the IOMMU and virtual machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.host import Distance, config_space, pci_path
from gdrkit.inventory.rules.base import Answer, Look, rule

if TYPE_CHECKING:
    from gdrkit.host import PciDevice

__all__ = ["RULES"]

_REVERSED_BEFORE = (6, 11)
_REQUEST_BYTES_MIN = 512
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@rule(
    code="acs-redirect",
    title="a bridge between GPU and NIC or NVMe sends peer traffic up to the root",
    why="With ACS redirection a switch does not pass traffic between its ports: it goes through the CPU, slower, or is "
    "dropped.",
    remedy="switch off ACS in the firmware of the host, or clear ReqRedir, CmpltRedir and UpstreamFwd of the bridge "
    "with setpci after each boot; in a virtual machine with ATS leave it on",
    reads="extended capability 0x000D, control word, of every bridge between two devices below one host bridge",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _acs(look: Look) -> Answer:
    near = [
        (gpu, other) for gpu, other, distance in look.pairs() if distance in (Distance.PIX, Distance.PXB, Distance.PHB)
    ]
    if not near:
        return look.not_run("no GPU has a NIC or NVMe below its host bridge")
    bridges = dict.fromkeys(part for gpu, other in near for part in look.bridges_between(gpu.address, other.address))
    unread, redirecting = [], []
    for address in bridges:
        if not address[:1].isalnum() or address.startswith("pci"):
            continue
        space = config_space(look.tree, address)
        if space is None or not space.is_whole:
            unread.append(address)
        elif space.acs is not None:
            look.saw(f"ACSCtl of {address}", space.acs)
            redirecting += [address] if space.acs.redirects else []
    if redirecting:
        return look.fails(f"{', '.join(redirecting)} redirect between GPU and NIC or NVMe")
    if unread:
        return look.not_run(f"config space of {len(unread)} bridges cannot be read: {', '.join(unread[:4])}")
    return look.passes(f"none of {len(bridges)} bridges between GPUs and NICs or NVMe redirects")


@rule(
    code="ats-off-in-vm",
    title="a virtual machine whose NIC has ATS off",
    why="In a virtual machine peer traffic needs address translation services, or it goes by way of the IOMMU.",
    remedy="have the host enable ATS on the NIC (mlxconfig ATS_ENABLED=1) and ACS on the switch above it",
    reads="extended capability 0x000F, control word, of each NIC; the cpu flag hypervisor",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _ats(look: Look) -> Answer:
    where = look.facts.virtual_machine
    if where is None:
        return look.not_run("no virtual machine, as far as can be seen")
    look.saw(where.rpartition("(")[2].rstrip(")"), where)
    if not look.nic_functions:
        return look.not_run("no NIC on PCI")
    states = {}
    for nic in look.nic_functions:
        space = config_space(look.tree, nic.address)
        states[nic.address] = None if space is None or not space.is_whole else space.ats_enabled
        look.saw(
            f"ATSCtl of {nic.address}",
            {None: "no such capability, or not readable", True: "Enable+", False: "Enable-"}[states[nic.address]],
        )
    off = [address for address, state in states.items() if state is False]
    if off:
        return look.fails(f"ATS is off on {', '.join(off)}")
    if all(states.values()):
        return look.passes("ATS is on")
    return look.unproven("the guest does not see ATS of its NICs; the host may still use it")


@rule(
    code="iommu-translates",
    title="the IOMMU translates the addresses of GPU, NIC or NVMe",
    why="On x86 translated peer traffic goes up to the root and back, slower, or fails. On Arm before Linux 6.11 it is "
    "the reverse: pass-through with ACS breaks CUDA.",
    remedy="x86: boot with iommu=pt, or switch the IOMMU off in the firmware; Arm64 before Linux 6.11: boot with "
    "iommu.passthrough=0",
    reads="/proc/cmdline, /sys/bus/pci/devices/*/iommu_group, /sys/kernel/iommu_groups/*/type",
)
def _iommu(look: Look) -> Answer:
    if not look.gpus:
        return look.not_run("no GPU on PCI")
    words = [word for word in (look.text("/proc/cmdline") or "").split() if "iommu" in word]
    kinds = {}
    for one in (*look.gpus, *look.nic_functions, *look.nvme_functions):
        if one.iommu_group is not None:
            kinds[one.address] = look.text(f"/sys/kernel/iommu_groups/{one.iommu_group}/type") or "not said"
    translated = [address for address, kind in kinds.items() if kind.startswith("DMA")]
    if look.facts.machine == "aarch64" and _kernel(look) < _REVERSED_BEFORE:
        passed = [address for address, kind in kinds.items() if kind == "identity"] or "iommu.passthrough=1" in words
        return look.fails("pass-through on Arm64 before Linux 6.11") if passed else look.passes("no pass-through")
    if translated:
        return look.fails(f"translated: {', '.join(translated)}")
    if look.is_uncaptured("/proc/cmdline") and not kinds:
        return look.not_run("the capture has neither the command line of the kernel nor IOMMU groups")
    if "not said" in kinds.values() and not {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(words):
        return look.unproven("there are IOMMU groups whose kind the kernel does not say")
    return look.passes("no IOMMU translates for them" if not kinds else "their groups are passed through")


def _kernel(look: Look) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", look.text("/proc/sys/kernel/osrelease") or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


@rule(
    code="far-apart",
    title="a GPU whose nearest NIC or NVMe is not below its PCIe switch",
    why="Beyond a host bridge peer traffic crosses the CPU: half the rate or less; between sockets often far less.",
    remedy="use for each GPU the NIC or NVMe that `gdrkit topology` shows nearest, or move the card to a slot below "
    "the same switch",
    reads="/sys/bus/pci/devices links (common bridges), numa_node",
)
def _far(look: Look) -> Answer:
    nearest: dict[tuple[str, str], tuple[Distance, str]] = {}
    nics = {nic.address for nic in look.nic_functions}
    for gpu, other, distance in look.pairs():
        key = (gpu.address, "NIC" if other.address in nics else "NVMe")
        nearest[key] = min(nearest.get(key, (Distance.UNKNOWN, other.address)), (distance, other.address))
    if not nearest:
        return look.not_run("no GPU, or neither NIC nor NVMe on PCI")
    for (gpu_address, kind), (distance, address) in nearest.items():
        look.saw(f"nearest {kind} of {gpu_address}", f"{address} at {distance.name}")
    far = [
        f"{gpu} to its nearest {kind} is {found.name}"
        for (gpu, kind), (found, _) in nearest.items()
        if found > Distance.PXB
    ]
    if not far:
        return look.passes("every GPU has one below its own switch")
    if look.facts.virtual_machine is not None:
        return look.unproven(f"{far[0]} in this virtual machine, whose PCI tree need not be the real one")
    return look.fails("; ".join(far[:4]) + (f" and {len(far) - 4} more" if len(far) > 4 else ""))  # noqa: PLR2004 - enough to know.


@rule(
    code="link-downgraded",
    title="a PCIe link below what both ends can do",
    why="A link that trained narrow or slow takes its share off every transfer. GPUs lower their speed when idle, so "
    "speed is read under load.",
    remedy="seat the card again, clean the contacts, look at AER errors of the slot; width never comes back by itself",
    reads="current and max_link_speed and _width of every hop above GPUs, NICs and NVMe; for a GPU that is slow when "
    "idle again while copies run",
    act="load",
)
def _link(look: Look) -> Answer:
    narrow, slow, known = [], [], 0
    for upper, lower in _hops(look):
        wide, fast = _expected(upper, lower)
        width, speed = _number(lower.link_width), _number(lower.link_speed)
        if not (wide and width in _WIDTHS) and not (fast and speed):
            continue
        known += 1
        look.saw(
            f"link of {lower.address}",
            f"{lower.link_speed} x{lower.link_width} of {fast} GT/s x{wide:g}" if fast and wide else "known in part",
        )
        if wide and width in _WIDTHS and width < wide:
            narrow.append(f"{lower.address} has x{width:g} of x{wide:g}")
        elif fast and speed and speed < fast:
            slow.append((lower, fast))
    if look.facts.virtual_machine is not None and (narrow or slow):
        shown = "; ".join([*narrow, *(f"{one.address} at {one.link_speed} of {fast} GT/s" for one, fast in slow)])
        return look.unproven(f"{shown} in this virtual machine, whose links need not be the real ones")
    if narrow:
        return look.fails("; ".join(narrow))
    if not known:
        return look.not_run("no link of a GPU, NIC or NVMe says what it could do")
    gpus = {part for gpu in look.gpus for part in pci_path(look.tree, gpu.address)}
    still = [f"{one.address} at {one.link_speed} of {fast} GT/s" for one, fast in slow if one.address not in gpus]
    if still:
        return look.fails("; ".join(still))
    return _under_load(look, slow) if slow else look.passes(f"{known} links run as both ends can")


def _under_load(look: Look, slow: list[tuple[PciDevice, float]]) -> Answer:
    idle = ", ".join(one.address for one, _ in slow)
    seen = look.observed("load") if look.facts.cuda and look.facts.cuda.devices else None
    if seen is None or seen.failure is not None:
        return look.unproven(f"{idle} is slow when idle, and was not read under load")
    left = [one.address for one, fast in slow if (_number(seen.seen.get(one.address, "")) or 0) < fast]
    if left:
        return look.fails(f"{', '.join(left)} stays slow while copies run")
    return look.passes(f"{idle} is slow when idle and fast while copies run")


def _hops(look: Look) -> list[tuple[PciDevice | None, PciDevice]]:
    """Return each link above the GPUs, NICs and NVMe controllers, as the port above it and the function below it."""
    known = {one.address: one for one in look.machine.functions}
    found: dict[str, tuple[PciDevice | None, PciDevice]] = {}
    for end in (*look.gpus, *look.nic_functions, *look.nvme_functions):
        path = [known.get(part) for part in pci_path(look.tree, end.address)[1:]]
        # The path has the two ends of each link, from the device up. Between the ports of a switch there is no link.
        # The registers of the lower end describe the link.
        for at in range(len(path) - 1, -1, -2):
            lower = path[at]
            if lower is not None and (at > 0 or lower is end or lower.address == end.address):
                found[lower.address] = (path[at - 1] if at > 0 else None, lower)
    return list(found.values())


def _expected(upper: PciDevice | None, lower: PciDevice) -> tuple[float | None, float | None]:
    """Return the width and speed that both ends support, each None if the lower end does not state it."""
    ends = [lower] if upper is None else [upper, lower]
    wide = [found for end in ends if (found := _number(end.link_width_max)) in _WIDTHS]
    fast = [found for end in ends if (found := _number(end.link_speed_max))]
    own = _number(lower.link_width_max) in _WIDTHS
    return (min(wide) if wide and own else None), (min(fast) if fast and _number(lower.link_speed_max) else None)


def _number(text: str | None) -> float | None:
    found = re.match(r"\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None


@rule(
    code="small-read-request",
    title="a NIC that asks for less than 512 bytes at once",
    why="Small read requests limit how fast a NIC reads GPU memory. Relaxed ordering off costs as well, most of all in "
    "virtual machines.",
    remedy="set MaxReadReq to 4096 in the firmware (or with setpci), and PCI_WR_ORDERING=1 with mlxconfig",
    reads="device control word of the PCIe capability of each NIC: bits 14:12 and 4",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _read_request(look: Look) -> Answer:
    if not look.nic_functions:
        return look.not_run("no NIC on PCI")
    small, known, strict = [], 0, 0
    for nic in look.nic_functions:
        space = config_space(look.tree, nic.address)
        if space is None or space.max_read_request_bytes is None:
            continue
        known += 1
        strict += not space.relaxed_ordering
        look.saw(
            f"DevCtl of {nic.address}",
            f"MaxReadReq {space.max_read_request_bytes}, RlxdOrd{'+' if space.relaxed_ordering else '-'}",
        )
        if space.max_read_request_bytes < _REQUEST_BYTES_MIN:
            small.append(f"{nic.address} asks for {space.max_read_request_bytes} bytes")
    if small:
        return look.fails("; ".join(small))
    if not known:
        return look.not_run("config space of the NICs cannot be read")
    ordering = f"; relaxed ordering is off on {strict}" if strict else ""
    return look.passes(f"none of {known} NICs asks for less than {_REQUEST_BYTES_MIN} bytes{ordering}")


RULES = (_acs, _ats, _iommu, _far, _link, _read_request)
