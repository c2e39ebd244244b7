"""Proof that every case of suites/review can fail: ``python -m meta.defects.run``, with suites/ on PYTHONPATH.

The cases run first without a defect, then once for each defect. A defect in Python replaces functions of gdrkit. For a
defect in C++, the process loads a build of the usrbio client library from the folder ``--libraries``.

A defect is caught if its case fails in the body with the expected symptom, and no other case fails except the cases
that the table names for the defect. A failure at import, in set-up or with another message does not count. The exit
code is 0 if every defect is caught, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meta.defects.defect import NativeDefect
from meta.defects.document import DOCUMENT, render
from meta.defects.table import DEFECTS, FINDINGS

from gdrkit.report import Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meta.defects.defect import Defect

    from gdrkit.report import Record

__all__ = ["DefectOutcome", "classify_run", "main"]

SUITES = Path(__file__).resolve().parents[2]
# Time limit of one run of all cases, in seconds.
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class DefectOutcome:
    """Result of a run with a defect: whether the defect is caught, and the text of the observed failure."""

    is_caught: bool
    observed_text: str


def classify_run(defect: Defect, records: Mapping[str, Record]) -> DefectOutcome:
    """Return the outcome of a run with this defect, from the records of its cases."""
    record = records.get(defect.case)
    if record is None:
        return DefectOutcome(is_caught=False, observed_text="the case has no record")
    failed_cases = {case for case, case_record in records.items() if case_record.verdict is Verdict.FAIL}
    expected_cases = {defect.case, *defect.also_fails}
    other_failures = sorted(failed_cases - expected_cases)
    if other_failures:
        return DefectOutcome(is_caught=False, observed_text=f"other cases fail, too: {', '.join(other_failures)}")
    if record.verdict is not Verdict.FAIL:
        return DefectOutcome(is_caught=False, observed_text=f"the verdict of the case is {record.verdict.value}")
    if missing_failures := sorted(expected_cases - failed_cases):
        return DefectOutcome(is_caught=False, observed_text=f"these cases do not fail: {', '.join(missing_failures)}")
    # The text of a failure in set-up or tear-down begins with the phase. Such a failure does not count.
    text = record.reasons[0].text
    if text.startswith(("setup:", "teardown:")):
        return DefectOutcome(is_caught=False, observed_text=text)
    return DefectOutcome(is_caught=defect.symptom in text, observed_text=text)


def _get_library_path(libraries: Path, defect: Defect) -> Path:
    """Return the path of the client library with this defect."""
    return libraries / f"lib{defect.name}.so"


def _run_review(defect: Defect | None, libraries: Path) -> dict[str, Record]:
    """Run the cases of the review, with or without a defect, and return the records by case below suites/review."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        environ = dict(os.environ)
        paths = [str(SUITES / "meta" / "defects" / "site"), str(SUITES), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environ.pop("GDRKIT_DEFECT", None)
        if defect is not None and isinstance(defect.injection, NativeDefect):
            environ["GDRKIT_USRBIO_LIBRARY"] = str(_get_library_path(libraries, defect))
        elif defect is not None:
            environ["GDRKIT_DEFECT"] = defect.name
        command = [sys.executable, "-m", "pytest", "-q", "--seed=1", f"--records={path}", str(SUITES / "review")]
        completed = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, cwd=SUITES.parent
        )
        if not path.exists():
            print(completed.stdout[-4000:] + completed.stderr[-4000:])  # noqa: T201
            return {}
        return {record.case.rpartition("review/")[2]: record for record in read_records(path)}


def _print_rows(rows: Iterable[tuple[str, ...]]) -> None:
    for finding, case, defect, symptom, verdict in rows:
        print(f"{finding:3} {verdict:12} {case}")  # noqa: T201
        print(f"    {defect}\n    -> {symptom}")  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table with the observed symptoms, write docs/findings.md, and return 0 if every defect is caught."""
    parser = argparse.ArgumentParser(prog="meta.defects.run", description=main.__doc__)
    parser.add_argument("--libraries", type=Path, required=True, help="folder of the client libraries with defects")
    libraries = parser.parse_args(arguments).libraries
    native_defects = [defect for defect in DEFECTS.values() if isinstance(defect.injection, NativeDefect)]
    if missing_libraries := [
        _get_library_path(libraries, defect)
        for defect in native_defects
        if not _get_library_path(libraries, defect).exists()
    ]:
        print("these libraries are not built:", *missing_libraries, sep="\n  ")  # noqa: T201
        return 1
    baseline = _run_review(None, libraries)
    failed_cases = sorted(case for case, record in baseline.items() if record.verdict is not Verdict.PASS)
    required_cases = {defect.case for defect in DEFECTS.values()}
    if failed_cases or not required_cases <= baseline.keys():
        missing_cases = sorted(required_cases - baseline.keys())
        print("these cases do not pass without a defect:", *(failed_cases or missing_cases), sep="\n  ")  # noqa: T201
        return 1
    # Four runs at a time use two processors better, because a run mostly waits for its peer processes.
    with ThreadPoolExecutor(max_workers=4) as pool:
        record_sets = pool.map(lambda defect: _run_review(defect, libraries), DEFECTS.values())
        records = dict(zip(DEFECTS, record_sets, strict=True))
    outcomes = {name: classify_run(defect, records[name]) for name, defect in DEFECTS.items()}
    finding_texts = {finding.identifier: finding.text for finding in FINDINGS}
    for identifier in sorted(finding_texts):
        print(f"\n{identifier}: {finding_texts[identifier]}")  # noqa: T201
        _print_rows(
            (
                identifier,
                defect.case,
                defect.text,
                defect.symptom
                if outcomes[name].is_caught
                else f"{defect.symptom!r}, but: {outcomes[name].observed_text}",
                "caught" if outcomes[name].is_caught else "NOT CAUGHT",
            )
            for name, defect in DEFECTS.items()
            if defect.finding == identifier
        )
    caught_count = sum(outcome.is_caught for outcome in outcomes.values())
    print(f"\n{caught_count} of {len(outcomes)} defects caught")  # noqa: T201
    DOCUMENT.write_text(render())
    return 0 if caught_count == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
