"""Rules about the PCIe fabric, the IOMMU and virtual machines."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gdrkit.host import Distance, config_space, pci_path
from gdrkit.inventory.rules.base import RuleContext, RuleResult, rule
from gdrkit.text import format_count

if TYPE_CHECKING:
    from gdrkit.host import PciDevice

__all__ = ["RULES"]

# Before this version of Linux, the IOMMU of an Arm host must translate (see the rule iommu-translates).
_ARM_NEEDS_TRANSLATION_BEFORE = (6, 11)
_READ_REQUEST_BYTES_MIN = 512
# Matches a line of the NVIDIA driver in the kernel log, such as "NVRM: Xid (PCI:0000:1b:00): 79, pid=..., GPU has
# fallen off the bus."
_XID_LINE = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,5})\b")
# Numbers of lanes that a link can have. sysfs shows other numbers if it does not know the width.
_LINK_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_LISTED_TEXTS_MAX = 4


@rule(
    code="acs-redirect",
    title="a bridge between GPU and NIC or NVMe sends peer traffic up to the root",
    why="With ACS redirection, a switch does not forward traffic between its ports. The traffic goes through the CPU, "
    "which is slower, or the traffic is dropped.",
    remedy="switch off ACS in the firmware of the host, or clear ReqRedir, CmpltRedir and UpstreamFwd of the bridge "
    "with setpci after each boot; in a virtual machine with ATS leave it on",
    reads="extended capability 0x000D, control word, of every bridge between two devices below one host bridge",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _check_acs_redirect(context: RuleContext) -> RuleResult:
    near_pairs = [
        (gpu, device)
        for gpu, device, distance in context.gpu_and_device_pairs()
        if distance in (Distance.PIX, Distance.PXB, Distance.PHB)
    ]
    if not near_pairs:
        return context.not_run("no GPU has a NIC or NVMe below its host bridge")
    bridge_addresses = dict.fromkeys(
        address for gpu, device in near_pairs for address in context.bridges_between(gpu.address, device.address)
    )
    unreadable_bridges, redirecting_bridges = [], []
    for address in bridge_addresses:
        # Parts of the path that are not PCI functions, such as a host bridge (pci0000:00), have no config space.
        if not address[:1].isalnum() or address.startswith("pci"):
            continue
        pci_config = config_space(context.tree, address)
        if pci_config is None or not pci_config.is_whole:
            unreadable_bridges.append(address)
        elif pci_config.acs is not None:
            context.record(f"ACSCtl of {address}", pci_config.acs)
            redirecting_bridges += [address] if pci_config.acs.redirects else []
    if redirecting_bridges:
        return context.fails(f"traffic between GPU and NIC or NVMe is redirected by {', '.join(redirecting_bridges)}")
    if unreadable_bridges:
        return context.not_run(
            f"config space of {format_count(len(unreadable_bridges), 'bridge')} cannot be read: "
            f"{', '.join(unreadable_bridges[:4])}"
        )
    return context.passes(
        f"no redirect by {format_count(len(bridge_addresses), 'bridge')} between GPUs and NICs or NVMe"
    )


@rule(
    code="ats-off-in-vm",
    title="ATS is off on a NIC of a virtual machine",
    why="In a virtual machine, peer traffic without address translation services goes through the IOMMU.",
    remedy="on the host, enable ATS on the NIC (mlxconfig ATS_ENABLED=1) and ACS on the switch above it",
    reads="extended capability 0x000F, control word, of each NIC; the cpu flag hypervisor",
    privilege="CAP_SYS_ADMIN (config space beyond 64 bytes)",
)
def _check_ats_off_in_vm(context: RuleContext) -> RuleResult:
    virtual_machine_hint = context.facts.virtual_machine
    if virtual_machine_hint is None:
        return context.not_run("no sign of a virtual machine")
    # The hint ends in its source in brackets: "the cpu flag hypervisor (/proc/cpuinfo)".
    context.record(virtual_machine_hint.rpartition("(")[2].rstrip(")"), virtual_machine_hint)
    if not context.nic_functions:
        return context.not_run("no NIC on PCI")
    ats_state_by_address = {}
    for nic in context.nic_functions:
        pci_config = config_space(context.tree, nic.address)
        ats_state_by_address[nic.address] = (
            None if pci_config is None or not pci_config.is_whole else pci_config.ats_enabled
        )
        context.record(
            f"ATSCtl of {nic.address}",
            {None: "no such capability, or not readable", True: "Enable+", False: "Enable-"}[
                ats_state_by_address[nic.address]
            ],
        )
    addresses_without_ats = [address for address, state in ats_state_by_address.items() if state is False]
    if addresses_without_ats:
        return context.fails(f"ATS is off on {', '.join(addresses_without_ats)}")
    if all(ats_state_by_address.values()):
        return context.passes("ATS is on")
    return context.unproven("the guest cannot see whether ATS of its NICs is on; the host may use it")


@rule(
    code="iommu-translates",
    title="the IOMMU translates the addresses of GPU, NIC or NVMe",
    why="On x86, translated peer traffic goes up to the root complex and back, or fails. On Arm before Linux 6.11 the "
    "reverse is true: without translation, ACS breaks CUDA.",
    remedy="x86: boot with iommu=pt, or switch the IOMMU off in the firmware; Arm64 before Linux 6.11: boot with "
    "iommu.passthrough=0",
    reads="/proc/cmdline, /sys/bus/pci/devices/*/iommu_group, /sys/kernel/iommu_groups/*/type",
)
def _check_iommu_translates(context: RuleContext) -> RuleResult:
    if not context.gpus:
        return context.not_run("no GPU on PCI")
    iommu_words = [word for word in (context.text("/proc/cmdline") or "").split() if "iommu" in word]
    group_type_by_address = {}
    for function in (*context.gpus, *context.nic_functions, *context.nvme_functions):
        if function.iommu_group is not None:
            group_type_by_address[function.address] = (
                context.text(f"/sys/kernel/iommu_groups/{function.iommu_group}/type") or "unknown"
            )
    # The type is DMA or DMA-FQ if the IOMMU translates, and identity if it does not.
    translated_addresses = [
        address for address, group_type in group_type_by_address.items() if group_type.startswith("DMA")
    ]
    if context.facts.machine == "aarch64" and context.kernel_version() < _ARM_NEEDS_TRANSLATION_BEFORE:
        is_passed_through = "identity" in group_type_by_address.values() or "iommu.passthrough=1" in iommu_words
        return (
            context.fails("pass-through on Arm64 before Linux 6.11")
            if is_passed_through
            else context.passes("no pass-through")
        )
    if translated_addresses:
        return context.fails(f"translated: {', '.join(translated_addresses)}")
    if context.is_uncaptured("/proc/cmdline") and not group_type_by_address:
        return context.not_run("the capture has neither the command line of the kernel nor IOMMU groups")
    is_off_or_passed_through = {"iommu=pt", "iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(iommu_words)
    if "unknown" in group_type_by_address.values() and not is_off_or_passed_through:
        return context.unproven("the kernel does not report the type of all IOMMU groups")
    return context.passes(
        "no IOMMU translates for these devices" if not group_type_by_address else "the IOMMU groups are passed through"
    )


@rule(
    code="far-apart",
    title="a GPU whose nearest NIC or NVMe is not below its PCIe switch",
    why="Across a host bridge, peer traffic goes through the CPU, at half the rate or less, and often far less between "
    "sockets.",
    remedy="use for each GPU the NIC or NVMe that `gdrkit topology` shows nearest, or move the card to a slot below "
    "the same switch",
    reads="/sys/bus/pci/devices links (common bridges), numa_node",
)
def _check_far_apart(context: RuleContext) -> RuleResult:
    # For each GPU and type of device, the distance and the address of the nearest device.
    nearest_by_gpu_and_type: dict[tuple[str, str], tuple[Distance, str]] = {}
    nic_addresses = {nic.address for nic in context.nic_functions}
    for gpu, device, distance in context.gpu_and_device_pairs():
        gpu_and_type = (gpu.address, "NIC" if device.address in nic_addresses else "NVMe")
        nearest_by_gpu_and_type[gpu_and_type] = min(
            nearest_by_gpu_and_type.get(gpu_and_type, (Distance.UNKNOWN, device.address)), (distance, device.address)
        )
    if not nearest_by_gpu_and_type:
        return context.not_run("no GPU, or neither NIC nor NVMe on PCI")
    for (gpu_address, device_type), (distance, address) in nearest_by_gpu_and_type.items():
        context.record(f"nearest {device_type} of {gpu_address}", f"{address} at {distance.name}")
    far_apart_texts = [
        f"{gpu_address} to its nearest {device_type} is {distance.name}"
        for (gpu_address, device_type), (distance, _) in nearest_by_gpu_and_type.items()
        if distance > Distance.PXB
    ]
    if not far_apart_texts:
        return context.passes("every GPU has a NIC or NVMe below its own switch")
    if context.facts.virtual_machine is not None:
        return context.unproven(
            f"{far_apart_texts[0]} in this virtual machine, whose PCI tree may differ from the hardware"
        )
    unlisted_count = len(far_apart_texts[_LISTED_TEXTS_MAX:])
    unlisted_text = f" and {unlisted_count} more" if unlisted_count else ""
    return context.fails("; ".join(far_apart_texts[:_LISTED_TEXTS_MAX]) + unlisted_text)


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
def _check_link_downgraded(context: RuleContext) -> RuleResult:
    narrow_link_texts, slow_links, known_link_count = [], [], 0
    for upper_device, lower_device in _list_links(context):
        width_max, speed_max = _find_link_maximum(upper_device, lower_device)
        width, speed = _parse_number(lower_device.link_width), _parse_number(lower_device.link_speed)
        if not (width_max and width in _LINK_WIDTHS) and not (speed_max and speed):
            continue
        known_link_count += 1
        context.record(
            f"link of {lower_device.address}",
            f"{lower_device.link_speed} x{lower_device.link_width} of {speed_max} GT/s x{width_max:g}"
            if speed_max and width_max
            else "partly known",
        )
        if width_max and width in _LINK_WIDTHS and width < width_max:
            narrow_link_texts.append(f"{lower_device.address} has x{width:g} of x{width_max:g}")
        elif speed_max and speed and speed < speed_max:
            slow_links.append((lower_device, speed_max))
    if context.facts.virtual_machine is not None and (narrow_link_texts or slow_links):
        links_text = "; ".join(
            [
                *narrow_link_texts,
                *(
                    f"{function.address} at {function.link_speed} of {speed_max} GT/s"
                    for function, speed_max in slow_links
                ),
            ]
        )
        return context.unproven(f"{links_text} in this virtual machine, whose links may differ from the hardware")
    if narrow_link_texts:
        return context.fails("; ".join(narrow_link_texts))
    if not known_link_count:
        return context.not_run("no link of a GPU, NIC or NVMe reports its maximum")
    # An idle GPU lowers the speed of its links, so the links above GPUs are read again under load.
    addresses_above_gpus = {address for gpu in context.gpus for address in pci_path(context.tree, gpu.address)}
    always_slow_texts = [
        f"{function.address} at {function.link_speed} of {speed_max} GT/s"
        for function, speed_max in slow_links
        if function.address not in addresses_above_gpus
    ]
    if always_slow_texts:
        return context.fails("; ".join(always_slow_texts))
    return (
        _check_under_load(context, slow_links)
        if slow_links
        else context.passes(f"maximum speed of both ends on {format_count(known_link_count, 'link')}")
    )


def _check_under_load(context: RuleContext, slow_links: list[tuple[PciDevice, float]]) -> RuleResult:
    idle_addresses = ", ".join(function.address for function, _ in slow_links)
    observation = context.observe("load") if context.facts.cuda and context.facts.cuda.devices else None
    if observation is None or observation.failure is not None:
        return context.unproven(f"slow when idle, and not read under load: {idle_addresses}")
    speed_text_by_address = observation.seen
    still_slow_addresses = [
        function.address
        for function, speed_max in slow_links
        if (_parse_number(speed_text_by_address.get(function.address, "")) or 0) < speed_max
    ]
    if still_slow_addresses:
        return context.fails(f"slow also during copies: {', '.join(still_slow_addresses)}")
    return context.passes(f"slow when idle, and fast during copies: {idle_addresses}")


def _list_links(context: RuleContext) -> list[tuple[PciDevice | None, PciDevice]]:
    """Return each PCIe link above the GPUs, NICs and NVMe controllers, as its upper and its lower end.

    The upper end is None if it is not known.
    """
    function_by_address = {function.address: function for function in context.machine.pci_functions}
    links: dict[str, tuple[PciDevice | None, PciDevice]] = {}
    for end_device in (*context.gpus, *context.nic_functions, *context.nvme_functions):
        path_functions = [
            function_by_address.get(address) for address in pci_path(context.tree, end_device.address)[1:]
        ]
        # From the device up, each pair of functions is the lower and the upper end of a link. There is no link between
        # the two ports of a switch. The registers of the lower end describe the link.
        # The first function of the path has no known upper end, and is listed only if it is the device itself.
        for index in range(len(path_functions) - 1, -1, -2):
            lower_device = path_functions[index]
            if lower_device is not None and (
                index > 0 or lower_device is end_device or lower_device.address == end_device.address
            ):
                links[lower_device.address] = (path_functions[index - 1] if index > 0 else None, lower_device)
    return list(links.values())


def _find_link_maximum(upper_device: PciDevice | None, lower_device: PciDevice) -> tuple[float | None, float | None]:
    """Return the largest width and speed that both ends support. A value that the lower end does not report is None."""
    link_devices = [lower_device] if upper_device is None else [upper_device, lower_device]
    widths = [width for device in link_devices if (width := _parse_number(device.link_width_max)) in _LINK_WIDTHS]
    speeds = [speed for device in link_devices if (speed := _parse_number(device.link_speed_max))]
    has_lower_width, has_lower_speed = (
        _parse_number(lower_device.link_width_max) in _LINK_WIDTHS,
        bool(_parse_number(lower_device.link_speed_max)),
    )
    return (min(widths) if widths and has_lower_width else None), (min(speeds) if speeds and has_lower_speed else None)


def _parse_number(text: str | None) -> float | None:
    """Return the number with which a text such as ``32.0 GT/s PCIe`` begins, or None."""
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
def _check_small_read_request(context: RuleContext) -> RuleResult:
    if not context.nic_functions:
        return context.not_run("no NIC on PCI")
    small_request_texts, known_nic_count, strictly_ordered_count = [], 0, 0
    for nic in context.nic_functions:
        pci_config = config_space(context.tree, nic.address)
        if pci_config is None or pci_config.max_read_request_bytes is None:
            continue
        known_nic_count += 1
        strictly_ordered_count += not pci_config.relaxed_ordering
        context.record(
            f"DevCtl of {nic.address}",
            f"MaxReadReq {pci_config.max_read_request_bytes}, RlxdOrd{'+' if pci_config.relaxed_ordering else '-'}",
        )
        if pci_config.max_read_request_bytes < _READ_REQUEST_BYTES_MIN:
            small_request_texts.append(f"MaxReadReq of {nic.address} is {pci_config.max_read_request_bytes} bytes")
    if small_request_texts:
        return context.fails("; ".join(small_request_texts))
    if not known_nic_count:
        return context.not_run("config space of the NICs cannot be read")
    ordering_text = f"; relaxed ordering is off on {strictly_ordered_count} of them" if strictly_ordered_count else ""
    nics_text = format_count(known_nic_count, "NIC")
    return context.passes(f"MaxReadReq of {nics_text} is at least {_READ_REQUEST_BYTES_MIN} bytes{ordering_text}")


@rule(
    code="gpu-errors",
    title="a GPU has memory errors, or its driver logged Xid errors",
    why="A GPU with uncorrected memory errors, or one that fell off the bus, fails or delays transfers. That looks "
    "like an error of the NIC or of the storage.",
    remedy="look up the Xid number in NVIDIA's Xid catalogue; reset the GPU (`nvidia-smi --gpu-reset`) if a row of its "
    "memory waits to be replaced; drain the node and run DCGM's diagnostics if the errors come back",
    reads="NVML: memory errors and replaced rows; the kernel log: NVRM: Xid",
    privilege="CAP_SYSLOG where kernel.dmesg_restrict is 1",
)
def _check_gpu_errors(context: RuleContext) -> RuleResult:
    if not context.has_gpu:
        return context.not_run("no GPU here")
    defects = []
    gpus = context.facts.nvml.gpus if context.facts.nvml else ()
    known_healths = [(gpu.pci_bus_id, gpu.health) for gpu in gpus if gpu.health is not None]
    for address, health in known_healths:
        context.record(f"NVML about {address}", f"uncorrected errors: {health.uncorrected_errors}")
        if health.uncorrected_errors:
            defects.append(f"{address} has {health.uncorrected_errors} uncorrected memory errors")
        if health.is_remapping_pending or health.has_remapping_failed:
            defects.append(f"a row of the memory of {address} waits to be replaced, or could not be replaced")
    kernel_log = context.machine.kernel_log
    xid_lines = [line for line in kernel_log.lines if _XID_LINE.search(line)]
    context.record("kernel log", xid_lines[-1] if xid_lines else kernel_log.unreadable or "no Xid error")
    if xid_lines:
        xid_numbers = sorted({int(match[1]) for line in xid_lines if (match := _XID_LINE.search(line))})
        defects.append(f"{len(xid_lines)} Xid errors in the kernel log: {', '.join(map(str, xid_numbers))}")
    if defects:
        return context.fails("; ".join(defects))
    if kernel_log.unreadable:
        subject_text = "NVML reports no errors; the kernel log" if known_healths else "NVML and the kernel log"
        return context.not_run(f"{subject_text} cannot be read: {kernel_log.unreadable}")
    return context.passes("no memory errors and no Xid errors")


RULES = (
    _check_acs_redirect,
    _check_ats_off_in_vm,
    _check_iommu_translates,
    _check_far_apart,
    _check_link_downgraded,
    _check_small_read_request,
    _check_gpu_errors,
)
