"""Writer of report.json, the report of a run for other programs. Its format is ``reports/schema/report-1.json``.

Each route, failure, group of unproven cases and measurement of the report has a list ``records`` with the file and the
line of the records from which it was derived.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gdrkit.report.record import Verdict
from gdrkit.report.sweep import describes_hardware, parse_number_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from gdrkit.report.contents import RunContents
    from gdrkit.report.routes import FileStatus, RouteStatus
    from gdrkit.report.view import View
    from gdrkit.serialization import Json

__all__ = ["SCHEMA_VERSION", "render_document"]

SCHEMA_VERSION = 1


def render_document(contents: RunContents, view: View) -> str:
    """Return the contents of report.json as indented JSON."""
    run = contents.run
    verdicts = [record.verdict for record in contents.records]
    document: dict[str, Json] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": run.verdict,
        "exit_code": run.exit_code,
        "state": run.state.value,
        "banner": run.banner,
        "host": run.host,
        "host_id": run.host_id,
        "profile": run.profile,
        "started": run.started,
        "duration_s": run.duration_s,
        "command": run.command,
        "seed": run.seed,
        "commit": run.commit,
        "version": run.version,
        "facts_digest": contents.facts.digest if contents.has_facts else None,
        "substrate": dict(run.substrate),
        "libraries": [
            {"api": api_view.api, "path": path, "build_id": build_id}
            for api_view in view.apis
            for path, build_id in api_view.libraries
        ],
        "counts": {verdict.value: verdicts.count(verdict) for verdict in Verdict},
        "causes": list(run.causes),
        "to_do": list(run.to_do),
        "required": list(run.required),
        "routes": [
            {"nic": status.nic, "path": status.path, **_make_route_fields(status, view.origins)}
            for status in view.routes
        ],
        "files": [{"mount": status.mount, **_make_route_fields(status, view.origins)} for status in view.files],
        "failures": [
            {
                "what": list(failure.affected),
                "cause": failure.cause,
                "remedy": failure.remedy,
                "records": _list_origins(failure.cases, view.origins),
            }
            for failure in view.failures
        ],
        "not_proven": [
            {
                "what": group.need_or_api,
                "reason": group.reason,
                "unlocked_by": group.needed,
                "ran": group.ran,
                "foreseen": group.foreseen,
                "records": _list_origins(group.cases, view.origins),
            }
            for group in view.unproven
        ],
        "measurements": list(_list_measurements(contents)),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _make_route_fields(status: RouteStatus | FileStatus, origins: Mapping[str, str]) -> dict[str, Json]:
    return {
        "device_index": status.device_index,
        "way": status.method,
        "state": status.state.value,
        "cause": status.cause,
        "records": _list_origins(status.cases, origins),
    }


def _list_origins(cases: Iterable[str], origins: Mapping[str, str]) -> list[Json]:
    return [origins[case] for case in cases if case in origins]


def _list_measurements(contents: RunContents) -> Iterator[Json]:
    """Yield the numbers that were measured on hardware. Numbers of software twins are only in the records."""
    for record, origin in zip(contents.records, contents.origins, strict=True):
        for number_name, value in record.numbers.items() if describes_hardware(record) else ():
            unit = parse_number_name(number_name).unit
            yield {"case": record.case, "name": number_name, "value": value, "unit": unit, "records": [origin]}
