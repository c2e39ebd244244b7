"""Records: write one, read it, and list the routes of this machine and the substrate of each API."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gdrkit import evidence, inventory, report

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "records.jsonl"
    record = report.Record(
        schema_version=1,
        case="test_transfer.py::test_write",
        title="a write arrives",
        verdict=report.Verdict.PASS,
        reasons=(),
        profile="any",
        facts_digest="sha256:0",
        substrate={"cuda": "twin", "verbs": "twin"},
        libraries=(),
        seed=7,
        evidence={},
        numbers={"rate_gb_per_s": 12.5},
        routes=(),
        duration_ms=3.0,
        started="2026-11-25T12:00:00Z",
        commit=None,
        version="0.1.0",
        command="example",
    )
    report.append_record(path, record)
    assert report.read_records(path) == (record,)
    assert report.parse_records(path.read_text().splitlines()) == (record,)

facts = inventory.probe(query_apis=False)
print("name of a route:", report.route_name(device_index=0, nic="mlx5_0", method="dmabuf"))
print("routes of this machine:", [status.name for status in report.route_statuses(facts, [record])])
# The substrate of each API in this process. If the libraries of an API have different substrates, the result is the
# substrate that proves least: a twin proves less than hardware.
print(report.substrate_of(evidence.libraries(), facts))
assert report.weakest_substrate([report.Substrate.HARDWARE, report.Substrate.TWIN]) is report.Substrate.TWIN

# A run writes these files into its folder.
print([path.name for path in report.RunFolder("reports/runs/example").files])
