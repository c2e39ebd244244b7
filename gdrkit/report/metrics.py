"""Writer of metrics.prom, the report of a run for Prometheus (the textfile collector of node_exporter).

The format is version 0.0.4 of prometheus.io/docs/instrumenting/exposition_formats.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteOutcome
from gdrkit.report.run import RunState
from gdrkit.report.sweep import describes_hardware
from gdrkit.text import single_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.report.contents import RunContents
    from gdrkit.report.routes import FileStatus, RouteStatus
    from gdrkit.report.view import View

__all__ = ["render_metrics"]


def render_metrics(contents: RunContents, view: View, *, host: str | None = None) -> str:
    """Return the contents of metrics.prom.

    A state has one gauge for each possible value. The gauge of the present value is 1, and the others are 0. `host`, if
    given, replaces the host name of the run in the label ``host``, because several hosts may have the same name.
    """
    return "".join(_format_families(contents, view, contents.run.host if host is None else host))


def _format_families(contents: RunContents, view: View, host: str) -> Iterator[str]:
    run = contents.run
    labels = {"host": host, "profile": run.profile}
    started_s = dt.datetime.fromisoformat(run.started).timestamp()
    verdicts = [record.verdict for record in contents.records]
    yield _format_family(
        "exit_code",
        "Exit code of gdrkit qualify. gdrkit_state tells whether the host is qualified.",
        [(labels, run.exit_code)],
    )
    state_samples = [({**labels, "state": state.value}, float(state is run.state)) for state in RunState]
    yield _format_family(
        "state",
        "Result of the run for the host. Only the state qualified means proven, complete and on hardware.",
        state_samples,
    )
    yield _format_family("started_seconds", "Start of the qualification, in seconds since 1970.", [(labels, started_s)])
    yield _format_family("duration_seconds", "Duration of the qualification in seconds.", [(labels, run.duration_s)])
    yield _format_family(
        "info",
        "Version and commit of the gdrkit that ran.",
        [({**labels, "version": run.version, "commit": run.commit or ""}, 1)],
    )
    yield _format_family(
        "cases",
        "Cases by verdict.",
        [({**labels, "verdict": verdict.value}, verdicts.count(verdict)) for verdict in Verdict],
    )
    yield _format_family(
        "substrate_info",
        "Substrate of each API.",
        [({**labels, "api": api, "substrate": substrate}, 1) for api, substrate in sorted(run.substrate.items())],
    )
    yield _format_family(
        "route", "State of a route between a device and a NIC.", _make_state_samples(labels, view.routes)
    )
    yield _format_family(
        "file_route",
        "State of a route between a device and the files of a mount.",
        _make_state_samples(labels, view.files),
    )
    yield _format_family(
        "measurement",
        "Measurement on hardware, in the unit at the end of its name.",
        _make_number_samples(labels, contents),
    )


def _make_state_samples(
    labels: dict[str, str], statuses: Iterable[RouteStatus | FileStatus]
) -> Iterator[tuple[dict[str, str], float]]:
    for status in statuses:
        nic = getattr(status, "nic", None)
        destination_labels = {"mount": getattr(status, "mount", "")} if nic is None else {"nic": nic}
        route_labels = {**labels, "device": str(status.device_index), **destination_labels, "way": status.method}
        for state in RouteOutcome:
            yield {**route_labels, "state": state.value}, float(status.state is state)


def _make_number_samples(labels: dict[str, str], contents: RunContents) -> Iterator[tuple[dict[str, str], float]]:
    written_series: set[tuple[str, str]] = set()
    for record in contents.records:
        for number_name, value in record.numbers.items() if describes_hardware(record) else ():
            # A case that ran twice has two records. Prometheus rejects a file with two values of one series.
            if (record.case, number_name) not in written_series:
                written_series.add((record.case, number_name))
                yield {**labels, "case": record.case, "name": number_name}, value


def _format_family(metric_name: str, help_text: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    lines = [f"gdrkit_{metric_name}{{{_format_labels(labels)}}} {value:.17g}\n" for labels, value in samples]
    return (
        f"# HELP gdrkit_{metric_name} {help_text}\n# TYPE gdrkit_{metric_name} gauge\n{''.join(lines)}" if lines else ""
    )


def _format_labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escape_label(value)}"' for name, value in labels.items())


def _escape_label(value: str) -> str:
    return single_line(value).replace("\\", "\\\\").replace('"', '\\"')
