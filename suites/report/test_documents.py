"""gdrkit renders the page, the summary and the JUnit XML of a run. They stay well-formed for any text in its files."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.records import TWIN_LIBRARY, make_facts, make_record, make_route_facts, make_run

from gdrkit.errors import Reason, UsageError
from gdrkit.install_paths import install_paths
from gdrkit.report import (
    CaseReason,
    ClaimedRoute,
    Run,
    RunFolder,
    SeenLibrary,
    Verdict,
    append_record,
    parse_records,
    read_records,
)
from gdrkit.report.junit import render_junit
from gdrkit.report.render import render, render_html, render_markdown

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.report import Record

# HTML elements without an end tag.
VOID_ELEMENTS = {"meta", "link", "br", "hr", "img", "input"}
# Elements that could load other files or send data. A script is allowed only if it is SEARCH_SCRIPT.
LOADING_ELEMENTS = {"link", "img", "iframe", "object", "embed", "base", "form"}
HOSTILE_TEXT = "</code><script>alert(1)</script>\"'&<b onload=x>|`\x00\x1b[31m\u202e"
SEARCH_SCRIPT = (install_paths().templates / "search.js").read_text()
TWIN_SUBSTRATE = {"verbs": "twin", "cuda": "twin"}
TWIN_BANNER = "software twins: this proves the code, not this machine"


class PageParser(HTMLParser):
    """Parser that checks the nesting of elements and collects the visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[str] = []
        self.visible_lines: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert tag not in LOADING_ELEMENTS, f"<{tag}>"
        for name, value in attributes:
            assert not name.startswith("on"), f"{name} of <{tag}>"
            assert name not in {"src", "srcset", "style"}, f"{name} of <{tag}>"
            assert tag != "script", "the script of the page has no attributes"
            assert name != "href" or (value or "").startswith("#")
        if tag == "caption":
            assert self.open_tags[-1] == "table"
        if tag not in VOID_ELEMENTS:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open_tags:
            assert data == SEARCH_SCRIPT
        elif "style" not in self.open_tags and "head" not in self.open_tags and data.strip():
            self.visible_lines.append(data.strip())


def parse_page(page_html: str) -> PageParser:
    page = PageParser()
    page.feed(page_html)
    page.close()
    assert page.open_tags == []
    assert page_html.startswith("<!doctype html>")
    return page


def make_hostile_records() -> list[Record]:
    library = SeenLibrary("case", HOSTILE_TEXT, HOSTILE_TEXT, "ab12", TWIN_LIBRARY.notes, HOSTILE_TEXT)
    return [
        make_record(
            case=f"{HOSTILE_TEXT}.py::{HOSTILE_TEXT}",
            title=HOSTILE_TEXT,
            evidence={HOSTILE_TEXT: HOSTILE_TEXT},
            libraries=(library,),
        ),
        make_record(Verdict.FAIL, reasons=(CaseReason(HOSTILE_TEXT),), evidence={"traceback": HOSTILE_TEXT}),
        make_record(Verdict.NOT_RUN, reasons=(CaseReason(HOSTILE_TEXT, need=HOSTILE_TEXT, foreseen=False),)),
        make_record(
            Verdict.UNPROVEN, reasons=(CaseReason(HOSTILE_TEXT),), routes=(ClaimedRoute(0, HOSTILE_TEXT, HOSTILE_TEXT),)
        ),
    ]


def test_hostile_text_stays_text_in_the_page() -> None:
    run = dataclasses.replace(
        make_run(verdict=HOSTILE_TEXT), causes=(HOSTILE_TEXT,), to_do=(HOSTILE_TEXT,), command=HOSTILE_TEXT
    )
    page = parse_page(render_html(run, make_facts(), make_hostile_records()))
    assert sum("alert(1)" in line for line in page.visible_lines) >= 8


def test_hostile_text_stays_text_in_xml() -> None:
    document = render_junit(
        dataclasses.replace(make_run(verdict=HOSTILE_TEXT), command=HOSTILE_TEXT), make_hostile_records()
    )
    root = ET.fromstring(document)  # noqa: S314 - our own document.
    assert root.findall(".//script") == []
    assert "\x00" not in document.decode()


def test_hostile_text_breaks_no_table_in_markdown() -> None:
    summary = render_markdown(make_run(verdict=HOSTILE_TEXT), make_facts(), make_hostile_records())
    assert "<script" not in summary
    rows = [line for line in summary.splitlines() if line.startswith("| ") and "verdict |" not in line]
    # The tables have three or four columns, so a row has four or five bars.
    malformed_rows = [line for line in rows if line.replace("\\|", "").count("|") not in (4, 5)]
    assert malformed_rows == []


def test_hostile_text_begins_no_line_in_markdown() -> None:
    text_of_several_lines = f"{HOSTILE_TEXT}\n\n# owned\n\n- owned\n"
    text_by_field: dict[str, Any] = {
        field.name: text_of_several_lines for field in dataclasses.fields(Run) if field.type in {"str", "str | None"}
    }
    assert {"host", "profile", "started", "commit", "version", "verdict", "command"} <= text_by_field.keys()
    run = dataclasses.replace(
        make_run(substrate={text_of_several_lines: "twin"}),
        **text_by_field,
        causes=(text_of_several_lines,),
        required=(text_of_several_lines,),
    )
    summary = render_markdown(run, make_facts(), [])
    assert "owned" in summary
    assert [line for line in summary.splitlines() if line in {"# owned", "- owned"}] == []
    assert [tag for tag in ("<script", "<b ", "</code") if tag in summary] == []
    # In every line, the backquotes are balanced.
    assert [line for line in summary.splitlines() if line.count("`") % 2] == []


