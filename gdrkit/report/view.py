"""The data for the templates of index.html and summary.md, derived from the contents of a run.

All decisions about what to show are made here, so that the templates contain only layout.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.install_paths import install_paths
from gdrkit.report.describe import make_headline_rows, make_host_rows
from gdrkit.report.drawing import make_drawing
from gdrkit.report.failures import failures
from gdrkit.report.figure import format_number, make_plot
from gdrkit.report.matrix import balance_matrix, distance_matrix, path_matrix
from gdrkit.report.measurements import measurements
from gdrkit.report.record import Record, Verdict
from gdrkit.report.routes import file_statuses, route_statuses
from gdrkit.report.substrate import Substrate, describe, weakest_substrate
from gdrkit.report.sweep import describes_hardware, parse_number_name, sweeps
from gdrkit.report.unproven import unproven_cases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gdrkit.evidence import LoadedLibrary
    from gdrkit.inventory import ApiFailure, Diagnosis, Facts
    from gdrkit.report.contents import RunContents
    from gdrkit.report.drawing import Drawing
    from gdrkit.report.failures import Failure
    from gdrkit.report.figure import SweepPlot
    from gdrkit.report.matrix import BalanceMatrix, DistanceMatrix, PathMatrix
    from gdrkit.report.measurements import Measurement
    from gdrkit.report.record import SeenLibrary
    from gdrkit.report.routes import FileStatus, RouteStatus
    from gdrkit.report.run import Run
    from gdrkit.report.unproven import UnprovenCases

__all__ = ["ApiView", "CaseView", "SuiteView", "View", "make_view"]

# The page shows the evidence of a case as a list. The evidence with these keys is elsewhere in the page.
_KEYS_SHOWN_SEPARATELY = ("traceback",)


@dataclass(frozen=True, slots=True)
class ApiView:
    """The substrate of an API (what it ran on), as identifier and as text, and the path and build id of each library.

    ``failure`` is the reason why the facts about the API could not be collected, or None.
    """

    api: str
    substrate: str
    substrate_text: str
    libraries: tuple[tuple[str, str], ...]
    failure: ApiFailure | None


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case as texts to show.

    ``anchor`` is its HTML id in the page, and ``origin`` is the file and the line of its record. ``library_set_number``
    is the position of its loaded libraries in :attr:`View.library_sets`, counted from 1, or 0 if it had loaded none.
    """

    record: Record
    name: str
    evidence: tuple[tuple[str, str], ...]
    numbers: tuple[tuple[str, str], ...]
    traceback: str
    anchor: str
    origin: str
    library_set_number: int


@dataclass(frozen=True, slots=True)
class SuiteView:
    """The cases of one folder, by file, and the result of :func:`_count_verdicts` for these cases."""

    folder: str
    files: tuple[tuple[str, tuple[CaseView, ...]], ...]
    counts: tuple[tuple[str, str, int, str], ...]


@dataclass(frozen=True, slots=True)
class View:
    """All data of a run that the templates use.

    ``headline_rows`` names the GPUs, NICs and drivers of the host. ``host_rows`` has more facts about the host.
    ``counts`` is the result of :func:`_count_verdicts`. ``library_sets`` has the sets of libraries that cases had
    loaded, without repetitions: most cases have the same set. ``anchors`` maps the id of each case to its HTML id in
    the page, and ``origins`` to the file and line of its record.
    """

    run: Run
    facts: Facts
    has_facts: bool
    counts: tuple[tuple[str, str, int, str], ...]
    failures: tuple[Failure, ...]
    apis: tuple[ApiView, ...]
    routes: tuple[RouteStatus, ...]
    files: tuple[FileStatus, ...]
    paths: PathMatrix | None
    balance: BalanceMatrix | None
    distances: DistanceMatrix | None
    diagnosis: Diagnosis | None
    drawing: Drawing | None
    measurements: tuple[Measurement, ...]
    plots: tuple[SweepPlot, ...]
    suites: tuple[SuiteView, ...]
    library_sets: tuple[tuple[SeenLibrary, ...], ...]
    unproven: tuple[UnprovenCases, ...]
    headline_rows: tuple[tuple[str, str], ...]
    host_rows: tuple[tuple[str, str], ...]
    anchors: Mapping[str, str]
    origins: Mapping[str, str]


def make_view(contents: RunContents) -> View:
    """Derive the view from the contents of a run."""
    run, facts, records = contents.run, contents.facts, contents.records
    cases: list[CaseView] = []
    library_sets: dict[tuple[SeenLibrary, ...], int] = {}
    for record_index, (record, origin) in enumerate(zip(records, contents.origins, strict=True)):
        library_set_number = library_sets.setdefault(record.libraries, len(library_sets) + 1) if record.libraries else 0
        cases.append(_make_case_view(record, f"r{record_index}", origin, library_set_number))
    routes, files = route_statuses(facts, records), file_statuses(facts, records)
    # Several records can have the same case. The links lead to the first of them.
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
        apis=tuple(_make_api_view(api, run, facts, records) for api in _list_reported_apis(facts, records)),
        routes=routes,
        files=files,
        paths=path_matrix(facts, routes, files),
        balance=balance_matrix(facts, records, contents.topology),
        distances=distance_matrix(contents.topology),
        diagnosis=contents.diagnosis,
        drawing=make_drawing(facts, routes),
        measurements=measurements(records, facts),
        plots=tuple(map(make_plot, sweeps(records, facts))),
        suites=_make_suites(cases, anchors),
        library_sets=tuple(library_sets),
        unproven=unproven_cases(records),
        headline_rows=tuple(make_headline_rows(facts)),
        host_rows=tuple(make_host_rows(facts)),
        anchors=anchors,
        origins=origins,
    )


