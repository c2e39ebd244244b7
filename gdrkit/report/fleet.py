"""One report about many hosts (``gdrkit report --fleet``): which hosts are qualified, are slow, or differ from most.

Each host is a folder with the files of a run. The fleet report is in the parent folder, and links to the reports of the
hosts. If a folder cannot be read, its row in the report has the error, and the command fails after writing the report.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from gdrkit.errors import GdrkitError, UsageError
from gdrkit.report.contents import RunContents, read_contents
from gdrkit.report.figure import format_number
from gdrkit.report.measurements import case_title, number_words
from gdrkit.report.metrics import render_metrics
from gdrkit.report.noise import Sample, compare_samples, make_sample, median_sample
from gdrkit.report.record import Verdict
from gdrkit.report.render import make_template_environment
from gdrkit.report.routes import RouteOutcome
from gdrkit.report.run import RunFolder, RunState, is_file, make_file_error, make_folder, write_atomically
from gdrkit.report.sweep import describes_hardware, parse_number_name
from gdrkit.report.view import make_view
from gdrkit.verdict import NOISE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gdrkit.report.view import View
    from gdrkit.serialization import Json

__all__ = ["Fleet", "Host", "render_fleet"]

SCHEMA_VERSION = 1
# With fewer hosts, there is no majority and no useful median.
_HOSTS_MIN = 3
_NOT_READABLE = "not readable"
# Fields of the class Host that fleet.json contains under the same names.
_DOCUMENT_FIELDS = ("name", "folder", "error", "exit_code", "state", "verdict", "profile", "started")


@dataclass(frozen=True, slots=True)
class SlowNumber:
    """A number of one host that is worse than the median of all hosts, with the difference in percent.

    ``name`` has the case and the name of the number. ``title`` has the same content in words.
    """

    name: str
    title: str
    value: str
    median: str
    unit: str
    percent: float


@dataclass(frozen=True, slots=True)
class Host:
    """One row of the report.

    Attributes
    ----------
    name : str
        Name of the host, with its folder if other hosts have the same name.
    folder : str
        Path of the folder of the run, relative to the folder of the fleet report.
    error : str
        Why the run of the host could not be read. Then ``state`` is ``not readable``, and the fields below are empty.
    exit_code : int or None
        Exit code of the run.
    state : str
        A value of RunState, or ``not readable``.
    page : str
        Link from the fleet page to the page of the host; empty if the host has no page.
    causes, to_do : tuple of str
        The causes of the verdict and what to do, as in :class:`~gdrkit.report.run.Run`.
    counts, routes : mapping
        The number of cases with each verdict, and the number of routes in each state.
    differs : tuple of str
        The traits, such as the kernel version, in which the host differs from most hosts.
    slow : tuple of SlowNumber
        The numbers that are worse than the median of all hosts.
    """

    name: str
    folder: str
    error: str = ""
    exit_code: int | None = None
    state: str = _NOT_READABLE
    verdict: str = ""
    causes: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    profile: str = ""
    started: str = ""
    page: str = ""
    counts: Mapping[str, int] | None = None
    routes: Mapping[str, int] | None = None
    differs: tuple[str, ...] = ()
    slow: tuple[SlowNumber, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The contents of the fleet report.

    ``tally`` has the number of hosts in each state. ``problems`` has a line for each unreadable folder and each
    duplicate host name. ``index`` is the path of index.html.
    """

    hosts: tuple[Host, ...]
    tally: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]
    index: str


@dataclass(frozen=True, slots=True)
class _HostRun:
    """The run of one host. The keys of ``samples`` have the case and the name of the number."""

    folder: str
    contents: RunContents
    view: View
    samples: Mapping[tuple[str, str], Sample]


