"""Malformed run folders and records cause one clear error of `gdrkit report`, or become harmless text in the report."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from support.hosts import make_host_facts, make_host_records, write_run
from support.other_user import folder_for_all_users
from support.records import make_facts, make_record, make_run

from gdrkit.errors import Reason, SetupMissing, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.report import RunFolder, append_record, read_records
from gdrkit.report.contents import read_contents
from gdrkit.report.document import render_document
from gdrkit.report.metrics import render_metrics
from gdrkit.report.render import render
from gdrkit.report.view import make_view
from gdrkit.text import escape_controls, markdown_cell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.serialization import Json

# The text has HTML, terminal control characters, a direction mark, Markdown and the comment of a Prometheus file.
HOSTILE_TEXT = '</title><script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\x9b31m\u202e|`"\\\n# HELP'
# The overflow id of Linux. A user and a group with this id have no privileges and own no files.
UNPRIVILEGED_ID = 65534
# Valid JSON values that a reader of JSON may not expect.
ODD_VALUES: tuple[Json, ...] = (None, True, 0, -1, 10**400, 5e-324, 1.7e308, "", "\ud800", "9" * 5000, [1], {"a": 0})
# Template of a program that executes its arguments as an unprivileged user. The braces stand for the id of the user.
EXECUTE_UNPRIVILEGED_TEMPLATE = (
    "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); os.execv(sys.executable, sys.argv[1:])"
)


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    records = [make_record(case=f"a.py::test_{number}") for number in range(3)]
    return RunFolder(write_run(tmp_path / "run", make_facts(), records))


def run_gdrkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def read_and_get_error(folder: RunFolder) -> str:
    """Return the message of the error that reading the folder raises."""
    with pytest.raises(UsageError) as error_info:
        read_contents(folder.path)
    assert error_info.value.reason is Reason.MALFORMED
    return str(error_info.value)


@pytest.mark.parametrize(
    ("malformed_line", "expected_text"),
    [
        (b'{"schema_version": 1, "case": "a', "not JSON"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"[" * 100_000, "not JSON"),
        (b'{"schema_version": NaN}', "NaN is not a number of JSON"),
        (b'{"schema_version": 2}', "expected schema_version 1, found 2"),
        (b'{"level": "info", "msg": "from another program"}', "expected schema_version 1, found None"),
        (b"null", "expected schema_version 1"),
    ],
    ids=["half", "binary", "deep", "nan", "version", "foreign", "null"],
)
def test_malformed_record_is_refused_with_its_line(
    run_folder: RunFolder, malformed_line: bytes, expected_text: str
) -> None:
    with run_folder.records.open("ab") as file:
        file.write(malformed_line + b"\n")
    message = read_and_get_error(run_folder)
    assert message.startswith(f"{run_folder.records}:4: ")
    assert expected_text in message


@pytest.mark.parametrize("number_json", ['"much"', "1e999", "true", "null"])
def test_invalid_number_is_refused(run_folder: RunFolder, number_json: str) -> None:
    first_line = run_folder.records.read_text().splitlines()[0]
    invalid_line = first_line.replace('"numbers": {}', f'"numbers": {{"rate_us": {number_json}}}')
    run_folder.records.write_text(invalid_line + "\n")
    assert "numbers.rate_us" in read_and_get_error(run_folder)


@pytest.mark.parametrize(
    ("file_attribute", "file_text", "expected_text"),
    [
        ("run", "{", "not JSON"),
        ("run", '{"schema_version": 7}', "expected schema_version 1, found 7"),
        ("run", "[]", "expected schema_version 1"),
        ("facts", '{"schema_version": 9}', "expected schema_version 1, found 9"),
        ("facts", "", "not JSON"),
        ("facts", '{"schema_version": 1}', "facts.json.machine: the field is missing"),
    ],
)
def test_damaged_file_of_a_run_is_named(
    run_folder: RunFolder, file_attribute: str, file_text: str, expected_text: str
) -> None:
    damaged_file: Path = getattr(run_folder, file_attribute)
    damaged_file.write_text(file_text)
    message = read_and_get_error(run_folder)
    assert message.startswith(str(damaged_file))
    assert expected_text in message


def walk_value_paths(data: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a document, but only of the first item of each list."""
    yield path
    children = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, child in children:
        yield from walk_value_paths(child, (*path, key))


