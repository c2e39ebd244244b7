"""Malformed folders and records: each causes one clear error, or is harmless text in the report."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
from support.hosts import host_facts, host_records, write_run
from support.records import facts_of, record_of, run_of

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

HOSTILE = '</title><script>alert(1)</script>\x1b[2J\x1b]0;owned\x07\x9b31m\u202e|`"\\\n# HELP'
UNPRIVILEGED = 65534
# Valid JSON values that a program may not expect.
ODD_VALUES: tuple[Json, ...] = (None, True, 0, -1, 10**400, 5e-324, 1.7e308, "", "\ud800", "9" * 5000, [1], {"a": 0})
DROP = "import os, sys; os.setgroups([]); os.setgid({0}); os.setuid({0}); os.execv(sys.executable, sys.argv[1:])"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    records = [record_of(case=f"a.py::test_{number}") for number in range(3)]
    return RunFolder(write_run(tmp_path / "run", facts_of(), records))


def gdrkit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gdrkit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def error_of(folder: RunFolder) -> str:
    """Return the message of the error with which the folder is refused."""
    with pytest.raises(UsageError) as caught:
        read_contents(folder.path)
    assert caught.value.reason is Reason.MALFORMED
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
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
def test_malformed_record_is_refused_with_its_line(run: RunFolder, line: bytes, expected: str) -> None:
    with run.records.open("ab") as file:
        file.write(line + b"\n")
    message = error_of(run)
    assert message.startswith(f"{run.records}:4: ")
    assert expected in message


@pytest.mark.parametrize("value", ['"much"', "1e999", "true", "null"])
def test_invalid_number_is_refused(run: RunFolder, value: str) -> None:
    line = run.records.read_text().splitlines()[0].replace('"numbers": {}', f'"numbers": {{"rate_us": {value}}}')
    run.records.write_text(line + "\n")
    assert "numbers.rate_us" in error_of(run)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("run", "{", "not JSON"),
        ("run", '{"schema_version": 7}', "expected schema_version 1, found 7"),
        ("run", "[]", "expected schema_version 1"),
        ("facts", '{"schema_version": 9}', "expected schema_version 1, found 9"),
        ("facts", "", "not JSON"),
        ("facts", '{"schema_version": 1}', "facts.json.machine: expected a value"),
    ],
)
def test_damaged_file_of_a_run_is_named(run: RunFolder, file: str, text: str, expected: str) -> None:
    damaged: Path = getattr(run, file)
    damaged.write_text(text)
    message = error_of(run)
    assert message.startswith(str(damaged))
    assert expected in message


def value_paths(data: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a document, but only of the first item of each list."""
    yield path
    parts = data.items() if isinstance(data, dict) else enumerate(data[:1]) if isinstance(data, list) else ()
    for key, part in parts:
        yield from value_paths(part, (*path, key))


def with_value(data: Json, path: tuple[str | int, ...], value: Json) -> Json:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(data, dict):
        return {key: with_value(part, rest, value) if key == first else part for key, part in data.items()}
    assert isinstance(data, list)
    return [with_value(part, rest, value) if at == first else part for at, part in enumerate(data)]


@pytest.mark.parametrize("name", ["run.json", "facts.json", "plan.json", "records.jsonl"])
def test_odd_value_of_a_field_gives_a_report_or_one_error(tmp_path: Path, name: str) -> None:
    facts = host_facts(gpus=1, nics=1)
    # The records have a sweep of two sizes, so that there is a plot, and every other type of record once.
    records = [record for record in host_records(facts) if "16MiB" not in record.case][:8]
    folder = RunFolder(write_run(tmp_path / "run", facts, records))
    file = folder.path / name
    if name == "plan.json":
        folder.run.unlink()
        file.write_text('{"profile": "any", "cases": [{"case": "a.py::test_a"}]}')
    lines = file.read_text().splitlines() if name == "records.jsonl" else [file.read_text()]
    reported, refusals = 0, set()
    for number, document in enumerate(map(json.loads, lines)):
        for path in value_paths(document):
            for value in ODD_VALUES:
                lines[number] = json.dumps(with_value(document, path, value))
                file.write_text("\n".join(lines) + "\n")
                try:
                    contents = read_contents(folder.path)
                except UsageError as error:
                    refusals.add(error.reason)
                else:
                    view = make_view(contents)
                    render_document(contents, view)
                    render_metrics(contents, view)
                    reported += 1
        lines[number] = json.dumps(document)
    assert reported
    assert refusals == {Reason.MALFORMED}


def test_text_with_other_line_ends_is_one_record(tmp_path: Path) -> None:
    written = record_of(title="one\u2028two\x85three\x0cfour\ud800", evidence={"said": "a\r\nb"})
    append_record(tmp_path / "records.jsonl", written)
    assert read_records(tmp_path / "records.jsonl") == (written,)


