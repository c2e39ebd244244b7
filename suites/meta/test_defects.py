"""The review is complete, its document is current, and its judge accepts only real catches."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from meta.defects.document import DOCUMENT, render
from meta.defects.run import judge
from meta.defects.table import DEFECTS, FINDINGS

from gdrkit.report import CaseReason, Verdict

if TYPE_CHECKING:
    from gdrkit.report import Record

REVIEW = Path(__file__).resolve().parents[1] / "review"
LEAST_ROWS = 31
DEFECT = next(iter(DEFECTS.values()))


def record(verdict: Verdict, *texts: str) -> Record:
    reasons = tuple(CaseReason(text=text) for text in texts)
    return cast("Record", SimpleNamespace(verdict=verdict, reasons=reasons))


def test_every_finding_has_a_case() -> None:
    assert {finding.number for finding in FINDINGS} == {*"123456", *"abcdefghijklmno"}
    assert {defect.finding for defect in DEFECTS.values()} == {finding.number for finding in FINDINGS}
    assert len(DEFECTS) >= LEAST_ROWS


def test_every_case_of_the_review_has_a_defect() -> None:
    found = {
        f"{path.name}::{node.name}"
        for path in REVIEW.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert found == {defect.case for defect in DEFECTS.values()}


def test_the_document_is_current() -> None:
    assert DOCUMENT.read_text() == render(), "nox -s review writes docs/findings.md"


def test_the_expected_symptom_is_a_catch() -> None:
    assert judge(DEFECT, {DEFECT.case: record(Verdict.FAIL, f"so: {DEFECT.symptom}")}).is_caught


NO_CATCHES = [
    pytest.param({}, id="no record"),
    pytest.param({DEFECT.case: record(Verdict.PASS)}, id="passed"),
    pytest.param({DEFECT.case: record(Verdict.NOT_RUN, "no GPU")}, id="did not run"),
    pytest.param({DEFECT.case: record(Verdict.FAIL, "ImportError: no module named x")}, id="another failure"),
    pytest.param({DEFECT.case: record(Verdict.FAIL, f"setup: {DEFECT.symptom}")}, id="in the set-up"),
    pytest.param({DEFECT.case: record(Verdict.FAIL, f"teardown: {DEFECT.symptom}")}, id="in the tear-down"),
    pytest.param(
        {DEFECT.case: record(Verdict.FAIL, DEFECT.symptom), "a::b": record(Verdict.FAIL, DEFECT.symptom)},
        id="another case too",
    ),
]


@pytest.mark.parametrize("records", NO_CATCHES)
def test_what_is_no_catch_is_not_taken_for_one(records: dict[str, Record]) -> None:
    assert not judge(DEFECT, records).is_caught