def replace_value(data: Json, path: tuple[str | int, ...], value: Json) -> Json:
    """Return a copy of a document in which the value at `path` is replaced."""
    if not path:
        return value
    first_key, remaining_path = path[0], path[1:]
    if isinstance(data, dict):
        return {
            key: replace_value(child, remaining_path, value) if key == first_key else child
            for key, child in data.items()
        }
    assert isinstance(data, list)
    return [
        replace_value(child, remaining_path, value) if index == first_key else child for index, child in enumerate(data)
    ]


@pytest.mark.parametrize("file_name", ["run.json", "facts.json", "plan.json", "records.jsonl"])
def test_odd_value_of_a_field_gives_a_report_or_one_error(tmp_path: Path, file_name: str) -> None:
    facts = make_host_facts(gpu_count=1, nic_count=1)
    # The records are copies of several sizes, which give the report a plot, and one record of each other type.
    records = [record for record in make_host_records(facts) if "16MiB" not in record.case][:8]
    folder = RunFolder(write_run(tmp_path / "run", facts, records))
    file = folder.path / file_name
    if file_name == "plan.json":
        # The report uses the plan only if run.json is missing.
        folder.run.unlink()
        file.write_text('{"profile": "any", "cases": [{"case": "a.py::test_a"}]}')
    lines = file.read_text().splitlines() if file_name == "records.jsonl" else [file.read_text()]
    report_count, refusal_reasons = 0, set()
    for line_index, document in enumerate(map(json.loads, lines)):
        for path in walk_value_paths(document):
            for value in ODD_VALUES:
                lines[line_index] = json.dumps(replace_value(document, path, value))
                file.write_text("\n".join(lines) + "\n")
                try:
                    contents = read_contents(folder.path)
                except UsageError as error:
                    refusal_reasons.add(error.reason)
                else:
                    view = make_view(contents)
                    render_document(contents, view)
                    render_metrics(contents, view)
                    report_count += 1
        lines[line_index] = json.dumps(document)
    assert report_count
    assert refusal_reasons == {Reason.MALFORMED}


def test_text_with_other_line_ends_is_one_record(tmp_path: Path) -> None:
    record = make_record(title="one\u2028two\x85three\x0cfour\ud800", evidence={"said": "a\r\nb"})
    append_record(tmp_path / "records.jsonl", record)
    assert read_records(tmp_path / "records.jsonl") == (record,)


def test_killed_run_has_a_report(run_folder: RunFolder) -> None:
    run_folder.run.unlink()
    run_folder.plan.write_text(
        json.dumps({"profile": "any", "cases": [{"case": f"a.py::test_{number}"} for number in range(5)]})
    )
    with run_folder.records.open("ab") as file:
        file.write(b'{"schema_version": 1, "case": "a.py::te')
    completed = run_gdrkit("report", run_folder.path)
    assert completed.returncode == 0, completed.stderr
    page_html = run_folder.index.read_text()
    assert '<h1><span class="mark bad"></span>The run did not end</h1>' in page_html
    assert "no record of 2 of 5 cases; the first of them is a.py::test_3" in page_html
    assert "the last line of records.jsonl is cut off" in page_html
    # A killed run has no run.json, so the page does not name this file.
    assert "run.json" not in page_html.partition("<footer>")[2]
    assert json.loads(run_folder.report.read_text())["exit_code"] == 1


def test_cost_of_a_long_plan_does_not_grow_with_the_records(run_folder: RunFolder) -> None:
    first_line = run_folder.records.read_text().splitlines()[0]
    case_names = [f"a.py::test_{number:06}" for number in range(100_000)]
    run_folder.run.unlink()
    run_folder.records.write_text(
        "".join(first_line.replace("a.py::test_0", name) + "\n" for name in case_names[-2_000:])
    )

    def measure_cpu_s(planned_cases: list[str]) -> float:
        run_folder.plan.write_text(json.dumps({"profile": "any", "cases": [{"case": name} for name in planned_cases]}))
        start_s = time.process_time()
        read_contents(run_folder.path)
        return time.process_time() - start_s

    cpu_s_without_plan = measure_cpu_s([])
    # A search of all records for each planned case would compare 200 million names, and take more than ten times as
    # long.
    assert measure_cpu_s(case_names) < cpu_s_without_plan * 10


def test_records_alone_have_a_report_in_another_folder(run_folder: RunFolder, tmp_path: Path) -> None:
    completed = run_gdrkit("report", run_folder.records, "--output", tmp_path / "made")
    assert completed.returncode == 0, completed.stderr
    page_html = (tmp_path / "made" / "index.html").read_text()
    assert "Records of 3 cases: 3 passed" in page_html
    assert "This host" not in page_html


