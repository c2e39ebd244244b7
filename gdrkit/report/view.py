"""A run as its templates see it: derived, sorted, counted.

Level 5. Everything that needs a decision is decided here, so that the templates only lay out.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.house import house
from gdrkit.report.record import Record, Verdict
from gdrkit.report.routes import RouteStatus, route_statuses
from gdrkit.report.substrate import Substrate, describe
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.report.record import SeenLibrary
    from gdrkit.report.run import Run
    from gdrkit.witness import LoadedLibrary

__all__ = ["ApiView", "CaseView", "NotRunView", "SuiteView", "View", "host_rows", "make_view"]

# Left out of the evidence of a case: shown in a place of their own.
_OWN_PLACE = ("traceback",)


@dataclass(frozen=True, slots=True)
class ApiView:
    """On what one API ran, by which libraries."""

    api: str
    substrate: str
    words: str
    libraries: tuple[tuple[str, str], ...]
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class CaseView:
    """One case, ready to print."""

    record: Record
    name: str
    evidence: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, str], ...]
    traceback: str


@dataclass(frozen=True, slots=True)
class SuiteView:
    """The cases of one file."""

    file: str
    cases: tuple[CaseView, ...]


@dataclass(frozen=True, slots=True)
class NotRunView:
    """A need that was not met, and the cases that it kept from running."""

    need: str
    text: str
    foreseen: bool
    cases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A whole run."""

    run: Run
    facts: Facts
    counts: tuple[tuple[str, str, int], ...]
    apis: tuple[ApiView, ...]
    routes: tuple[RouteStatus, ...]
    suites: tuple[SuiteView, ...]
    not_run: tuple[NotRunView, ...]
    host: tuple[tuple[str, str], ...]
    has_numbers: bool


def make_view(run: Run, facts: Facts, records: Sequence[Record]) -> View:
    """Derive it."""
    suites: dict[str, list[CaseView]] = {}
    for record in records:
        suites.setdefault(record.case.partition("::")[0], []).append(_case(record))
    cases = [case for members in suites.values() for case in members]
    return View(
        run=run,
        facts=facts,
        counts=_counts(records),
        apis=tuple(_api(api, run, facts, records) for api in ("verbs", "cuda")),
        routes=route_statuses(facts, records),
        suites=tuple(SuiteView(file=file, cases=tuple(members)) for file, members in suites.items()),
        not_run=_not_run(records),
        host=tuple(host_rows(facts)),
        has_numbers=any(case.numbers for case in cases),
    )


def _counts(records: Sequence[Record]) -> tuple[tuple[str, str, int], ...]:
    words = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.UNPROVEN: "unproven", Verdict.NOT_RUN: "not run"}
    counted = Counter(record.verdict for record in records)
    # In the order in which a reader wants them; a zero of "failed" is said, other zeros are not.
    order = (Verdict.PASS, Verdict.FAIL, Verdict.UNPROVEN, Verdict.NOT_RUN)
    said = [verdict for verdict in order if counted[verdict] or verdict in (Verdict.PASS, Verdict.FAIL)]
    return tuple((verdict.value, words[verdict], counted[verdict]) for verdict in said)


def _api(api: str, run: Run, facts: Facts, records: Sequence[Record]) -> ApiView:
    name = run.substrate.get(api)
    stems = {"verbs": "libibverbs.", "cuda": "libcuda."}
    seen: dict[tuple[str, str], None] = {}
    found: list[LoadedLibrary | SeenLibrary] = [*facts.api_libraries(api)]
    found += [library for record in records for library in record.libraries]
    for library in found:
        if (library.soname or library.path.rpartition("/")[2]).startswith(stems[api]):
            seen[house().portable(library.path), library.build_id or library.error or "no build id"] = None
    return ApiView(
        api=api,
        substrate=name or "none",
        words=describe(Substrate(name)) if name else "did not answer",
        libraries=tuple(seen),
        failure={"verbs": facts.verbs_failure, "cuda": facts.cuda_failure}[api],
    )


def _case(record: Record) -> CaseView:
    evidence = tuple(
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in record.evidence.items()
        if key not in _OWN_PLACE
    )
    # Numbers from software are kept in the records and are no performance of anything.
    hardware = bool(record.substrate) and all(name == Substrate.HARDWARE.value for name in record.substrate.values())
    shown = hardware and record.verdict in (Verdict.PASS, Verdict.UNPROVEN)
    return CaseView(
        record=record,
        name=record.case.partition("::")[2] or record.case,
        evidence=evidence,
        numbers=tuple((key, f"{value:g}") for key, value in record.numbers.items()) if shown else (),
        traceback=str(record.evidence.get("traceback", "")),
    )


def _not_run(records: Sequence[Record]) -> tuple[NotRunView, ...]:
    grouped: dict[tuple[str, str, bool], list[str]] = {}
    for record in records:
        if record.verdict is Verdict.NOT_RUN:
            for reason in record.reasons:
                key = (reason.need or "", reason.text, reason.foreseen is True)
                grouped.setdefault(key, []).append(record.case)
    ordered = sorted(grouped.items(), key=lambda pair: (pair[0][2], pair[0]))
    return tuple(NotRunView(*key, cases=tuple(cases)) for key, cases in ordered)


def host_rows(facts: Facts) -> list[tuple[str, str]]:
    """What files of the kernel say about the host, as names and values."""
    limits, kernel = facts.limits, facts.kernel
    memlock = "not readable"
    if limits.memlock_known:
        memlock = "no limit" if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes)
    rows = [
        ("System", f"{kernel.distribution or 'unknown distribution'}, {facts.machine}"),
        ("Kernel", kernel.release or "not readable"),
        ("Modules that matter", ", ".join(kernel.modules) or "none loaded"),
        ("IOMMU", _iommu(facts)),
        ("NVIDIA driver", facts.nvidia_driver_version or "not loaded"),
        ("NVIDIA GPUs on PCI", _gpus(facts)),
        ("RDMA devices of the kernel", _rdma(facts)),
        ("Container", ", ".join(facts.container) or "no sign of one"),
        ("Locked memory", memlock),
        ("Open files", "no limit" if limits.open_files is None else str(limits.open_files)),
        ("Capabilities", ", ".join(limits.capabilities) or "none of those that matter"),
        ("Python", facts.python),
        ("Packages", ", ".join(f"{item.name} {item.version}" for item in facts.packages if item.version) or "none"),
    ]
    rows += [
        (library.soname, f"{library.path} ({library.error or library.build_id or 'no build id'})")
        for library in facts.libraries
        if library.path is not None
    ]
    rows += [("Not readable", f"{item.path}: {item.errno_name}") for item in facts.unreadable]
    return rows


def _iommu(facts: Facts) -> str:
    groups = facts.kernel.iommu_group_count
    words = " ".join(facts.kernel.iommu_arguments)
    return f"{groups} groups" + (f"; {words}" if words else "") if groups else words or "no groups"


def _gpus(facts: Facts) -> str:
    return (
        ", ".join(f"{gpu.address} ({gpu.device_id:#06x}, {gpu.driver or 'no driver'})" for gpu in facts.gpus) or "none"
    )


def _rdma(facts: Facts) -> str:
    named = []
    for device in facts.rdma_devices:
        ports = ", ".join(f"port {port.number} {port.state or '?'} {port.rate or ''}".strip() for port in device.ports)
        named.append(f"{device.name} ({device.driver or 'unknown driver'}; {ports or 'no port'})")
    return ", ".join(named) or "none"
