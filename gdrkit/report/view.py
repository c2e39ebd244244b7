"""The data for the templates of index.html and summary.md, derived from the contents of a run.

All decisions about what to show are made here, so that the templates contain only layout.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.install_paths import install_paths
from gdrkit.report.drawing import best_state, make_drawing
from gdrkit.report.failures import failures
from gdrkit.report.figure import format_number, make_plot
from gdrkit.report.record import Record, Verdict
from gdrkit.report.routes import RouteOutcome, RouteStatus, file_statuses, route_statuses
from gdrkit.report.substrate import Substrate, describe, weakest
from gdrkit.report.sweep import describes_hardware, split_number, sweeps
from gdrkit.report.unproven import unproven_cases
from gdrkit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gdrkit.evidence import LoadedLibrary
    from gdrkit.inventory import ApiFailure, Facts
    from gdrkit.report.contents import Contents
    from gdrkit.report.drawing import Drawing
    from gdrkit.report.failures import Failure
    from gdrkit.report.figure import SweepPlot
    from gdrkit.report.record import SeenLibrary
    from gdrkit.report.routes import FileStatus
    from gdrkit.report.run import Run
    from gdrkit.report.unproven import UnprovenCases

__all__ = ["ApiView", "CaseView", "Grid", "SuiteView", "View", "host_rows", "make_view"]

# The page shows the evidence of a case as a list, except that of these keys, which it shows elsewhere.
_KEYS_SHOWN_SEPARATELY = ("traceback",)


@dataclass(frozen=True, slots=True)
class ApiView:
    """The substrate of an API, as its identifier and in `words`, and the path and build id of each library."""

    api: str
    substrate: str
    words: str
    libraries: tuple[tuple[str, str], ...]
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case as texts to show. ``anchor`` is its HTML id in the page, ``origin`` is file and line of its record."""

    record: Record
    name: str
    evidence: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, str], ...]
    traceback: str
    anchor: str
    origin: str


