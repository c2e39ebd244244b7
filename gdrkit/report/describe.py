"""Text of ``gdrkit facts`` (what the machine has) and of ``gdrkit plan`` (which cases run on it), for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from gdrkit.install_paths import install_paths
from gdrkit.report.routes import route_name
from gdrkit.report.substrate import Substrate, describe, substrates_of_facts
from gdrkit.text import shorten_identifier
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gdrkit.evidence import DeviceNode
    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.inventory.facts import LibraryFacts

__all__ = ["describe_facts", "describe_plan", "make_headline_rows", "make_host_rows"]

# The headline of the report names at most this many NICs.
_NICS_NAMED_MAX = 4


def describe_facts(facts: Facts) -> str:
    """Describe the host and each API: its substrate and its devices, or its error and the remedy."""
    rows = [
        *make_host_rows(facts),
        *_make_verbs_rows(facts),
        *_make_cuda_rows(facts),
        *_make_gaudi_rows(facts),
        *_make_route_rows(facts),
    ]
    rows += _make_evidence_rows(facts)
    return _align(rows)


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Describe a plan: the profile, the nox sessions that fit the machine, and every case with its unmet needs."""
    rows = [("profile", str(plan["profile"]))]
    rows += [
        (f"{api} runs on", describe(Substrate(substrate_name)))
        for api, substrate_name in sorted(plan["substrate"].items())
    ]
    for session_name, session in plan["sessions"].items():
        rows.append((f"nox -s {session_name}", f"{'fits' if session['fits'] else 'does not fit'}: {session['why']}"))
    lines = [_align(rows), ""]
    for case in plan["cases"]:
        decision = "refused" if case["refused"] else "not run" if case["unmet"] else "run"
        lines.append(f"{decision:8} {case['case']}")
        lines += [f"         {reason['need']}: {reason['text']}" for reason in case["unmet"]]
    return "\n".join(lines)


def _make_verbs_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _make_api_rows("verbs", facts, facts.verbs_failure)
    for nic in facts.verbs.nics if facts.verbs else ():
        ports_text = f"active ports {', '.join(map(str, nic.active_ports)) or 'none'}"
        dmabuf_text = nic.failure.message if nic.failure else f"dma-buf regions: {'yes' if nic.dmabuf else 'no'}"
        yield f"  {nic.name}", f"{ports_text}; {dmabuf_text}"


def _make_cuda_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _make_api_rows("cuda", facts, facts.cuda_failure)
    for device in facts.cuda.devices if facts.cuda else ():
        dmabuf_text = "yes" if device.has("DMA_BUF_SUPPORTED") else "no"
        yield f"  GPU {device.index}", f"{device.name} at {device.pci_bus_id}; dma-buf export: {dmabuf_text}"


def _make_gaudi_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _make_api_rows("hlthunk", facts, facts.gaudi_failure)
    for device in facts.gaudi.devices if facts.gaudi else ():
        yield f"  Gaudi {device.number}", f"{device.card_name} ({device.generation}) at {device.pci_bus_id}"


def _make_api_rows(api: str, facts: Facts, failure: ApiFailure | None) -> Iterator[tuple[str, str]]:
    substrate = substrates_of_facts(facts).get(api)
    if substrate is not None:
        yield api, f"runs on {describe(substrate)}"
    elif failure is not None:
        yield api, failure.message
        if failure.what_to_do:
            yield "", f"To do: {failure.what_to_do}"


def _make_route_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    for route in facts.routes:
        cause = "" if route.possible or route.failure is None else f": {route.failure.message}"
        name = route_name(route.device_index, route.nic, route.way)
        yield name, ("registration works" if route.possible else "not possible") + cause
    if facts.routes_failure is not None:
        yield "routes", facts.routes_failure.message


