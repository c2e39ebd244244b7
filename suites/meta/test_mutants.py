"""The mutation runner: its sample, its patches, and the failures of cases that kill a mutant."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from meta.mutants.modules import CASES_BY_FILE, FILES_BY_MODULE
from meta.mutants.mutant import (
    Mutant,
    MutantOutcome,
    MutantResult,
    PatchMismatch,
    find_changed_lines,
    read_equivalent_reasons,
)
from meta.mutants.patches import PATCHES, Patch, make_mutant
from meta.mutants.run import compute_score, draw_mutants, read_recorded_kills, try_all_mutants, write_records
from meta.mutants.worker import BaselineFailed, Worker
from support.json_schema import NEEDS_JSONSCHEMA, find_violations

from gdrkit.report import Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterator

TREE = Path(__file__).resolve().parents[2]
MUTMUT_PYTHON = TREE / ".nox" / "mutants" / "bin" / "python"
# The file of gdrkit that these cases mutate.
MUTATED_FILE = "gdrkit/qualify/outcome.py"
# A docstring of that file. No case can depend on it.
MUTATED_DOCSTRING = '"""Return a failed outcome if cases that the profile requires did not run, else None."""'
# Arguments of pytest that choose one case about that file.
CASE_ARGUMENTS = ("suites/qualify/test_outcome.py", "-k", "test_exit_code_follows_from_the_records")


def make_mutant_with(
    before: str, after: str, *, file: str = MUTATED_FILE, cases: tuple[str, ...] = CASE_ARGUMENTS
) -> Mutant:
    """Return the mutant in which `after` replaces the text `before` of the file."""
    return dataclasses.replace(make_mutant(Patch("by-hand", file, before, after), TREE), cases=cases)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that has a copy of this tree."""
    # The copy is in the file system of the environment, so that its files can be linked.
    folder = TREE / "build" / "mutants" / f"meta-{tmp_path_factory.getbasetemp().name}"
    new_worker = Worker(folder, source_tree=TREE, environment_folder=Path(sys.prefix))
    yield new_worker
    new_worker.remove()


def test_known_mutant_is_killed_by_a_named_case(worker: Worker) -> None:
    mutant = make_mutant_with("    if failed_outcome is not None:\n        return failed_outcome\n", "")
    (result,) = try_all_mutants([mutant], [worker], {})
    assert result.outcome is MutantOutcome.KILLED
    assert "test_outcome.py::test_exit_code_follows_from_the_records" in result.killed_by
    assert (worker.tree / MUTATED_FILE).read_text() == (TREE / MUTATED_FILE).read_text()


def test_mutant_that_no_case_asserts_survives(worker: Worker) -> None:
    mutant = make_mutant_with(MUTATED_DOCSTRING, '"""."""')
    (result,) = try_all_mutants([mutant], [worker], {})
    assert (result.outcome, result.killed_by) == (MutantOutcome.SURVIVED, "")


def test_tree_in_use_is_not_changed(worker: Worker) -> None:
    contents_and_mtime_before = (TREE / MUTATED_FILE).read_bytes(), (TREE / MUTATED_FILE).stat().st_mtime_ns
    try_all_mutants([make_mutant_with(MUTATED_DOCSTRING, '"""."""')], [worker], {})
    assert contents_and_mtime_before == ((TREE / MUTATED_FILE).read_bytes(), (TREE / MUTATED_FILE).stat().st_mtime_ns)


def test_baseline_that_fails_is_refused(worker: Worker) -> None:
    broken_file = worker.tree / "suites" / "qualify" / "test_broken.py"
    broken_file.write_text("def test_that_fails() -> None:\n    assert False\n")
    mutant = make_mutant_with(
        "    if failed_outcome is not None:\n        return failed_outcome\n",
        "",
        cases=("suites/qualify/test_broken.py",),
    )
    try:
        with pytest.raises(BaselineFailed, match="test_that_fails"):
            try_all_mutants([mutant], [worker], {})
    finally:
        broken_file.unlink()


def test_baseline_without_cases_is_refused(worker: Worker) -> None:
    mutant = make_mutant_with(MUTATED_DOCSTRING, '"""."""', cases=(*CASE_ARGUMENTS[:2], "no_such_case"))
    with pytest.raises(BaselineFailed):
        try_all_mutants([mutant], [worker], {})


def test_case_that_fails_once_does_not_kill(worker: Worker) -> None:
    flaky_file = worker.tree / "suites" / "qualify" / "test_flaky.py"
    count_file = worker.tree / "count"
    # The case passes as the baseline, fails in the first run with the mutant, and passes from then on.
    flaky_file.write_text(
        "from pathlib import Path\n\n"
        "def test_flaky() -> None:\n"
        f"    count_file = Path({str(count_file)!r})\n"
        "    run_count = int(count_file.read_text()) + 1 if count_file.exists() else 1\n"
        "    count_file.write_text(str(run_count))\n"
        "    assert run_count != 2\n"
    )
    mutant = make_mutant_with(MUTATED_DOCSTRING, '"""."""', cases=("suites/qualify/test_flaky.py",))
    try:
        (result,) = try_all_mutants([mutant], [worker], {})
    finally:
        flaky_file.unlink()
        count_file.unlink()
    assert result.outcome is MutantOutcome.SURVIVED
    assert "test_flaky failed once" in result.note