@dataclass(frozen=True, slots=True)
class SuiteView:
    """The cases of one file."""

    file: str
    cases: tuple[CaseView, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of the states of routes, with a row for each device and a column for each NIC or mount.

    A cell is None if there is no route between the device and the NIC or mount.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class View:
    """All data of a run that the templates use.

    ``counts`` is the result of :func:`_count_verdicts`. ``anchors`` and ``origins`` have, for the id of each case, its
    HTML id in the page, and the file and line of its record.
    """

    run: Run
    facts: Facts
    has_facts: bool
    counts: tuple[tuple[str, str, int, str], ...]
    failures: tuple[Failure, ...]
    apis: tuple[ApiView, ...]
    routes: tuple[RouteStatus, ...]
    files: tuple[FileStatus, ...]
    grids: tuple[tuple[str, Grid], ...]
    drawing: Drawing | None
    plots: tuple[SweepPlot, ...]
    suites: tuple[SuiteView, ...]
    unproven: tuple[UnprovenCases, ...]
    host: tuple[tuple[str, str], ...]
    anchors: Mapping[str, str]
    origins: Mapping[str, str]


def make_view(contents: Contents) -> View:
    """Derive the view from the contents of a run."""
    run, facts, records = contents.run, contents.facts, contents.records
    suites: dict[str, list[CaseView]] = {}
    for record_index, (record, origin) in enumerate(zip(records, contents.origins, strict=True)):
        suites.setdefault(record.case.partition("::")[0], []).append(
            _make_case_view(record, f"r{record_index}", origin)
        )
    cases = [case for suite_cases in suites.values() for case in suite_cases]
    routes, files = route_statuses(facts, records), file_statuses(facts, records)
    anchors: dict[str, str] = {}
    origins: dict[str, str] = {}
    for case in cases:
        anchors.setdefault(case.record.case, case.anchor)
        origins.setdefault(case.record.case, case.origin)
    return View(
        run=run,
        facts=facts,
        has_facts=contents.has_facts,
        counts=_count_verdicts(records, anchors),
        failures=failures(facts, records, routes, files),
        apis=tuple(_make_api_view(api, run, facts, records) for api in _reported_apis(facts, records)),
        routes=routes,
        files=files,
        grids=_make_grids(routes, files),
        drawing=make_drawing(facts, routes),
        plots=tuple(map(make_plot, sweeps(records, facts))),
        suites=tuple(SuiteView(file=file, cases=tuple(suite_cases)) for file, suite_cases in suites.items()),
        unproven=unproven_cases(records),
        host=tuple(host_rows(facts)),
        anchors=anchors,
        origins=origins,
    )


def _make_grids(routes: Sequence[RouteStatus], files: Sequence[FileStatus]) -> tuple[tuple[str, Grid], ...]:
    """Return the tables of GPUs and NICs and of GPUs and mounts, with their names. A table of one cell is left out."""
    nics = _make_grid([(status.device_index, status.nic, status) for status in routes])
    mounts = _make_grid([(status.device_index, status.mount, status) for status in files])
    grids = (("GPUs and NICs", nics), ("GPUs and mounts", mounts))
    return tuple((name, grid) for name, grid in grids if len(grid.columns) * len(grid.rows) > 1)


def _make_grid(statuses: Sequence[tuple[int, str, RouteStatus | FileStatus]]) -> Grid:
    columns = tuple(dict.fromkeys(column for _, column, _ in statuses))
    devices = sorted({index for index, _, _ in statuses})
    cells: dict[tuple[int, str], list[RouteOutcome]] = {}
    for index, column, status in statuses:
        cells.setdefault((index, column), []).append(status.state)
    return Grid(
        columns,
        tuple(
            (
                f"GPU {index}",
                tuple(best_state(cells[index, name]).value if (index, name) in cells else None for name in columns),
            )
            for index in devices
        ),
    )


def _count_verdicts(records: Sequence[Record], anchors: Mapping[str, str]) -> tuple[tuple[str, str, int, str], ...]:
    """Return, for each verdict: its value, its word, the number of its cases, and the anchor of the first case."""
    words = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.UNPROVEN: "unproven", Verdict.NOT_RUN: "not run"}
    counts = Counter(record.verdict for record in records)
    # The verdicts are in the order of interest to the reader. A count of zero is shown for "passed" and "failed" only.
    order = (Verdict.PASS, Verdict.FAIL, Verdict.UNPROVEN, Verdict.NOT_RUN)
    listed_verdicts = [verdict for verdict in order if counts[verdict] or verdict in (Verdict.PASS, Verdict.FAIL)]
    first_anchors = {record.verdict: anchors[record.case] for record in reversed(records)}
    return tuple(
        (verdict.value, words[verdict], counts[verdict], first_anchors.get(verdict, "")) for verdict in listed_verdicts
    )


def _make_api_view(api: str, run: Run, facts: Facts, records: Sequence[Record]) -> ApiView:
    # If the facts have no substrate of the API, such as for cuFile, it is the weakest substrate of all cases.
    case_substrates = [Substrate(record.substrate[api]) for record in records if api in record.substrate]
    name = run.substrate.get(api) or (weakest(case_substrates).value if case_substrates else None)
    file_name_prefixes = {"verbs": "libibverbs.", "cuda": "libcuda.", "cufile": "libcufile.", "hlthunk": "libhl"}
    api_libraries: dict[tuple[str, str], None] = {}
    libraries: list[LoadedLibrary | SeenLibrary] = [*facts.api_libraries(api)]
    libraries += [library for record in records for library in record.libraries]
    for library in libraries:
        if (library.soname or library.path.rpartition("/")[2]).startswith(file_name_prefixes[api]):
            api_libraries[
                install_paths().portable(library.path), library.build_id or library.error or "no build id"
            ] = None
    return ApiView(
        api=api,
        substrate=name or "none",
        words=describe(Substrate(name)) if name else "not available",
        libraries=tuple(api_libraries),
        failure={"verbs": facts.verbs_failure, "cuda": facts.cuda_failure, "hlthunk": facts.gaudi_failure}.get(api),
    )