def _make_evidence_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the evidence that distinguishes hardware from software; see docs/report.md."""
    if facts.evidence is None:
        yield "Evidence", "the kernel was not queried"
        return
    evidence = facts.evidence
    if evidence.nvidia_version is not None:
        yield "Evidence of GPUs", f"the NVIDIA driver reports version {evidence.nvidia_version} by ioctl"
    for gpu in evidence.gpus:
        yield f"  {gpu.pci_address}", _describe_evidence(gpu.pci_driver, gpu.node, gpu.missing)
    yield from (("Evidence of GPUs" if not evidence.gpus else "", line) for line in evidence.nvidia_missing)
    yield from (("Evidence of RDMA devices", line) for line in evidence.rdma_missing)
    for nic in evidence.rdma:
        description = _describe_evidence(nic.pci_driver, nic.node, nic.missing)
        yield f"  {nic.name}", f"driver {nic.driver or 'unknown'}; {description}"
    for api, api_facts in (("cuda", facts.cuda), ("verbs", facts.verbs)):
        if api_facts is not None:
            nodes = ", ".join(f"{node.path} ({node.major}:{node.minor})" for node in api_facts.nodes)
            yield f"  open for {api}", nodes or "no character device"


def _describe_evidence(pci_driver: str | None, node: DeviceNode | None, missing: Iterable[str]) -> str:
    node_text = "no device node" if node is None else f"{node.path} ({node.major}:{node.minor})"
    driver_text = f"bound to {pci_driver}" if pci_driver else "no PCI driver"
    return "; ".join((node_text, driver_text, *missing))


def _align(rows: list[tuple[str, str]]) -> str:
    """Return one line for each pair of a name and a text, with all texts in one column."""
    width = min(max((len(name) for name, _ in rows), default=0), 40)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)


def make_headline_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the devices and drivers by which an engineer recognizes a machine, as pairs of name and text."""
    devices = facts.cuda.devices if facts.cuda else ()
    model_counts = Counter(device.name for device in devices) or Counter(
        f"PCI {gpu.device_id:04x}" for gpu in facts.gpus
    )
    yield "GPUs", ", ".join(f"{count} x {model}" for model, count in model_counts.items()) or "none"
    if facts.gaudi is not None and facts.gaudi.devices:
        card_counts = Counter(device.card_name for device in facts.gaudi.devices)
        yield "Gaudi", ", ".join(f"{count} x {card}" for card, count in card_counts.items())
    rate_by_nic = {
        device.name: next((port.rate for port in device.ports if port.rate), "") for device in facts.rdma_devices
    }
    nic_names = list(rate_by_nic) or [nic.name for nic in (facts.verbs.nics if facts.verbs else ())]
    listed_nics = [
        f"{name} ({rate})" if (rate := rate_by_nic.get(name)) else name for name in nic_names[:_NICS_NAMED_MAX]
    ]
    unlisted_nics = [f"{len(nic_names) - _NICS_NAMED_MAX} more"] if len(nic_names) > _NICS_NAMED_MAX else []
    yield "NICs", ", ".join([*listed_nics, *unlisted_nics]) or "none"
    cuda_text = f", CUDA {facts.cuda.driver_version}" if facts.cuda else ""
    yield "NVIDIA driver", (facts.nvidia_driver_version or "not loaded") + cuda_text
    yield "System", f"{facts.kernel.distribution or 'unknown'}, kernel {facts.kernel.release or 'unknown'}"


def make_host_rows(facts: Facts) -> list[tuple[str, str]]:
    """Return the facts about the host (kernel, devices, limits, libraries) as pairs of name and text."""
    limits, kernel = facts.limits, facts.kernel
    memlock_text = "not readable"
    if limits.memlock_known:
        memlock_text = "no limit" if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes)
    rows = [
        ("System", f"{kernel.distribution or 'unknown distribution'}, {facts.machine}"),
        ("Kernel", kernel.release or "not readable"),
        ("Relevant modules", ", ".join(kernel.modules) or "none loaded"),
        ("IOMMU", _describe_iommu(facts)),
        ("NVIDIA driver", facts.nvidia_driver_version or "not loaded"),
        ("NVIDIA GPUs on PCI", _describe_gpus(facts)),
        ("RDMA devices of the kernel", _describe_rdma_devices(facts)),
        ("Container", ", ".join(facts.container) or "none detected"),
        ("Locked memory", memlock_text),
        ("Open files", "no limit" if limits.open_files is None else str(limits.open_files)),
        ("Capabilities", ", ".join(limits.capabilities) or "none of the relevant ones"),
        ("Python", facts.python),
        (
            "Packages",
            ", ".join(f"{package.name} {package.version}" for package in facts.packages if package.version) or "none",
        ),
    ]
    rows += [(library.soname, _describe_library(library)) for library in facts.libraries if library.path is not None]
    rows += [("Not readable", f"{install_paths().portable(file.path)}: {file.errno_name}") for file in facts.unreadable]
    return rows


def _describe_library(library: LibraryFacts) -> str:
    """Return the path of a library and the first digits of its build ID, or the reason why it has none."""
    identity = library.error or shorten_identifier(library.build_id or "no build id")
    return f"{install_paths().portable(library.path or '')} ({identity})"


def _describe_iommu(facts: Facts) -> str:
    group_count = facts.kernel.iommu_group_count
    kernel_arguments = " ".join(facts.kernel.iommu_arguments)
    return (
        f"{group_count} groups" + (f"; {kernel_arguments}" if kernel_arguments else "")
        if group_count
        else kernel_arguments or "no groups"
    )


def _describe_gpus(facts: Facts) -> str:
    return (
        ", ".join(f"{gpu.address} ({gpu.device_id:#06x}, {gpu.driver or 'no driver'})" for gpu in facts.gpus) or "none"
    )


def _describe_rdma_devices(facts: Facts) -> str:
    device_texts = []
    for device in facts.rdma_devices:
        ports_text = ", ".join(
            f"port {port.number} {port.state or '?'} {port.rate or ''}".strip() for port in device.ports
        )
        device_texts.append(f"{device.name} ({device.driver or 'unknown driver'}; {ports_text or 'no port'})")
    return ", ".join(device_texts) or "none"