def render_fleet(path: Path, output: Path | None = None) -> Fleet:
    """Write index.html, fleet.json and metrics.prom for all runs in the subfolders of `path`.

    The files are written into `output`, or into `path` if it is None.

    Raises
    ------
    UsageError
        `path` contains no folder of a run.
    SetupMissing
        The folder cannot be listed, or a file cannot be written.
    """
    try:
        run_folders = [entry for entry in sorted(path.iterdir()) if _is_run_folder(entry)] if path.is_dir() else []
    except OSError as error:
        raise make_file_error("read", path, error) from error
    if not run_folders:
        message = f"{path} contains no folder of a run"
        raise UsageError(message, what_to_do="name the folder that contains one folder for each host")
    output_folder = output or path
    host_runs, unreadable_folders = _read_runs(run_folders, path)
    latest_runs, older_folders = _select_latest(host_runs)
    display_name_by_folder, duplicate_problems = _choose_display_names(latest_runs)
    majority_traits = _find_majority_traits(latest_runs)
    median_sample_by_number = _compute_median_samples(latest_runs)
    hosts = [
        _make_host(
            host_run,
            display_name_by_folder[host_run.folder],
            majority_traits=majority_traits,
            median_sample_by_number=median_sample_by_number,
            fleet_folder=path,
            output_folder=output_folder,
        )
        for host_run in latest_runs
    ]
    hosts += [
        Host(name=folder, folder=os.path.relpath(path / folder, output_folder), error=error)
        for folder, error in unreadable_folders
    ]
    # Hosts that need attention come first.
    hosts.sort(
        key=lambda host: (_rank_urgency(host), not (host.slow or host.differs), _make_natural_sort_key(host.name))
    )
    problems = [f"{folder}: {error}" for folder, error in unreadable_folders] + duplicate_problems
    state_counts = Counter(host.state for host in hosts)
    tally = tuple(
        (state, state_counts[state])
        for state in (*(state.value for state in RunState), _NOT_READABLE)
        if state_counts[state]
    )
    fleet = Fleet(tuple(hosts), tally, tuple(problems), str(output_folder / "index.html"))
    make_folder(output_folder)
    write_atomically(
        output_folder / "fleet.json",
        json.dumps(_make_document(fleet, older_folders), indent=2, ensure_ascii=False) + "\n",
    )
    write_atomically(output_folder / "metrics.prom", _merge_metrics(latest_runs, display_name_by_folder))
    page_html = (
        make_template_environment(escaped=True)
        .get_template("fleet.html.j2")
        .render(fleet=fleet, older=older_folders, noise_percent=NOISE_PERCENT)
    )
    write_atomically(output_folder / "index.html", page_html)
    return fleet


def _rank_urgency(host: Host) -> int:
    """Return the rank of a host in the report, the most urgent first.

    The rank is 0 for an unreadable host, 1 for a failed run, 2 for a run that proves only a part, and 3 for a qualified
    host.
    """
    incomplete_states = {RunState.NOTHING_PROVEN.value, RunState.PARTIAL.value, RunState.SOFTWARE_ONLY.value}
    if host.error:
        return 0
    return 3 if host.state == RunState.QUALIFIED.value else 2 if host.state in incomplete_states else 1


