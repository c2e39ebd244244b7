"""A run as a Prometheus text file, for the textfile collector of node_exporter.

The format is that of prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.routes import RouteState
from gdrkit.report.run import RunState
from gdrkit.report.sweep import is_shown
from gdrkit.text import single_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.report.contents import Contents
    from gdrkit.report.routes import FileStatus, RouteStatus
    from gdrkit.report.view import View

__all__ = ["render_metrics"]


def render_metrics(contents: Contents, view: View, *, host: str | None = None) -> str:
    """Return all gauges. A state is one gauge per possible value; the gauge of the present value is 1.

    `host` replaces the name of the host if that is not unique.
    """
    return "".join(_families(contents, view, contents.run.host if host is None else host))


def _families(contents: Contents, view: View, host: str) -> Iterator[str]:
    run = contents.run
    who = {"host": host, "profile": run.profile}
    began = dt.datetime.fromisoformat(run.started).timestamp()
    verdicts = [record.verdict for record in contents.records]
    yield _family(
        "exit_code",
        "Exit code of gdrkit qualify; whether the host is qualified says gdrkit_state.",
        [(who, run.exit_code)],
    )
    states = [({**who, "state": state.value}, float(state is run.state)) for state in RunState]
    yield _family("state", "What the run says about the host: only qualified is proven, whole and on hardware.", states)
    yield _family("started_seconds", "When the qualification began, since 1970.", [(who, began)])
    yield _family("duration_seconds", "How long it took.", [(who, run.duration_s)])
    yield _family(
        "info", "What was qualified, and by what.", [({**who, "version": run.version, "commit": run.commit or ""}, 1)]
    )
    yield _family(
        "cases",
        "Cases by verdict.",
        [({**who, "verdict": verdict.value}, verdicts.count(verdict)) for verdict in Verdict],
    )
    yield _family(
        "substrate_info",
        "On what each API ran.",
        [({**who, "api": api, "substrate": name}, 1) for api, name in sorted(run.substrate.items())],
    )
    yield _family("route", "State of a route between a device and a NIC.", _states(who, view.routes))
    yield _family("file_route", "State of a route between a device and the files of a mount.", _states(who, view.files))
    yield _family(
        "measurement", "What was measured on hardware, in the unit that its name ends with.", _numbers(who, contents)
    )


def _states(
    who: dict[str, str], statuses: Iterable[RouteStatus | FileStatus]
) -> Iterator[tuple[dict[str, str], float]]:
    for status in statuses:
        reached = getattr(status, "nic", None)
        place = {"mount": getattr(status, "mount", "")} if reached is None else {"nic": reached}
        labels = {**who, "device": str(status.device_index), **place, "way": status.way}
        for state in RouteState:
            yield {**labels, "state": state.value}, float(status.state is state)


def _numbers(who: dict[str, str], contents: Contents) -> Iterator[tuple[dict[str, str], float]]:
    seen: set[tuple[str, str]] = set()
    for record in contents.records:
        for name, value in record.numbers.items() if is_shown(record) else ():
            # A case that ran twice would give one series with two values, which collectors reject.
            if (record.case, name) not in seen:
                seen.add((record.case, name))
                yield {**who, "case": record.case, "name": name}, value


def _family(name: str, text: str, samples: Iterable[tuple[dict[str, str], float]]) -> str:
    lines = [f"gdrkit_{name}{{{_labels(labels)}}} {value:.17g}\n" for labels, value in samples]
    return f"# HELP gdrkit_{name} {text}\n# TYPE gdrkit_{name} gauge\n{''.join(lines)}" if lines else ""


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return single_line(value).replace("\\", "\\\\").replace('"', '\\"')
