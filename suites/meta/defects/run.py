"""Proof that every case of suites/review can fail: ``python -m meta.defects.run``, with suites/ on PYTHONPATH.

First, all cases run without a defect. Then, for each defect, all cases of the files in which a case must fail run. With
``--all-files``, the cases of all files run. A defect in Python replaces functions of gdrkit. For a defect in C++, the
process loads a build of the usrbio client library from the folder ``--libraries``.

A defect is caught if its case fails in the body with the expected symptom, the cases in `Defect.also_fails` fail, too,
and no other case that runs fails. A failure at import, in set-up, in tear-down or with another message does not count.
The exit code is 0 if every defect is caught, and 1 otherwise.
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

__all__ = ["DefectOutcome", "classify_run", "list_failing_files", "main"]

SUITES = Path(__file__).resolve().parents[2]
# Time limit of one run of cases, in seconds.
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class DefectOutcome:
    """Result of a run with a defect: whether the defect is caught, and the failure text or the reason why it is not."""

    is_caught: bool
    observed_text: str


def classify_run(defect: Defect, records: Mapping[str, Record]) -> DefectOutcome:
    """Return the outcome of a run with this defect. The keys of `records` are cases in the form of `Defect.case`."""
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
    failure_text = record.reasons[0].text
    if failure_text.startswith(("setup:", "teardown:")):
        return DefectOutcome(is_caught=False, observed_text=failure_text)
    return DefectOutcome(is_caught=defect.symptom in failure_text, observed_text=failure_text)


def list_failing_files(defect: Defect) -> set[str]:
    """Return the files, below suites/review, of the cases that must fail with this defect."""
    return {case.partition("::")[0] for case in (defect.case, *defect.also_fails)}


def _get_library_path(library_folder: Path, defect: Defect) -> Path:
    """Return the path of the client library with this defect."""
    return library_folder / f"lib{defect.name}.so"


def _run_review(defect: Defect | None, library_folder: Path, *, all_files: bool) -> dict[str, Record]:
    """Run cases of the review, with or without a defect, and return the records by case (see `Defect.case`).

    With a defect and without `all_files`, only the files of the cases that must fail are run.
    """
    # An empty name stands for the whole folder suites/review.
    files = [""] if defect is None or all_files else sorted(list_failing_files(defect))
    with tempfile.TemporaryDirectory() as folder:
        records_path = Path(folder) / "records.jsonl"
        environ = dict(os.environ)
        python_paths = [str(SUITES / "meta" / "defects" / "site"), str(SUITES), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, python_paths))
        environ.pop("GDRKIT_DEFECT", None)
        if defect is not None and isinstance(defect.injection, NativeDefect):
            environ["GDRKIT_USRBIO_LIBRARY"] = str(_get_library_path(library_folder, defect))
        elif defect is not None:
            environ["GDRKIT_DEFECT"] = defect.name
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--seed=1",
            f"--records={records_path}",
            *(str(SUITES / "review" / file) for file in files),
        ]
        completed = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, cwd=SUITES.parent
        )
        if not records_path.exists():
            print(completed.stdout[-4000:] + completed.stderr[-4000:])  # noqa: T201
            return {}
        return {record.case.rpartition("review/")[2]: record for record in read_records(records_path)}


def _print_rows(rows: Iterable[tuple[str, ...]]) -> None:
    """Print three lines for each row: the finding, case, description, symptom and result of a defect."""
    for finding, case, description, symptom, result in rows:
        print(f"{finding:3} {result:12} {case}")  # noqa: T201
        print(f"    {description}\n    -> {symptom}")  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> int:
    """Inject each defect, print the observed symptoms, write docs/findings.md. Return 0 if every defect is caught."""
    parser = argparse.ArgumentParser(prog="meta.defects.run", description=main.__doc__)
    parser.add_argument(
        "--libraries",
        type=Path,
        required=True,
        help="folder with one client library lib<defect>.so for each defect in C++",
    )
    parser.add_argument("--all-files", action="store_true", help="run all cases of the review with each defect")
    options = parser.parse_args(arguments)
    library_folder: Path = options.libraries
    native_defects = [defect for defect in DEFECTS.values() if isinstance(defect.injection, NativeDefect)]
    if missing_libraries := [
        _get_library_path(library_folder, defect)
        for defect in native_defects
        if not _get_library_path(library_folder, defect).exists()
    ]:
        print("build these libraries with nox -s review:", *missing_libraries, sep="\n  ")  # noqa: T201
        return 1
    baseline_records = _run_review(None, library_folder, all_files=True)
    failed_cases = sorted(case for case, record in baseline_records.items() if record.verdict is not Verdict.PASS)
    required_cases = {defect.case for defect in DEFECTS.values()}
    if failed_cases or not required_cases <= baseline_records.keys():
        missing_cases = sorted(required_cases - baseline_records.keys())
        print("these cases do not pass without a defect:", *(failed_cases or missing_cases), sep="\n  ")  # noqa: T201
        return 1
    # A run mostly waits for its peer processes, so four concurrent runs keep two processors busy.
    with ThreadPoolExecutor(max_workers=4) as executor:
        records_of_each_run = executor.map(
            lambda defect: _run_review(defect, library_folder, all_files=options.all_files), DEFECTS.values()
        )
        records_by_defect = dict(zip(DEFECTS, records_of_each_run, strict=True))
    outcomes = {name: classify_run(defect, records_by_defect[name]) for name, defect in DEFECTS.items()}
    description_by_finding = {finding.identifier: finding.description for finding in FINDINGS}
    for identifier in sorted(description_by_finding):
        print(f"\n{identifier}: {description_by_finding[identifier]}")  # noqa: T201
        _print_rows(
            (
                identifier,
                defect.case,
                defect.description,
                defect.symptom
                if outcomes[name].is_caught
                else f"{defect.symptom!r}, but: {outcomes[name].observed_text}",
                "caught" if outcomes[name].is_caught else "NOT CAUGHT",
            )
            for name, defect in DEFECTS.items()
            if defect.finding_identifier == identifier
        )
    caught_count = sum(outcome.is_caught for outcome in outcomes.values())
    print(f"\n{caught_count} of {len(outcomes)} defects caught")  # noqa: T201
    DOCUMENT.write_text(render())
    return 0 if caught_count == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
