"""One report over many hosts: which are qualified, which differ from the others, which are slower.

Each host is the folder of a run. The report is in the parent folder and links to the reports of the hosts. A folder
that cannot be read is a row with its error, so that one damaged host does not hide the others. The command then fails.
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
from gdrkit.report.contents import Contents, read_contents
from gdrkit.report.figure import format_number
from gdrkit.report.metrics import render_metrics
from gdrkit.report.noise import Sample, judge, sample, usual
from gdrkit.report.record import Verdict
from gdrkit.report.render import environment
from gdrkit.report.routes import RouteState
from gdrkit.report.run import RunFolder, RunState, is_file, make_folder, refused, write_whole
from gdrkit.report.sweep import is_shown, split_number
from gdrkit.report.view import make_view
from gdrkit.verdict import NOISE_PERCENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from gdrkit.report.view import View
    from gdrkit.serialization import Json

__all__ = ["Fleet", "Host", "render_fleet"]

SCHEMA_VERSION = 1
_HOSTS_MIN = 3
_NOT_READABLE = "not readable"


@dataclass(frozen=True, slots=True)
class Slow:
    """A number of one host that is worse than the median of all hosts, with the difference in percent."""

    name: str
    value: str
    median: str
    percent: float


@dataclass(frozen=True, slots=True)
class Host:
    """One row of the report.

    Attributes
    ----------
    name : str
        Name of the host, with its folder if other hosts have the same name.
    folder : str
        Path relative to the folder of the fleet report.
    error : str
        Why its run could not be read; then the other fields are empty.
    exit_code : int or None
        Exit code of its run.
    state : str
        A value of RunState, or ``not readable``.
    page : str
        Link from the fleet page to the page of the host; empty if the host has no page.
    counts, routes : mapping
        Number of cases by verdict, number of routes by state.
    differs : tuple of str
        The properties in which the host differs from the majority.
    slow : tuple of Slow
        The numbers in which the host is slower than the median.
    """

    name: str
    folder: str
    error: str = ""
    exit_code: int | None = None
    state: str = _NOT_READABLE
    verdict: str = ""
    profile: str = ""
    started: str = ""
    page: str = ""
    counts: Mapping[str, int] | None = None
    routes: Mapping[str, int] | None = None
    differs: tuple[str, ...] = ()
    slow: tuple[Slow, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet report. ``problems`` has a line for each unreadable folder and each duplicate host name."""

    hosts: tuple[Host, ...]
    tally: tuple[tuple[str, int], ...]
    problems: tuple[str, ...]
    index: str


@dataclass(frozen=True, slots=True)
class _Read:
    folder: str
    contents: Contents
    view: View
    samples: Mapping[tuple[str, str], Sample]


def render_fleet(path: Path, output: Path | None = None) -> Fleet:
    """Write index.html, fleet.json and metrics.prom for all runs in the subfolders of `path`.

    Raises
    ------
    UsageError
        `path` has no folder of a run.
    SetupMissing
        The kernel refuses to list the folder, or to write.
    """
    try:
        runs = [entry for entry in sorted(path.iterdir()) if _is_run(entry)] if path.is_dir() else []
    except OSError as error:
        raise refused("read", path, error) from error
    if not runs:
        message = f"{path} holds no folder of a run"
        raise UsageError(message, what_to_do="name the folder that holds one folder for each host")
    target = output or path
    read, unreadable = _read(runs, path)
    latest, older = _latest(read)
    names, doubles = _names(latest)
    traits = _usual_traits(latest)
    medians = _medians(latest)
    hosts = [_host(it, names[it.folder], traits=traits, medians=medians, path=path, target=target) for it in latest]
    hosts += [Host(name=folder, folder=folder, error=error) for folder, error in unreadable]
    # Hosts that need attention come first.
    hosts.sort(key=lambda it: (_urgency(it), not (it.slow or it.differs), _natural(it.name)))
    problems = [f"{folder}: {error}" for folder, error in unreadable] + doubles
    counted = Counter(host.state for host in hosts)
    tally = tuple(
        (word, counted[word]) for word in (*(state.value for state in RunState), _NOT_READABLE) if counted[word]
    )
    fleet = Fleet(tuple(hosts), tally, tuple(problems), str(target / "index.html"))
    make_folder(target)
    write_whole(target / "fleet.json", json.dumps(_document(fleet, older), indent=2, ensure_ascii=False) + "\n")
    write_whole(target / "metrics.prom", _metrics(latest, names))
    page = (
        environment(escaped=True)
        .get_template("fleet.html.j2")
        .render(fleet=fleet, older=older, noise_percent=NOISE_PERCENT)
    )
    write_whole(target / "index.html", page)
    return fleet