def test_killed_run_has_a_report(run: RunFolder) -> None:
    run.run.unlink()
    run.plan.write_text(json.dumps({"profile": "any", "cases": [{"case": f"a.py::test_{it}"} for it in range(5)]}))
    with run.records.open("ab") as file:
        file.write(b'{"schema_version": 1, "case": "a.py::te')
    ended = gdrkit("report", run.path)
    assert ended.returncode == 0, ended.stderr
    page = run.index.read_text()
    assert '<h1><span class="mark bad"></span>The run did not end</h1>' in page
    assert "2 of 5 cases have no record; the first of them is a.py::test_3" in page
    assert "the last line of records.jsonl is cut off" in page
    # The page does not name files that do not exist.
    assert "run.json" not in page.partition("<footer>")[2]
    assert json.loads(run.report.read_text())["exit_code"] == 1


def test_plan_of_10000_cases_costs_less_than_its_records(run: RunFolder) -> None:
    first = run.records.read_text().splitlines()[0]
    names = [f"a.py::test_{number:05}" for number in range(10_000)]
    run.run.unlink()
    run.records.write_text("".join(first.replace("a.py::test_0", name) + "\n" for name in names))

    def cpu_s(planned: list[str]) -> float:
        run.plan.write_text(json.dumps({"profile": "any", "cases": [{"case": name} for name in planned]}))
        start_s = time.process_time()
        read_contents(run.path)
        return time.process_time() - start_s

    without_plan_s = cpu_s([])
    assert cpu_s(names) < without_plan_s * 1.5


def test_records_alone_have_a_report_in_another_folder(run: RunFolder, tmp_path: Path) -> None:
    ended = gdrkit("report", run.records, "--output", tmp_path / "made")
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "made" / "index.html").read_text()
    assert "Records of 3 cases: 3 passed" in page
    assert "This host" not in page


def test_records_alone_replace_no_report(run: RunFolder) -> None:
    render(run.path)
    before = {file.name: file.read_bytes() for file in run.path.iterdir()}
    ended = gdrkit("report", run.records)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "--output DIR" in line
    assert {file.name: file.read_bytes() for file in run.path.iterdir()} == before


@pytest.mark.parametrize("variant", ["no_records", "empty", "no_facts"])
def test_folder_without_a_run_is_wrong_usage(tmp_path: Path, variant: str) -> None:
    if variant == "empty":
        (tmp_path / "records.jsonl").touch()
    if variant == "no_facts":
        RunFolder(tmp_path).write_run(run_of())
    ended = gdrkit("report", tmp_path)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "Traceback" not in ended.stderr


def test_failed_write_keeps_the_earlier_report(run: RunFolder) -> None:
    render(run.path)
    before = run.index.read_bytes()
    run.junit.unlink()
    run.junit.mkdir()
    with pytest.raises(SetupMissing, match=r"write\(path=.*junit.xml.*EISDIR") as caught:
        render(run.path)
    assert caught.value.errno == 21
    assert run.index.read_bytes() == before
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


@needs(host.capability("CAP_SETUID"))
@pytest.mark.parametrize("command", ["report", "qualify"])
def test_missing_write_permission_has_exit_code_3(run: RunFolder, tmp_path: Path, command: str) -> None:
    for folder in (*reversed(tmp_path.parents[:2]), tmp_path, run.path):
        folder.chmod(0o755)
    option = {"report": [], "qualify": ["--output"]}[command]
    arguments = [sys.executable, "-m", "gdrkit", command, *option, str(run.path)]
    ended = subprocess.run(
        [sys.executable, "-c", DROP.format(UNPRIVILEGED), *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 3, ended.stderr
    assert "EACCES" in ended.stderr.splitlines()[-1]
    assert "--output" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert run.records.exists()


def test_hostile_host_name_is_text_in_every_document(run: RunFolder) -> None:
    run.write_run(dataclasses.replace(run.read_run(), host=HOSTILE))
    documents = render(run.path)
    assert "<script" not in documents.index.read_text()
    assert "<script" not in documents.summary.read_text()
    ET.parse(documents.junit)  # noqa: S314 - our own document.
    for file in (documents.index, documents.summary, documents.metrics, documents.junit):
        text = file.read_text()
        assert [character for character in "\x1b\x07\x9b\u202e" if character in text] == [], file.name
    # The line end in the name begins no line of its own.
    assert [
        line for line in documents.metrics.read_text().splitlines() if line.startswith("# HELP") and "owned" in line
    ] == []


def test_hostile_folder_name_is_escaped_in_errors(tmp_path: Path) -> None:
    folder = tmp_path / "x\x1b[2J"
    folder.mkdir()
    (folder / "run.json").write_text("{")
    ended = gdrkit("report", folder)
    assert ended.returncode == 2
    assert "\x1b" not in ended.stderr + ended.stdout
    assert "\\x1b[2J" in ended.stderr


@pytest.mark.parametrize(
    ("text", "escaped"),
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
def test_control_characters_are_escaped(text: str, escaped: str) -> None:
    assert escape_controls(text) == escaped


def test_markdown_cell_is_one_line_without_bars_and_tags() -> None:
    assert markdown_cell("a|b\n<b>`c` & GPU 0 <- NIC") == "a\\|b &lt;b>&#96;c&#96; &amp; GPU 0 <- NIC"


def test_file_at_the_path_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupMissing, match=r"mkdir\(.*EEXIST"):
        RunFolder(tmp_path / "file").make_empty()
    assert (tmp_path / "file").stat().st_size == 0