@settings(database=None, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.text(max_size=60))
def test_any_text_is_valid_in_every_field(text: str) -> None:
    record = make_record(Verdict.FAIL, case=text or "x", title=text, reasons=(CaseReason(text),), evidence={"k": text})
    run = make_run(verdict=text)
    parse_page(render_html(run, make_facts(), [record]))
    ET.fromstring(render_junit(run, [record]))  # noqa: S314 - our own document.


@pytest.mark.parametrize(
    ("substrate", "first_line_start"),
    [
        (TWIN_SUBSTRATE, TWIN_BANNER),
        (
            {"verbs": "twin", "cuda": "hardware"},
            "verbs ran on software twins and cuda on the libraries of this machine: this run proves no",
        ),
        ({"verbs": "hardware", "cuda": "hardware"}, "It is done"),
    ],
)
def test_first_line_names_the_apis_on_software(substrate: dict[str, str], first_line_start: str) -> None:
    run = make_run(verdict="It is done", substrate=substrate)
    lines = [
        line
        for line in parse_page(render_html(run, make_facts(), [])).visible_lines
        if line != "Host name not recorded"
    ]
    assert (lines[0], lines[1].startswith(first_line_start)) == ("Skip to the report", True)
    assert render_markdown(run, make_facts(), []).lstrip("# ").startswith(first_line_start)


def test_only_numbers_of_hardware_are_in_the_page() -> None:
    numbers = {"rate_gb_per_s": 387.25}
    for substrate, is_shown in (
        (TWIN_SUBSTRATE, False),
        ({"verbs": "hardware", "cuda": "hardware"}, True),
        ({}, False),
    ):
        record = make_record(numbers=numbers, substrate=substrate)
        assert ("387.25" in render_html(make_run(), make_facts(), [record])) is is_shown


def test_tables_have_captions_and_cases_have_details() -> None:
    library = SeenLibrary.of("case", TWIN_LIBRARY)
    record = make_record(title="A title.", evidence={"moved_bytes": 5}, libraries=(library,), substrate=TWIN_SUBSTRATE)
    facts = make_facts(routes=[make_route_facts("dmabuf"), make_route_facts("peer_memory", is_possible=False)])
    page = parse_page(render_html(make_run(substrate=TWIN_SUBSTRATE), facts, [record]))
    assert page.tags.count("table") == page.tags.count("caption") == 7
    assert page.tags.count("h1") == 1
    for expected_text in (
        "A title.",
        "moved_bytes",
        "not possible",
        "ibv_reg_mr failed: Bad address (EFAULT); load a module",
    ):
        assert any(expected_text in line for line in page.visible_lines), expected_text


def test_page_without_cases_has_a_note() -> None:
    assert "No case ran." in parse_page(render_html(make_run(), make_facts(), [])).visible_lines


def test_junit_counts_are_those_of_the_verdicts() -> None:
    records = [
        make_record(),
        make_record(Verdict.FAIL, reasons=(CaseReason("differs"),), evidence={"traceback": "line 1"}),
        make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=True),)),
        make_record(Verdict.NOT_RUN, reasons=(CaseReason("none", need="cuda.vmm", foreseen=False),)),
        make_record(Verdict.UNPROVEN, reasons=(CaseReason("no counter moved"),)),
    ]
    suite = ET.fromstring(render_junit(make_run(substrate=TWIN_SUBSTRATE), records))[0]  # noqa: S314 - our own document.
    assert {name: suite.get(name) for name in ("tests", "failures", "skipped", "errors")} == {
        "tests": "5",
        "failures": "2",
        "skipped": "1",
        "errors": "0",
    }
    cases = suite.findall("testcase")
    assert [len(case.findall("failure")) for case in cases] == [0, 1, 0, 1, 0]
    assert (cases[1][1].text, cases[0].get("classname"), cases[0].get("name")) == ("line 1", "suite.test_a", "test_a")
    assert [property_element.get("value") for property_element in cases[4].iter("property")] == [
        "unproven",
        "no counter moved",
    ]


def test_records_are_read_back_as_the_same_values(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = make_hostile_records()
    for record in records:
        append_record(path, record)
    assert list(read_records(path)) == records


@pytest.mark.parametrize(
    ("invalid_line", "expected_text"),
    [
        ("{", "not JSON"),
        ("[]", "schema_version"),
        ('{"schema_version": 2}', "schema_version"),
        ('{"schema_version": 1}', "case"),
    ],
)
def test_other_json_is_refused_with_its_line(invalid_line: str, expected_text: str) -> None:
    with pytest.raises(UsageError, match=expected_text) as error_info:
        parse_records(["", invalid_line], name="records.jsonl")
    assert error_info.value.reason is Reason.MALFORMED
    assert "records.jsonl:2" in error_info.value.message


def test_report_is_rendered_again_from_the_files_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UsageError, match=r"it has neither run\.json nor"):
        render(tmp_path)
    folder.write_run(make_run(substrate=TWIN_SUBSTRATE))
    folder.facts.write_text(make_facts().to_json())
    append_record(folder.records, make_record(substrate=TWIN_SUBSTRATE))
    render(tmp_path)
    first_page = folder.index.read_text()
    folder.index.unlink()
    render(tmp_path)
    assert folder.index.read_text() == first_page
    assert folder.summary.read_text().splitlines()[0] == TWIN_BANNER
    assert json.loads(folder.run.read_text())["verdict"] == "The code passed"
