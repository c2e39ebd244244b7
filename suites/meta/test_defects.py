"""Defect injection: its table and its document are complete, and only the expected failure counts as a catch."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from meta.defects.document import DOCUMENT, render
from meta.defects.run import classify_run, list_failing_files
from meta.defects.table import DEFECTS, FINDINGS

from gdrkit.report import CaseReason, Verdict

if TYPE_CHECKING:
    from gdrkit.report import Record

REVIEW_FOLDER = Path(__file__).resolve().parents[1] / "review"
# Fewer defects in the table are an error, so that no defect is lost by mistake.
DEFECTS_MIN = 31
# The cases about classify_run() need one defect, no matter which.
DEFECT = next(iter(DEFECTS.values()))


def make_record(verdict: Verdict, *reason_texts: str) -> Record:
    reasons = tuple(CaseReason(text=text) for text in reason_texts)
    return cast("Record", SimpleNamespace(verdict=verdict, reasons=reasons))


def test_every_finding_has_a_case() -> None:
    assert {finding.identifier for finding in FINDINGS} == {*"123456", *"abcdefghijklmnopqrst"}
    assert {defect.finding_identifier for defect in DEFECTS.values()} == {finding.identifier for finding in FINDINGS}
    assert len(DEFECTS) >= DEFECTS_MIN


def test_every_case_of_the_review_has_a_defect() -> None:
    cases = {
        f"{path.name}::{node.name}"
        for path in REVIEW_FOLDER.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert cases == {defect.case for defect in DEFECTS.values()}


def test_document_is_current() -> None:
    assert DOCUMENT.read_text() == render(), "nox -s review and meta.defects.document write docs/findings.md"


def test_expected_symptom_is_a_catch() -> None:
    assert classify_run(DEFECT, {DEFECT.case: make_record(Verdict.FAIL, f"so: {DEFECT.symptom}")}).is_caught


def test_files_of_all_failing_cases_are_run() -> None:
    defect = replace(DEFECT, case="x.py::a", also_fails=("y.py::b", "x.py::c"))
    assert list_failing_files(defect) == {"x.py", "y.py"}


def test_named_case_must_fail_too() -> None:
    defect = replace(DEFECT, also_fails=("a::b",))
    records = {DEFECT.case: make_record(Verdict.FAIL, DEFECT.symptom), "a::b": make_record(Verdict.FAIL, "x")}
    assert classify_run(defect, records).is_caught
    assert not classify_run(defect, records | {"a::b": make_record(Verdict.PASS)}).is_caught


# The records, by case, of runs after which DEFECT does not count as caught.
RECORDS_WITHOUT_A_CATCH = [
    pytest.param({}, id="no record"),
    pytest.param({DEFECT.case: make_record(Verdict.PASS)}, id="pass"),
    pytest.param({DEFECT.case: make_record(Verdict.NOT_RUN, "no GPU")}, id="not run"),
    pytest.param({DEFECT.case: make_record(Verdict.FAIL, "ImportError: no module named x")}, id="another failure"),
    pytest.param({DEFECT.case: make_record(Verdict.FAIL, f"setup: {DEFECT.symptom}")}, id="failure in setup"),
    pytest.param({DEFECT.case: make_record(Verdict.FAIL, f"teardown: {DEFECT.symptom}")}, id="failure in teardown"),
    pytest.param(
        {DEFECT.case: make_record(Verdict.FAIL, DEFECT.symptom), "a::b": make_record(Verdict.FAIL, DEFECT.symptom)},
        id="another case fails",
    ),
]


@pytest.mark.parametrize("records", RECORDS_WITHOUT_A_CATCH)
def test_other_outcome_is_not_a_catch(records: dict[str, Record]) -> None:
    assert not classify_run(DEFECT, records).is_caught