def test_equivalent_mutant_is_not_run() -> None:
    mutant = make_mutant_with(MUTATED_DOCSTRING, '"""."""')
    (result,) = try_all_mutants([mutant], [], {mutant.identity_key: "a docstring"})
    assert (result.outcome, result.note) == (MutantOutcome.EQUIVALENT, "a docstring")


def test_seed_gives_the_same_sample_twice() -> None:
    modules = {"outcome": FILES_BY_MODULE["outcome"], "requests": FILES_BY_MODULE["requests"]}
    first_sample, second_sample, sample_of_another_seed = (
        draw_mutants(MUTMUT_PYTHON, TREE, modules, seed=seed, count=10) for seed in ("1", "1", "2")
    )
    assert first_sample == second_sample
    assert len(first_sample) == 10
    assert {mutant.name for mutant in first_sample} != {mutant.name for mutant in sample_of_another_seed}
    for mutant in first_sample:
        assert (TREE / mutant.file).read_text() != mutant.source
        assert mutant.before != mutant.after


def test_every_module_of_the_table_exists() -> None:
    assert all(FILES_BY_MODULE.values())
    assert not [file for file in CASES_BY_FILE if not (TREE / file).is_file()]
    paths = {word for cases in CASES_BY_FILE.values() for word in cases if word.startswith("suites/")}
    assert not [path for path in paths if not (TREE / path).exists()]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_committed_patch_fits_the_code(patch: Patch) -> None:
    mutant = make_mutant(patch, TREE)
    assert mutant.before != mutant.after


def test_patch_that_no_longer_fits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\none\n")
    # The file does not have the first text, and has the second text twice.
    for text_to_replace in ("two", "one"):
        with pytest.raises(PatchMismatch, match="adapt the patch"):
            make_mutant(Patch("lost", "a.py", text_to_replace, "three", cases=("x",)), tmp_path)


def test_names_of_patches_are_unique() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


def test_every_equivalent_mutant_fits_the_code() -> None:
    for (file, _, before, _), reason in read_equivalent_reasons().items():
        assert len(reason) > 20
        lines = [line.strip() for line in (TREE / file).read_text().splitlines()]
        assert all(line.strip() in lines for line in before.splitlines()), f"{file} has no such line: {before}"


def test_changed_lines_are_those_that_differ() -> None:
    assert find_changed_lines("a\n  b\nc\n", "a\n  x\n  y\nc\n") == (2, "b", "x\n  y")


def test_equivalent_mutants_do_not_count() -> None:
    mutant = make_mutant(PATCHES[0], TREE)
    outcomes = [MutantOutcome.KILLED] * 8 + [MutantOutcome.TIMEOUT, MutantOutcome.SURVIVED, MutantOutcome.EQUIVALENT]
    assert compute_score([MutantResult(mutant, outcome) for outcome in outcomes]) == 0.9


@NEEDS_JSONSCHEMA
def test_retry_runs_only_mutants_that_were_not_killed(tmp_path: Path) -> None:
    killed_mutant, survivor, records_path = (
        make_mutant(PATCHES[0], TREE),
        make_mutant(PATCHES[1], TREE),
        tmp_path / "mutants.jsonl",
    )
    earlier_results = [
        MutantResult(
            killed_mutant, MutantOutcome.KILLED, "suites/a.py::test_b", duration_s=1.0, baseline_s=2.0, limit_s=90.0
        ),
        MutantResult(survivor, MutantOutcome.SURVIVED),
    ]
    write_records(records_path, earlier_results, seed="1", command="x", duration_s=9.0)
    recorded_kills = read_recorded_kills(records_path, [killed_mutant, survivor])
    # Without a worker, no case can run.
    (retried_result,) = try_all_mutants([killed_mutant], [], {}, recorded_kills)
    assert dataclasses.replace(retried_result, note="") == earlier_results[0]
    assert recorded_kills.keys() == {killed_mutant.identity_key}
    changed_mutant = dataclasses.replace(killed_mutant, after="other lines")
    assert not read_recorded_kills(records_path, [changed_mutant])


def test_record_has_a_row_for_each_mutant_and_a_summary(tmp_path: Path) -> None:
    mutant, records_path = make_mutant(PATCHES[0], TREE), tmp_path / "mutants.jsonl"
    killed_result = MutantResult(mutant, MutantOutcome.KILLED, "suites/a.py::test_b", duration_s=1.0)
    write_records(
        records_path,
        [killed_result] * 8 + [MutantResult(mutant, MutantOutcome.SURVIVED)],
        seed="1",
        command="x",
        duration_s=9.0,
    )
    record_objects = [json.loads(line) for line in records_path.read_text().splitlines()]
    assert not [
        problem for record_object in record_objects for problem in find_violations("record-1.json", record_object)
    ]
    *mutant_records, summary_record = read_records(records_path)
    assert [record.verdict for record in mutant_records] == [Verdict.PASS] * 8 + [Verdict.FAIL]
    first_evidence = mutant_records[0].evidence
    assert {"module", "line", "operator", "before", "after", "outcome", "killing_test"} <= first_evidence.keys()
    assert (summary_record.case, summary_record.verdict) == ("meta/mutants::summary", Verdict.FAIL)
    assert '"score_share": 0.8889' in records_path.read_text().splitlines()[-1]