def _reported_apis(facts: Facts, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the APIs of the report: verbs and CUDA always, cuFile and hl-thunk only if facts or a case have them."""
    used_apis = {api for record in records for api in record.substrate}
    if facts.gaudi or facts.gaudi_failure:
        used_apis.add("hlthunk")
    return ("verbs", "cuda", *(api for api in ("cufile", "hlthunk") if api in used_apis))


def _make_case_view(record: Record, anchor: str, origin: str) -> CaseView:
    evidence = tuple(
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in record.evidence.items()
        if key not in _KEYS_SHOWN_SEPARATELY
    )
    # Numbers that were measured on software stay in the records. Here they would look like performance.
    return CaseView(
        record=record,
        name=record.case.partition("::")[2] or record.case,
        evidence=evidence,
        numbers=tuple(_format_numbers(record.numbers)) if describes_hardware(record) else (),
        traceback=str(record.evidence.get("traceback", "")),
        anchor=anchor,
        origin=origin,
    )


def _format_numbers(numbers: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield each number as a name and a text.

    ``rate_gb_per_s_median`` with its minimum and maximum gives ``rate`` and ``12.3 GB/s (11.9 to 12.6)``.
    """
    for name, value in numbers.items():
        number = split_number(name)
        stem = name.removesuffix(f"_{number.statistic}")
        if number.statistic in ("min", "max") and f"{stem}_median" in numbers:
            continue
        lowest, highest = numbers.get(f"{stem}_min"), numbers.get(f"{stem}_max")
        is_median = number.statistic == "median"
        words = " ".join(filter(None, (number.base, "" if is_median else number.statistic))).replace("_", " ")
        text = f"{format_number(value)} {number.unit_words}".strip()
        if is_median and lowest is not None and highest is not None:
            text += f" ({format_number(lowest)} to {format_number(highest)})"
        yield words or number.unit, text


def host_rows(facts: Facts) -> list[tuple[str, str]]:
    """Return the facts about the host (kernel, devices, limits, libraries) as pairs of name and text."""
    limits, kernel = facts.limits, facts.kernel
    memlock = "not readable"
    if limits.memlock_known:
        memlock = "no limit" if limits.memlock_bytes is None else format_bytes(limits.memlock_bytes)
    rows = [
        ("System", f"{kernel.distribution or 'unknown distribution'}, {facts.machine}"),
        ("Kernel", kernel.release or "not readable"),
        ("Relevant modules", ", ".join(kernel.modules) or "none loaded"),
        ("IOMMU", _describe_iommu(facts)),
        ("NVIDIA driver", facts.nvidia_driver_version or "not loaded"),
        ("NVIDIA GPUs on PCI", _describe_gpus(facts)),
        ("RDMA devices of the kernel", _describe_rdma_devices(facts)),
        ("Container", ", ".join(facts.container) or "none detected"),
        ("Locked memory", memlock),
        ("Open files", "no limit" if limits.open_files is None else str(limits.open_files)),
        ("Capabilities", ", ".join(limits.capabilities) or "none of the relevant ones"),
        ("Python", facts.python),
        ("Packages", ", ".join(f"{item.name} {item.version}" for item in facts.packages if item.version) or "none"),
    ]
    rows += [
        (
            library.soname,
            f"{install_paths().portable(library.path)} ({library.error or library.build_id or 'no build id'})",
        )
        for library in facts.libraries
        if library.path is not None
    ]
    rows += [("Not readable", f"{install_paths().portable(item.path)}: {item.errno_name}") for item in facts.unreadable]
    return rows


def _describe_iommu(facts: Facts) -> str:
    groups = facts.kernel.iommu_group_count
    words = " ".join(facts.kernel.iommu_arguments)
    return f"{groups} groups" + (f"; {words}" if words else "") if groups else words or "no groups"


def _describe_gpus(facts: Facts) -> str:
    return (
        ", ".join(f"{gpu.address} ({gpu.device_id:#06x}, {gpu.driver or 'no driver'})" for gpu in facts.gpus) or "none"
    )


def _describe_rdma_devices(facts: Facts) -> str:
    devices = []
    for device in facts.rdma_devices:
        ports = ", ".join(f"port {port.number} {port.state or '?'} {port.rate or ''}".strip() for port in device.ports)
        devices.append(f"{device.name} ({device.driver or 'unknown driver'}; {ports or 'no port'})")
    return ", ".join(devices) or "none"
