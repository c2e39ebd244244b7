"""The documents for programs conform to their formats: report.json, the Prometheus file metrics.prom, and JUnit XML."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from defusedxml import ElementTree
from support.hosts import make_host_facts, make_host_records, write_run
from support.json_schema import NEEDS_JSONSCHEMA, find_unknown_keywords, find_violations
from support.records import NIC, make_facts, make_record

from gdrkit.report import CaseReason, ClaimedRoute, RunFolder, Verdict, read_records
from gdrkit.report.junit import render_junit
from gdrkit.report.render import render

if TYPE_CHECKING:
    from pathlib import Path

# A sample in the text format of Prometheus: a name, labels with escaped values, and a number.
METRIC_SAMPLE_REGEX = re.compile(r'^gdrkit_[a-z_]+\{([a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*\} -?[0-9.e+-]+$')


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    facts = make_host_facts(gpu_count=2, nic_count=4)
    return render(write_run(tmp_path_factory.mktemp("run"), facts, list(make_host_records(facts))))


def read_report(run_folder: RunFolder) -> dict[str, Any]:
    report_data: dict[str, Any] = json.loads(run_folder.report.read_bytes())
    return report_data


@NEEDS_JSONSCHEMA
def test_report_conforms_to_its_schema(run_folder: RunFolder) -> None:
    assert find_violations("report-1.json", read_report(run_folder)) == []


@NEEDS_JSONSCHEMA
def test_schema_rejects_missing_and_unknown_fields(run_folder: RunFolder) -> None:
    report_data = read_report(run_folder)
    report_data["extra"] = report_data.pop("verdict")
    report_data["routes"][0]["state"] = "fine"
    violations = sorted(find_violations("report-1.json", report_data))
    assert violations == [
        "$.routes[0].state: 'fine' is not one of ['proven', 'unproven', 'fell_back', 'not_possible']",
        "$: 'verdict' is a required property",
        "$: Additional properties are not allowed ('extra' was unexpected)",
    ]


@NEEDS_JSONSCHEMA
def test_misspelt_keyword_of_a_schema_is_found() -> None:
    misspelt_schema = {"type": "array", "minItem": 1}
    schema = {
        "properties": {"a": {"items": misspelt_schema}},
        "allOf": [{"if": {}, "then": {"required": [], "minimun": 1}}],
    }
    assert list(find_unknown_keywords(schema)) == ["$.properties.a.items.minItem", "$.allOf[0].then.minimun"]


@NEEDS_JSONSCHEMA
def test_records_conform_to_their_schema(run_folder: RunFolder) -> None:
    record_objects = [json.loads(line) for line in run_folder.records.read_text().splitlines()]
    assert [violation for record in record_objects for violation in find_violations("record-1.json", record)] == []
    assert any(record["files"] for record in record_objects)


def test_every_measurement_names_its_record(run_folder: RunFolder) -> None:
    records = read_records(run_folder.records)
    measurements = read_report(run_folder)["measurements"]
    # Eight cases (two directions and four sizes) have five numbers each.
    assert len(measurements) == 8 * 5
    for measurement in measurements:
        (record_location,) = measurement["records"]
        record = records[int(record_location.removeprefix("records.jsonl:")) - 1]
        assert (record.case, record.numbers[measurement["name"]]) == (measurement["case"], measurement["value"])


def test_metrics_are_valid_for_a_collector(run_folder: RunFolder) -> None:
    lines = run_folder.metrics.read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert [line for line in samples if not METRIC_SAMPLE_REGEX.match(line)] == []
    # No series occurs twice, and the type of every metric family is stated once.
    series = [line.rpartition(" ")[0] for line in samples]
    assert len(set(series)) == len(series)
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(families)) == len(families)
    assert {line.partition("{")[0] for line in samples} == set(families)
    assert 'gdrkit_cases{host="node1",profile="any",verdict="fail"} 2' in lines


ODD_TEXT = 'a "quoted" \\ name\x01\n{x="1"} 7'


def test_metrics_escape_every_label_value(tmp_path: Path) -> None:
    nic = dataclasses.replace(NIC, name='mlx5"0\\')
    claimed_route = ClaimedRoute(0, nic.name, 'way"')
    record = make_record(
        case='a.py::test["x"]', numbers={"rate_gb_per_s": 1.0}, substrate={"cuda": "hardware"}, routes=(claimed_route,)
    )
    run_folder = RunFolder(write_run(tmp_path, make_facts(rdma_devices=[nic]), [record], host=ODD_TEXT))
    run = dataclasses.replace(run_folder.read_run(), profile=ODD_TEXT, commit='"', version="\\")
    run_folder.write_run(run)
    lines = render(run_folder.path).metrics.read_text().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert [line for line in samples if not METRIC_SAMPLE_REGEX.match(line)] == []
    escaped_text = r"a \"quoted\" \\ name\\x01 {x=\"1\"} 7"
    assert f'gdrkit_exit_code{{host="{escaped_text}",profile="{escaped_text}"}} 0' in lines
    assert any(r'nic="mlx5\"0\\",way="way\"",state="unproven"} 1' in line for line in lines)
    assert any(r'case="a.py::test[\"x\"]"' in line for line in lines)


def test_junit_replaces_characters_that_xml_forbids(tmp_path: Path) -> None:
    odd_profile = "pro\x01file\ud800\uffff"
    record = make_record(
        Verdict.FAIL, case="a\x02.py::t\x03", reasons=(CaseReason("r\x04"),), evidence={"traceback": "t\x05"}
    )
    run_folder = RunFolder(write_run(tmp_path, make_facts(), [record], host="h\x06"))
    run = dataclasses.replace(run_folder.read_run(), profile=odd_profile, verdict="v\x07", commit="c\x08")
    document = render_junit(run, [record])
    # The parser raises an error if the document contains a forbidden character. defusedxml also refuses entities.
    root = ElementTree.fromstring(document)
    (suite,) = root
    assert suite.get("name") == "pro\\x01file\\ud800\N{REPLACEMENT CHARACTER}"
    assert {element.get("name"): element.get("value") for element in suite.find("properties") or ()}["host"] == "h\\x06"


def test_route_has_exactly_one_state(run_folder: RunFolder) -> None:
    state_counts: dict[str, int] = {}
    for line in run_folder.metrics.read_text().splitlines():
        if line.startswith(("gdrkit_route{", "gdrkit_file_route{")):
            labels, _, sample_value = line.rpartition(" ")
            route = re.sub(r',state="\w+"', "", labels)
            state_counts[route] = state_counts.get(route, 0) + int(sample_value)
    # Two GPUs have routes to four NICs, and GPU 0 has routes to two mounts.
    assert len(state_counts) == 10
    assert set(state_counts.values()) == {1}


def test_case_that_ran_twice_is_one_series(tmp_path: Path) -> None:
    records = [make_record(numbers={"rate_gb_per_s": rate}, substrate={"cuda": "hardware"}) for rate in (1.0, 2.0)]
    metrics_text = render(write_run(tmp_path, make_facts(), records)).metrics.read_text()
    assert metrics_text.count("gdrkit_measurement{") == 1
    # The record has no file route, so the metrics do not have this family.
    assert "gdrkit_file_route" not in metrics_text


def test_numbers_of_software_are_in_no_document(tmp_path: Path) -> None:
    record = make_record(Verdict.PASS, numbers={"rate_gb_per_s": 387.25}, substrate={"cuda": "twin"})
    run_folder = render(write_run(tmp_path, make_facts(), [record]))
    for file in (run_folder.report, run_folder.metrics, run_folder.summary, run_folder.junit, run_folder.index):
        assert "387.25" not in file.read_text()