def _make_suites(cases: Sequence[CaseView], anchors: Mapping[str, str]) -> tuple[SuiteView, ...]:
    cases_by_folder_and_file: dict[str, dict[str, list[CaseView]]] = {}
    for case in cases:
        file = case.record.case.partition("::")[0]
        cases_by_folder_and_file.setdefault(file.rpartition("/")[0] or file, {}).setdefault(file, []).append(case)
    return tuple(
        SuiteView(
            folder,
            tuple((file, tuple(file_cases)) for file, file_cases in cases_by_file.items()),
            _count_verdicts([case.record for file_cases in cases_by_file.values() for case in file_cases], anchors),
        )
        for folder, cases_by_file in cases_by_folder_and_file.items()
    )


def _count_verdicts(records: Sequence[Record], anchors: Mapping[str, str]) -> tuple[tuple[str, str, int, str], ...]:
    """Return value, word, number of cases and anchor of the first case, for each verdict."""
    word_by_verdict = {
        Verdict.PASS: "passed",
        Verdict.FAIL: "failed",
        Verdict.UNPROVEN: "unproven",
        Verdict.NOT_RUN: "not run",
    }
    counts = Counter(record.verdict for record in records)
    # The verdicts are in the order of interest to the reader. A count of zero is shown for "passed" and "failed" only.
    verdict_order = (Verdict.PASS, Verdict.FAIL, Verdict.UNPROVEN, Verdict.NOT_RUN)
    listed_verdicts = [
        verdict for verdict in verdict_order if counts[verdict] or verdict in (Verdict.PASS, Verdict.FAIL)
    ]
    first_anchor_by_verdict = {record.verdict: anchors[record.case] for record in reversed(records)}
    return tuple(
        (verdict.value, word_by_verdict[verdict], counts[verdict], first_anchor_by_verdict.get(verdict, ""))
        for verdict in listed_verdicts
    )


def _make_api_view(api: str, run: Run, facts: Facts, records: Sequence[Record]) -> ApiView:
    # If run.json has no substrate for the API, such as for cuFile, the report shows the weakest substrate of all cases.
    case_substrates = [Substrate(record.substrate[api]) for record in records if api in record.substrate]
    substrate = run.substrate.get(api) or (weakest_substrate(case_substrates).value if case_substrates else None)
    file_name_prefix_by_api = {"verbs": "libibverbs.", "cuda": "libcuda.", "cufile": "libcufile.", "hlthunk": "libhl"}
    paths_and_build_ids: dict[tuple[str, str], None] = {}
    libraries: list[LoadedLibrary | SeenLibrary] = [*facts.api_libraries(api)]
    libraries += [library for record in records for library in record.libraries]
    for library in libraries:
        if (library.soname or library.path.rpartition("/")[2]).startswith(file_name_prefix_by_api[api]):
            paths_and_build_ids[
                install_paths().portable(library.path), library.build_id or library.error or "no build id"
            ] = None
    return ApiView(
        api=api,
        substrate=substrate or "none",
        substrate_text=describe(Substrate(substrate)) if substrate else "not available",
        libraries=tuple(paths_and_build_ids),
        failure={"verbs": facts.verbs_failure, "cuda": facts.cuda_failure, "hlthunk": facts.gaudi_failure}.get(api),
    )


def _list_reported_apis(facts: Facts, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the APIs of the report: verbs and CUDA always, cuFile and hl-thunk only if facts or a case have them."""
    used_apis = {api for record in records for api in record.substrate}
    if facts.gaudi or facts.gaudi_failure:
        used_apis.add("hlthunk")
    return ("verbs", "cuda", *(api for api in ("cufile", "hlthunk") if api in used_apis))


def _make_case_view(record: Record, anchor: str, origin: str, library_set_number: int) -> CaseView:
    evidence = tuple(
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in record.evidence.items()
        if key not in _KEYS_SHOWN_SEPARATELY
    )
    # Numbers that were measured on software are not shown, because they would look like the performance of a machine.
    return CaseView(
        record=record,
        name=record.case.partition("::")[2] or record.case,
        evidence=evidence,
        numbers=tuple(_format_numbers(record.numbers)) if describes_hardware(record) else (),
        traceback=str(record.evidence.get("traceback", "")),
        anchor=anchor,
        origin=origin,
        library_set_number=library_set_number,
    )


def _format_numbers(numbers: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield each number as a name and a text.

    ``rate_gb_per_s_median`` with its minimum and maximum gives ``rate`` and ``12.3 GB/s (11.9 to 12.6)``.
    """
    for number_name, value in numbers.items():
        name_parts = parse_number_name(number_name)
        base_name = number_name.removesuffix(f"_{name_parts.statistic}")
        if name_parts.statistic in ("min", "max") and f"{base_name}_median" in numbers:
            continue
        lowest, highest = numbers.get(f"{base_name}_min"), numbers.get(f"{base_name}_max")
        is_median = name_parts.statistic == "median"
        words = " ".join(filter(None, (name_parts.base, "" if is_median else name_parts.statistic))).replace("_", " ")
        text = f"{format_number(value)} {name_parts.unit_words}".strip()
        if is_median and lowest is not None and highest is not None:
            text += f" ({format_number(lowest)} to {format_number(highest)})"
        yield words or name_parts.unit, text
