"""Text of ``gdrkit facts`` (what the machine has) and of ``gdrkit plan`` (which cases run on it), for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gdrkit.report.routes import route_name
from gdrkit.report.substrate import Substrate, describe, substrates_of_facts
from gdrkit.report.view import host_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gdrkit.evidence import DeviceNode
    from gdrkit.inventory import ApiFailure, Facts

__all__ = ["describe_facts", "describe_plan"]


def describe_facts(facts: Facts) -> str:
    """Describe the host and each API. An API has its substrate and devices, or its error and what to do about it."""
    rows = [*host_rows(facts), *_verbs_rows(facts), *_cuda_rows(facts), *_gaudi_rows(facts), *_route_rows(facts)]
    rows += _evidence_rows(facts)
    return _align(rows)


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Describe a plan: the profile, the nox sessions that fit the machine, and every case with its unmet needs."""
    rows = [("profile", str(plan["profile"]))]
    rows += [(f"{api} runs on", describe(Substrate(name))) for api, name in sorted(plan["substrate"].items())]
    for name, session in plan["sessions"].items():
        rows.append((f"nox -s {name}", f"{'fits' if session['fits'] else 'does not fit'}: {session['why']}"))
    lines = [_align(rows), ""]
    for case in plan["cases"]:
        action = "refused" if case["refused"] else "not run" if case["unmet"] else "run"
        lines.append(f"{action:8} {case['case']}")
        lines += [f"         {reason['need']}: {reason['text']}" for reason in case["unmet"]]
    return "\n".join(lines)


def _verbs_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _api_rows("verbs", facts, facts.verbs_failure)
    for nic in facts.verbs.nics if facts.verbs else ():
        ports = f"active ports {', '.join(map(str, nic.active_ports)) or 'none'}"
        dmabuf = nic.failure.message if nic.failure else f"dma-buf regions: {'yes' if nic.dmabuf else 'no'}"
        yield f"  {nic.name}", f"{ports}; {dmabuf}"


def _cuda_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _api_rows("cuda", facts, facts.cuda_failure)
    for device in facts.cuda.devices if facts.cuda else ():
        dmabuf = "yes" if device.has("DMA_BUF_SUPPORTED") else "no"
        yield f"  GPU {device.index}", f"{device.name} at {device.pci_bus_id}; dma-buf export: {dmabuf}"


def _gaudi_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _api_rows("hlthunk", facts, facts.gaudi_failure)
    for device in facts.gaudi.devices if facts.gaudi else ():
        yield f"  Gaudi {device.number}", f"{device.card_name} ({device.generation}) at {device.pci_bus_id}"


def _api_rows(api: str, facts: Facts, failure: ApiFailure | None) -> Iterator[tuple[str, str]]:
    substrate = substrates_of_facts(facts).get(api)
    if substrate is not None:
        yield api, f"runs on {describe(substrate)}"
    elif failure is not None:
        yield api, failure.message
        if failure.what_to_do:
            yield "", f"To do: {failure.what_to_do}"


def _route_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    for route in facts.routes:
        cause = "" if route.possible or route.failure is None else f": {route.failure.message}"
        name = route_name(route.device_index, route.nic, route.way)
        yield name, ("registration works" if route.possible else "not possible") + cause
    if facts.routes_failure is not None:
        yield "routes", facts.routes_failure.message


def _evidence_rows(facts: Facts) -> Iterator[tuple[str, str]]:
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
        yield f"  {nic.name}", f"driver {nic.driver or 'unknown'}; "
        f"{_describe_evidence(nic.pci_driver, nic.node, nic.missing)}"
    for api, opened in (("cuda", facts.cuda), ("verbs", facts.verbs)):
        if opened is not None:
            nodes = ", ".join(f"{node.path} ({node.major}:{node.minor})" for node in opened.nodes)
            yield f"  open for {api}", nodes or "no character device"


def _describe_evidence(pci_driver: str | None, node: DeviceNode | None, missing: Iterable[str]) -> str:
    device = "no device node" if node is None else f"{node.path} ({node.major}:{node.minor})"
    driver = f"bound to {pci_driver}" if pci_driver else "no PCI driver"
    return "; ".join((device, driver, *missing))


def _align(rows: list[tuple[str, str]]) -> str:
    width = min(max((len(name) for name, _ in rows), default=0), 40)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in rows)