def _make_natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which node10 comes after node9."""
    parts = re.split(r"([0-9]+)", name)
    # Numbers are compared by their length first, since a name may contain more digits than int() accepts. The split
    # puts the numbers at the odd indices, and text at the even indices.
    stripped_parts = [part.lstrip("0") for part in parts]
    return [
        (len(stripped_parts[index]), stripped_parts[index]) if index % 2 else (-1, part)
        for index, part in enumerate(parts)
    ]


def _is_run_folder(path: Path) -> bool:
    folder = RunFolder(path)
    try:
        return any(is_file(file) for file in (folder.run, folder.facts, folder.records))
    except OSError:
        # The kernel refuses to look into the folder, for example for a missing permission. read_contents() gets the
        # same error and reports it.
        return True


def _read_runs(run_folders: Sequence[Path], fleet_folder: Path) -> tuple[list[_HostRun], list[tuple[str, str]]]:
    host_runs: list[_HostRun] = []
    unreadable_folders: list[tuple[str, str]] = []
    for run_folder in run_folders:
        folder = run_folder.relative_to(fleet_folder).as_posix()
        try:
            contents = read_contents(run_folder)
        except GdrkitError as error:
            unreadable_folders.append((folder, str(error)))
        else:
            host_runs.append(_HostRun(folder, contents, make_view(contents), _make_samples(contents)))
    return host_runs, unreadable_folders


def _select_latest(host_runs: Sequence[_HostRun]) -> tuple[list[_HostRun], tuple[str, ...]]:
    """Return the last run of each host, and the folders of the earlier runs."""
    latest_runs: list[_HostRun] = []
    older_folders: list[str] = []
    for host_run in sorted(host_runs, key=lambda candidate: candidate.contents.run.started, reverse=True):
        if any(_is_same_host(host_run.contents, newer_run.contents) for newer_run in latest_runs):
            older_folders.append(host_run.folder)
        else:
            latest_runs.append(host_run)
    return latest_runs, tuple(sorted(older_folders))


def _is_same_host(first: RunContents, second: RunContents) -> bool:
    """Return whether two runs are from the same machine, according to host name, hardware ids and host id."""
    if not first.run.host or first.run.host != second.run.host:
        return False
    first_ids, second_ids = _list_hardware_ids(first), _list_hardware_ids(second)
    if first_ids and second_ids:
        # Machines that were installed from one image have the same host id, but different devices.
        return bool(first_ids & second_ids)
    return first.run.host_id is not None and first.run.host_id == second.run.host_id


def _list_hardware_ids(contents: RunContents) -> set[str]:
    """Return the node GUIDs of NICs and the UUIDs of GPUs.

    Emulated devices are left out, because they may have the same ids on several machines.
    """
    guids = {device.node_guid for device in contents.facts.rdma_devices if device.has_device and device.node_guid}
    is_cuda_hardware = contents.run.substrate.get("cuda") == "hardware"
    return guids | {
        device.uuid for device in (contents.facts.cuda.devices if contents.facts.cuda and is_cuda_hardware else ())
    }


def _choose_display_names(latest_runs: Sequence[_HostRun]) -> tuple[dict[str, str], list[str]]:
    """Return the display name of each folder, and a line for each name that several hosts have."""
    folders_by_name: dict[str, list[str]] = {}
    for host_run in latest_runs:
        folders_by_name.setdefault(host_run.contents.run.host or host_run.folder, []).append(host_run.folder)
    display_name_by_folder: dict[str, str] = {}
    problems = []
    for name, folders in folders_by_name.items():
        display_name_by_folder.update(
            {folder: name if len(folders) == 1 else f"{name} ({folder})" for folder in folders}
        )
        if len(folders) > 1:
            problems.append(f"{len(folders)} hosts have the name {name}: {', '.join(sorted(folders))}")
    return display_name_by_folder, problems


def _collect_traits(contents: RunContents) -> dict[str, str]:
    facts = contents.facts
    firmware_versions = sorted({device.firmware for device in facts.rdma_devices if device.firmware})
    devices = facts.cuda.devices if facts.cuda else ()
    return {
        "gdrkit": contents.run.version,
        "kernel": facts.kernel.release or "not readable",
        "NVIDIA driver": facts.nvidia_driver_version or "none",
        "GPUs": ", ".join(
            f"{count} {name}" for name, count in sorted(Counter(device.name for device in devices).items())
        )
        or "none",
        "RDMA devices": str(len(facts.rdma_devices)),
        "NIC firmware": ", ".join(firmware_versions) or "none",
        "profile": contents.run.profile,
    }


def _find_majority_traits(latest_runs: Sequence[_HostRun]) -> dict[str, str]:
    """Return the traits with the values that most hosts have. The result is empty if there are too few hosts."""
    if len(latest_runs) < _HOSTS_MIN:
        return {}
    counter_by_trait: dict[str, Counter[str]] = {}
    for host_run in latest_runs:
        for trait, value in _collect_traits(host_run.contents).items():
            counter_by_trait.setdefault(trait, Counter())[value] += 1
    most_common_by_trait = {trait: counter.most_common(1)[0] for trait, counter in counter_by_trait.items()}
    return {trait: value for trait, (value, count) in most_common_by_trait.items() if count * 2 > len(latest_runs)}


def _make_samples(contents: RunContents) -> dict[tuple[str, str], Sample]:
    """Return, by case and name, the sample of every measured number that can be better or worse."""
    numbers_by_case_and_name: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for record in contents.records:
        for number_name in record.numbers if describes_hardware(record) else ():
            name_parts = parse_number_name(number_name)
            if name_parts.better_sign and not name_parts.is_bound and name_parts.statistic in ("", "median"):
                numbers_by_case_and_name.setdefault((record.case, number_name), []).append(record.numbers)
    return {
        (case, number_name): make_sample(number_name, numbers)
        for (case, number_name), numbers in numbers_by_case_and_name.items()
    }


def _compute_median_samples(latest_runs: Sequence[_HostRun]) -> dict[tuple[str, str], Sample]:
    samples_by_number: dict[tuple[str, str], list[Sample]] = {}
    for host_run in latest_runs:
        for case_and_name, sample in host_run.samples.items():
            samples_by_number.setdefault(case_and_name, []).append(sample)
    return {
        case_and_name: median_sample(samples)
        for case_and_name, samples in samples_by_number.items()
        if len(samples) >= _HOSTS_MIN
    }


def _make_host(
    host_run: _HostRun,
    display_name: str,
    *,
    majority_traits: Mapping[str, str],
    median_sample_by_number: Mapping[tuple[str, str], Sample],
    fleet_folder: Path,
    output_folder: Path,
) -> Host:
    contents, view = host_run.contents, host_run.view
    trait_values = _collect_traits(contents)
    verdict_counts = Counter(record.verdict for record in contents.records)
    route_state_counts = Counter(status.state for status in view.routes) + Counter(
        status.state for status in view.files
    )
    folder = os.path.relpath(fleet_folder / host_run.folder, output_folder)
    has_page = (fleet_folder / host_run.folder / "index.html").is_file()
    return Host(
        name=display_name,
        folder=folder,
        exit_code=contents.run.exit_code,
        state=contents.run.state.value,
        verdict=contents.run.verdict,
        causes=contents.run.causes,
        to_do=contents.run.to_do,
        profile=contents.run.profile,
        started=contents.run.started,
        # The path is quoted as bytes, since the name of a folder is not always UTF-8.
        page=quote(os.fsencode(f"{folder}/index.html")) if has_page else "",
        counts={verdict.value: verdict_counts[verdict] for verdict in Verdict},
        routes={state.value: route_state_counts[state] for state in RouteOutcome},
        differs=tuple(
            f"{trait} is {trait_values[trait]}, on most hosts {value}"
            for trait, value in majority_traits.items()
            if trait_values[trait] != value
        ),
        slow=tuple(
            sorted(_list_slow_numbers(host_run, median_sample_by_number), key=lambda number: -abs(number.percent))
        ),
    )


def _list_slow_numbers(
    host_run: _HostRun, median_sample_by_number: Mapping[tuple[str, str], Sample]
) -> Iterator[SlowNumber]:
    for (case, number_name), sample in host_run.samples.items():
        median_of_hosts = median_sample_by_number.get((case, number_name))
        # The percentage of the difference from a median of 0 is undefined.
        if median_of_hosts is not None and median_of_hosts.value:
            change = compare_samples(number_name, median_of_hosts, sample)
            if change.outcome == "worse":
                title = " ".join(filter(None, (case_title(case), *number_words(case, number_name))))
                value_texts = (
                    format_number(sample.value),
                    format_number(median_of_hosts.value),
                    parse_number_name(number_name).unit_words,
                )
                yield SlowNumber(f"{case} {number_name}", title, *value_texts, round(change.change_percent, 1))


def _make_document(fleet: Fleet, older_folders: Sequence[str]) -> dict[str, Json]:
    return {
        "schema_version": SCHEMA_VERSION,
        "tally": dict(fleet.tally),
        "problems": list(fleet.problems),
        "older_runs": list(older_folders),
        "hosts": [
            {
                **{name: getattr(host, name) for name in _DOCUMENT_FIELDS},
                "counts": dict(host.counts or {}),
                "routes": dict(host.routes or {}),
                "differs": list(host.differs),
                "slow": [
                    {name: getattr(slow_number, name) for name in ("name", "value", "median", "percent")}
                    for slow_number in host.slow
                ],
            }
            for host in fleet.hosts
        ],
    }


def _merge_metrics(latest_runs: Sequence[_HostRun], display_name_by_folder: Mapping[str, str]) -> str:
    """Return the contents of metrics.prom for all hosts. In this format, all samples of a metric must be adjacent."""
    lines_by_metric: dict[str, list[str]] = {}
    for host_run in latest_runs:
        text = render_metrics(host_run.contents, host_run.view, host=display_name_by_folder[host_run.folder])
        for line in text.splitlines(keepends=True):
            # The third word of a comment line ("# HELP" or "# TYPE") is the name of the metric.
            metric_name = line.split(" ")[2] if line.startswith("#") else line.partition("{")[0]
            lines = lines_by_metric.setdefault(metric_name, [])
            if not (line.startswith("#") and line in lines):
                lines.append(line)
    return "".join(line for lines in lines_by_metric.values() for line in lines)