def test_records_alone_replace_no_report(run_folder: RunFolder) -> None:
    render(run_folder.path)
    files_before = {file.name: file.read_bytes() for file in run_folder.path.iterdir()}
    completed = run_gdrkit("report", run_folder.records)
    assert (completed.returncode, completed.stdout) == (2, "")
    (line,) = completed.stderr.splitlines()
    assert "--output DIR" in line
    assert {file.name: file.read_bytes() for file in run_folder.path.iterdir()} == files_before


@pytest.mark.parametrize("folder_content", ["no_records", "empty", "no_facts"])
def test_folder_without_a_run_is_wrong_usage(tmp_path: Path, folder_content: str) -> None:
    if folder_content == "empty":
        (tmp_path / "records.jsonl").touch()
    if folder_content == "no_facts":
        RunFolder(tmp_path).write_run(make_run())
    completed = run_gdrkit("report", tmp_path)
    assert completed.returncode == 2
    assert len(completed.stderr.splitlines()) == 1
    assert "Traceback" not in completed.stderr


def test_failed_write_keeps_the_earlier_report(run_folder: RunFolder) -> None:
    render(run_folder.path)
    page_before = run_folder.index.read_bytes()
    run_folder.junit.unlink()
    run_folder.junit.mkdir()
    with pytest.raises(SetupMissing, match=r"write\(path=.*junit.xml.*EISDIR") as error_info:
        render(run_folder.path)
    assert error_info.value.errno == errno.EISDIR
    assert run_folder.index.read_bytes() == page_before
    assert [path.name for path in run_folder.path.iterdir() if path.name.startswith(".")] == []


@needs(host.capability("CAP_SETUID"), host.package_for_all_users)
@pytest.mark.parametrize("command", ["report", "qualify"])
def test_missing_write_permission_has_exit_code_3(command: str) -> None:
    output_option = {"report": [], "qualify": ["--output"]}[command]
    # The case does not use `tmp_path`, because every start of pytest removes the permissions of other users from the
    # folder that contains it.
    with folder_for_all_users() as folder:
        run_folder = RunFolder(write_run(folder / "run", make_facts(), [make_record()]))
        arguments = [sys.executable, "-m", "gdrkit", command, *output_option, str(run_folder.path)]
        completed = subprocess.run(
            [sys.executable, "-c", EXECUTE_UNPRIVILEGED_TEMPLATE.format(UNPRIVILEGED_ID), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert run_folder.records.exists()
    assert completed.returncode == 3, completed.stderr
    assert "EACCES" in completed.stderr.splitlines()[-1]
    assert "--output" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_hostile_host_name_is_text_in_every_document(run_folder: RunFolder) -> None:
    run_folder.write_run(dataclasses.replace(run_folder.read_run(), host=HOSTILE_TEXT))
    documents = render(run_folder.path)
    assert documents.index.read_text().count("<script") == 1  # The script of the page itself.
    assert "<script" not in documents.summary.read_text()
    ET.parse(documents.junit)  # noqa: S314 - our own document.
    for file in (documents.index, documents.summary, documents.metrics, documents.junit):
        document_text = file.read_text()
        assert [character for character in "\x1b\x07\x9b\u202e" if character in document_text] == [], file.name
    # The line end in the host name does not begin a new line of the metrics.
    assert [
        line for line in documents.metrics.read_text().splitlines() if line.startswith("# HELP") and "owned" in line
    ] == []


def test_hostile_folder_name_is_escaped_in_errors(tmp_path: Path) -> None:
    folder = tmp_path / "x\x1b[2J"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    completed = run_gdrkit("report", folder)
    assert completed.returncode == 2
    assert "\x1b" not in completed.stderr + completed.stdout
    assert "\\x1b[2J" in completed.stderr


@pytest.mark.parametrize(
    ("text", "escaped_text"),
    [
        ("node-7", "node-7"),
        ("Zürich, 東京", "Zürich, 東京"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b", "\\x9b"),
        ("\u202eabc", "\\u202eabc"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_control_characters_are_escaped(text: str, escaped_text: str) -> None:
    assert escape_controls(text) == escaped_text


def test_markdown_cell_is_one_line_without_bars_and_tags() -> None:
    assert markdown_cell("a|b\n<b>`c` & GPU 0 <- NIC") == "a\\|b &lt;b>&#96;c&#96; &amp; GPU 0 <- NIC"


def test_file_at_the_path_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupMissing, match=r"mkdir\(.*EEXIST"):
        RunFolder(tmp_path / "file").make_empty()
    assert (tmp_path / "file").stat().st_size == 0