def _urgency(host: Host) -> int:
    """Return 0 for an unreadable host, 1 for a failure, 2 for a run that proves less than it could, 3 if qualified."""
    lesser = {RunState.NOTHING_PROVEN.value, RunState.PARTIAL.value, RunState.SOFTWARE_ONLY.value}
    if host.error:
        return 0
    return 3 if host.state == RunState.QUALIFIED.value else 2 if host.state in lesser else 1


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which node10 comes after node9."""
    parts = re.split(r"([0-9]+)", name)
    # Numbers are compared by their length first, since a name may contain more digits than int() accepts.
    digits = [part.lstrip("0") for part in parts]
    return [(len(digits[at]), digits[at]) if at % 2 else (-1, part) for at, part in enumerate(parts)]


def _is_run(entry: Path) -> bool:
    folder = RunFolder(entry)
    try:
        return any(is_file(file) for file in (folder.run, folder.facts, folder.records))
    except OSError:
        # It is unknown whether this is a run. It is treated as one, so that reading it reports the error of the kernel.
        return True


def _read(runs: Sequence[Path], path: Path) -> tuple[list[_Read], list[tuple[str, str]]]:
    read: list[_Read] = []
    unreadable: list[tuple[str, str]] = []
    for entry in runs:
        name = entry.relative_to(path).as_posix()
        try:
            contents = read_contents(entry)
        except GdrkitError as error:
            unreadable.append((name, str(error)))
        else:
            read.append(_Read(name, contents, make_view(contents), _samples(contents)))
    return read, unreadable


def _latest(read: Sequence[_Read]) -> tuple[list[_Read], tuple[str, ...]]:
    """Return the last run of each host, and the folders of the earlier runs."""
    kept: list[_Read] = []
    older: list[str] = []
    for it in sorted(read, key=lambda one: one.contents.run.started, reverse=True):
        if any(_is_same(it.contents, other.contents) for other in kept):
            older.append(it.folder)
        else:
            kept.append(it)
    return kept, tuple(sorted(older))


def _is_same(one: Contents, other: Contents) -> bool:
    """Return whether two runs with the same host name are of the same machine, as far as their facts show it."""
    if not one.run.host or one.run.host != other.run.host:
        return False
    mine, theirs = _serials(one), _serials(other)
    if mine and theirs:
        # Machines that were installed from one image share their host id. The serial numbers of their devices differ.
        return bool(mine & theirs)
    return one.run.host_id is not None and one.run.host_id == other.run.host_id


def _serials(contents: Contents) -> set[str]:
    guids = {device.node_guid for device in contents.facts.rdma_devices if device.has_device and device.node_guid}
    is_real = contents.run.substrate.get("cuda") == "hardware"
    return guids | {device.uuid for device in (contents.facts.cuda.devices if contents.facts.cuda and is_real else ())}


def _names(latest: Sequence[_Read]) -> tuple[dict[str, str], list[str]]:
    """Return the name to show for each folder, and a line for each name that several hosts have."""
    by_name: dict[str, list[str]] = {}
    for it in latest:
        by_name.setdefault(it.contents.run.host or it.folder, []).append(it.folder)
    shown: dict[str, str] = {}
    problems = []
    for name, folders in by_name.items():
        shown.update({folder: name if len(folders) == 1 else f"{name} ({folder})" for folder in folders})
        if len(folders) > 1:
            problems.append(f"{len(folders)} hosts are called {name}: {', '.join(sorted(folders))}")
    return shown, problems


def _traits(contents: Contents) -> dict[str, str]:
    facts = contents.facts
    firmware = sorted({device.firmware for device in facts.rdma_devices if device.firmware})
    devices = facts.cuda.devices if facts.cuda else ()
    return {
        "gdrkit": contents.run.version,
        "kernel": facts.kernel.release or "not readable",
        "NVIDIA driver": facts.nvidia_driver_version or "none",
        "GPUs": ", ".join(f"{count} {name}" for name, count in sorted(Counter(it.name for it in devices).items()))
        or "none",
        "RDMA devices": str(len(facts.rdma_devices)),
        "NIC firmware": ", ".join(firmware) or "none",
        "profile": contents.run.profile,
    }


def _usual_traits(latest: Sequence[_Read]) -> dict[str, str]:
    """Return the values that most hosts have; empty if there are too few hosts."""
    if len(latest) < _HOSTS_MIN:
        return {}
    found: dict[str, Counter[str]] = {}
    for it in latest:
        for trait, value in _traits(it.contents).items():
            found.setdefault(trait, Counter())[value] += 1
    most = {trait: counted.most_common(1)[0] for trait, counted in found.items()}
    return {trait: value for trait, (value, count) in most.items() if count * 2 > len(latest)}


def _samples(contents: Contents) -> dict[tuple[str, str], Sample]:
    """Return, by case and name, every number for which more or less is better."""
    found: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for record in contents.records:
        for name in record.numbers if is_shown(record) else ():
            number = split_number(name)
            if number.better and not number.is_bound and number.statistic in ("", "median"):
                found.setdefault((record.case, name), []).append(record.numbers)
    return {(case, name): sample(name, numbers) for (case, name), numbers in found.items()}


def _medians(latest: Sequence[_Read]) -> dict[tuple[str, str], Sample]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for it in latest:
        for number, one in it.samples.items():
            found.setdefault(number, []).append(one)
    return {number: usual(samples) for number, samples in found.items() if len(samples) >= _HOSTS_MIN}


def _host(
    it: _Read,
    name: str,
    *,
    traits: Mapping[str, str],
    medians: Mapping[tuple[str, str], Sample],
    path: Path,
    target: Path,
) -> Host:
    contents = it.contents
    own = _traits(contents)
    verdicts = Counter(record.verdict for record in contents.records)
    states = Counter(status.state for status in it.view.routes) + Counter(status.state for status in it.view.files)
    folder = os.path.relpath(path / it.folder, target)
    has_page = (path / it.folder / "index.html").is_file()
    return Host(
        name=name,
        folder=folder,
        exit_code=contents.run.exit_code,
        state=contents.run.state.value,
        verdict=contents.run.verdict,
        profile=contents.run.profile,
        started=contents.run.started,
        # The path is quoted as bytes, since the name of a folder is not always UTF-8.
        page=quote(os.fsencode(f"{folder}/index.html")) if has_page else "",
        counts={verdict.value: verdicts[verdict] for verdict in Verdict},
        routes={state.value: states[state] for state in RouteState},
        differs=tuple(
            f"{trait} {own[trait]}, usual is {value}" for trait, value in traits.items() if own[trait] != value
        ),
        slow=tuple(sorted(_slow(it, medians), key=lambda slow: -abs(slow.percent))),
    )


def _slow(it: _Read, medians: Mapping[tuple[str, str], Sample]) -> Iterator[Slow]:
    for (case, name), found in it.samples.items():
        median = medians.get((case, name))
        # The percentage of the difference from a median of 0 is undefined.
        if median is not None and median.value:
            judged = judge(name, median, found)
            if judged.outcome == "worse":
                values = format_number(found.value), format_number(median.value)
                yield Slow(f"{case} {name}", *values, round(judged.change_percent, 1))


def _document(fleet: Fleet, older: Sequence[str]) -> dict[str, Json]:
    return {
        "schema_version": SCHEMA_VERSION,
        "tally": dict(fleet.tally),
        "problems": list(fleet.problems),
        "older_runs": list(older),
        "hosts": [
            {
                "name": host.name,
                "folder": host.folder,
                "error": host.error,
                "exit_code": host.exit_code,
                "state": host.state,
                "verdict": host.verdict,
                "profile": host.profile,
                "started": host.started,
                "counts": dict(host.counts or {}),
                "routes": dict(host.routes or {}),
                "differs": list(host.differs),
                "slow": [
                    {"name": it.name, "value": it.value, "median": it.median, "percent": it.percent} for it in host.slow
                ],
            }
            for host in fleet.hosts
        ],
    }


def _metrics(latest: Sequence[_Read], names: Mapping[str, str]) -> str:
    """Return the samples of all hosts, grouped by metric family as the format requires."""
    families: dict[str, list[str]] = {}
    for it in latest:
        for line in render_metrics(it.contents, it.view, host=names[it.folder]).splitlines(keepends=True):
            name = line.split(" ")[2] if line.startswith("#") else line.partition("{")[0]
            lines = families.setdefault(name, [])
            if not (line.startswith("#") and line in lines):
                lines.append(line)
    return "".join(line for lines in families.values() for line in lines)
