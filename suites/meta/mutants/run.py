"""Mutation testing of gdrkit: ``python -m meta.mutants.run``, with suites/ on PYTHONPATH (`nox -s mutants`).

The mutants are a random sample by the operators of mutmut, and the patches of patches.py. The program puts each mutant
into a copy of the tree, and runs the cases that modules.py lists for the changed file. A mutant is killed if a case
fails twice with it, or if the cases exceed their time limit. If the cases fail without any mutant, the program reports
this failure and ends. The mutants in equivalent.toml do not count, because no case can detect them. The exit code is 0
if at least 90 % of the other mutants are killed, every patch compiles, and at most one mutant in twenty is listed as
equivalent. Otherwise it is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from meta.mutants.modules import CASES_BY_FILE, FILES_BY_MODULE
from meta.mutants.mutant import (
    EQUIVALENT_FILE,
    Mutant,
    MutantOutcome,
    MutantResult,
    PatchMismatch,
    find_changed_lines,
    read_equivalent_reasons,
)
from meta.mutants.patches import PATCHES, make_mutant
from meta.mutants.worker import BaselineFailed, Worker

import gdrkit
from gdrkit.install_paths import install_paths
from gdrkit.inventory import probe
from gdrkit.report.record import SCHEMA_VERSION, CaseReason, Record, Verdict, append_record, read_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["compute_score", "draw_mutants", "main", "read_recorded_kills", "try_all_mutants", "write_records"]

# Mutant.identity_key: file, operator, and the changed lines before and after the mutation.
_IdentityKey = tuple[str, str, str, str]
# Default number of mutants in the random sample.
SAMPLE_COUNT = 150
# Smallest share of killed mutants with which the session passes.
SCORE_MIN = 0.9
# Largest share of the mutants (sample and patches) that may be in equivalent.toml.
EQUIVALENT_SHARE_MAX = 0.05
_KILLED_OUTCOMES = frozenset({MutantOutcome.KILLED, MutantOutcome.TIMEOUT})
_GENERATE_TIMEOUT_S = 600
_TREE = Path(__file__).resolve().parents[3]


def draw_mutants(
    mutmut_python: Path, tree: Path, modules: Mapping[str, Sequence[str]], *, seed: str, count: int
) -> list[Mutant]:
    """Return a random sample of mutants. `mutmut_python` is the interpreter of the environment that has mutmut."""
    request = {"root": str(tree), "seed": seed, "count": count, "modules": dict(modules)}
    completed = subprocess.run(
        [str(mutmut_python), str(Path(__file__).with_name("generate.py"))],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_GENERATE_TIMEOUT_S,
    )
    mutants = []
    for mutation in json.loads(completed.stdout):
        file, mutated_source = mutation["file"], mutation["source"]
        line_number, before, after = find_changed_lines((tree / file).read_text(), mutated_source)
        module, operator = mutation["module"], mutation["operator"]
        mutants.append(Mutant(module, file, line_number, operator, before, after, mutated_source, CASES_BY_FILE[file]))
    return mutants


def compute_score(results: Sequence[MutantResult]) -> float:
    """Return the share of killed mutants among all that compile and are not equivalent; 1 without such mutants."""
    excluded_outcomes = {MutantOutcome.EQUIVALENT, MutantOutcome.NOT_COMPILED}
    outcomes = [result.outcome for result in results if result.outcome not in excluded_outcomes]
    return sum(outcome in _KILLED_OUTCOMES for outcome in outcomes) / len(outcomes) if outcomes else 1.0


class _Campaign:
    """A run of all mutants. It distributes them among workers, each in its own thread, and collects the results."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        equivalent_reasons: Mapping[_IdentityKey, str],
        recorded_kills: Mapping[_IdentityKey, MutantResult],
    ) -> None:
        self.results: dict[int, MutantResult] = {}
        # True after a worker has failed, so that the other workers stop after their current mutants.
        self.is_stopping = False
        self._native_queue: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
        self._python_queue: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
        self._baseline_s_by_cases: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        # Each set of cases has its own lock, so that workers can measure different sets at the same time.
        self._baseline_locks = {mutant.cases: threading.Lock() for mutant in mutants}
        self._mutant_count = len(mutants)
        for index, mutant in enumerate(mutants):
            reason = equivalent_reasons.get(mutant.identity_key)
            if reason is not None:
                self._add_result(index, MutantResult(mutant, MutantOutcome.EQUIVALENT, note=reason))
            elif mutant.identity_key in recorded_kills:
                self._add_result(index, dataclasses.replace(recorded_kills[mutant.identity_key], mutant=mutant))
            else:
                (self._native_queue if mutant.is_native else self._python_queue).put((index, mutant))

    def run_worker(self, worker: Worker, *, may_compile: bool) -> None:
        """Try mutants until the queues are empty. Only the worker with `may_compile` takes native mutants."""
        is_done = False
        try:
            if may_compile and not self._native_queue.empty():
                worker.build_baseline()
                self._try_mutants(worker, self._native_queue)
            self._try_mutants(worker, self._python_queue)
            is_done = True
        finally:
            self.is_stopping |= not is_done

    def _try_mutants(self, worker: Worker, mutant_queue: queue.SimpleQueue[tuple[int, Mutant]]) -> None:
        while not self.is_stopping:
            try:
                index, mutant = mutant_queue.get_nowait()
            except queue.Empty:
                return
            with self._baseline_locks[mutant.cases]:
                if mutant.cases not in self._baseline_s_by_cases:
                    self._baseline_s_by_cases[mutant.cases] = worker.run_baseline(mutant.cases)
            self._add_result(index, worker.try_mutant(mutant, baseline_s=self._baseline_s_by_cases[mutant.cases]))

    def _add_result(self, index: int, result: MutantResult) -> None:
        mutant = result.mutant
        with self._lock:
            self.results[index] = result
            progress = f"{len(self.results)}/{self._mutant_count}"
        print(  # noqa: T201
            f"{progress} {result.outcome.value:10} {mutant.file}:{mutant.line_number} {mutant.operator} "
            f"{result.duration_s:.0f} s {result.killed_by or result.note}",
            flush=True,
        )
        if result.outcome is MutantOutcome.SURVIVED:
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)  # noqa: T201


def try_all_mutants(
    mutants: Sequence[Mutant],
    workers: Sequence[Worker],
    equivalent_reasons: Mapping[_IdentityKey, str],
    recorded_kills: Mapping[_IdentityKey, MutantResult] | None = None,
) -> list[MutantResult]:
    """Return the result of every mutant, in the order of the mutants.

    A mutant whose identity key is in `equivalent_reasons` is equivalent. A mutant whose identity key is in
    `recorded_kills` was killed in an earlier run. The cases run against all other mutants.

    Raises
    ------
    BaselineFailed
        Cases fail without any mutant.
    """
    campaign = _Campaign(mutants, equivalent_reasons, recorded_kills or {})
    with ThreadPoolExecutor(max_workers=max(len(workers), 1)) as pool:
        futures = [
            pool.submit(campaign.run_worker, worker, may_compile=index == 0) for index, worker in enumerate(workers)
        ]
        try:
            for future in futures:
                future.result()
        finally:
            campaign.is_stopping = True
    return [campaign.results[index] for index in range(len(mutants))]


def read_recorded_kills(records_path: Path, mutants: Sequence[Mutant]) -> dict[_IdentityKey, MutantResult]:
    """Return the results of the mutants that an earlier run killed, by the identity key of the mutant."""
    mutants_by_key = {mutant.identity_key: mutant for mutant in mutants}
    results_by_key: dict[_IdentityKey, MutantResult] = {}
    for record in read_records(records_path):
        evidence = record.evidence
        file, operator, before, after = (str(evidence.get(name)) for name in ("file", "operator", "before", "after"))
        mutant = mutants_by_key.get((file, operator, before, after))
        if mutant is None or evidence.get("outcome") not in {outcome.value for outcome in _KILLED_OUTCOMES}:
            continue
        results_by_key[mutant.identity_key] = MutantResult(
            mutant,
            MutantOutcome(evidence["outcome"]),
            killed_by=str(evidence["killing_test"]),
            note=str(evidence["note"]) or f"killed in the run of commit {record.commit}",
            duration_s=record.duration_ms / 1000,
            baseline_s=record.numbers["baseline_s"],
            limit_s=record.numbers["limit_s"],
        )
    return results_by_key


def _make_mutant_record(result: MutantResult, seed: str, command: str) -> Record:
    mutant = result.mutant
    has_survived = result.outcome is MutantOutcome.SURVIVED
    verdict = Verdict.PASS if result.outcome in _KILLED_OUTCOMES else Verdict.FAIL if has_survived else Verdict.NOT_RUN
    reason_text = result.note or ("no case failed" if has_survived else result.outcome.value)
    reasons = (
        () if verdict is Verdict.PASS else (CaseReason(text=reason_text, foreseen=None if has_survived else True),)
    )
    evidence: dict[str, object] = {
        "module": mutant.module,
        "file": mutant.file,
        "line": mutant.line_number,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "outcome": result.outcome.value,
        "killing_test": result.killed_by,
        "note": result.note,
        "cases": list(mutant.cases),
        "seed": seed,
    }
    numbers = {"baseline_s": result.baseline_s, "limit_s": result.limit_s}
    if verdict is not Verdict.PASS:
        numbers = {}
    return _make_record(f"meta/mutants::{mutant.name}", verdict, reasons, evidence, numbers, result.duration_s, command)


@functools.cache
def _compute_facts_digest() -> str:
    return probe(query_apis=False).digest


def _make_record(
    case: str,
    verdict: Verdict,
    reasons: tuple[CaseReason, ...],
    evidence: dict[str, object],
    numbers: dict[str, float],
    duration_s: float,
    command: str,
) -> Record:
    if verdict is not Verdict.PASS:
        # The format of records allows numbers only in a case that passed.
        evidence, numbers = {**evidence, "numbers": numbers}, {}
    return Record(
        schema_version=SCHEMA_VERSION,
        case=case,
        title="a mutant of gdrkit, and the cases that detect it",
        verdict=verdict,
        reasons=reasons,
        profile="bare",
        facts_digest=_compute_facts_digest(),
        substrate={},
        libraries=(),
        seed=1,
        evidence=evidence,
        numbers=numbers,
        routes=(),
        duration_ms=round(duration_s * 1000, 3),
        started=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=install_paths().commit(),
        version=gdrkit.__version__,
        command=command,
    )


def write_records(
    records_path: Path, results: Sequence[MutantResult], *, seed: str, command: str, duration_s: float
) -> None:
    """Write a record for each result, and a summary record, to a new file."""
    records_path.unlink(missing_ok=True)
    for result in results:
        append_record(records_path, _make_mutant_record(result, seed, command))
    count_by_outcome = Counter(result.outcome.value for result in results)
    score_share = compute_score(results)
    reaches_minimum = score_share >= SCORE_MIN
    evidence: dict[str, object] = {
        "seed": seed,
        "survivors": [result.mutant.name for result in results if result.outcome is MutantOutcome.SURVIVED],
    }
    numbers = {f"{outcome.value}_count": float(count_by_outcome[outcome.value]) for outcome in MutantOutcome}
    reasons = (
        ()
        if reaches_minimum
        else (CaseReason(text=f"the score is {score_share:.3f}, but must be at least {SCORE_MIN}"),)
    )
    numbers |= {"mutants_count": float(len(results)), "score_share": round(score_share, 4)}
    verdict = Verdict.PASS if reaches_minimum else Verdict.FAIL
    append_record(
        records_path, _make_record("meta/mutants::summary", verdict, reasons, evidence, numbers, duration_s, command)
    )


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nox -s mutants --",
        description="Change gdrkit in many ways, one at a time, and count the changes that the cases detect.",
    )
    parser.add_argument(
        "--operators", type=Path, required=True, help="Python interpreter of the environment that has mutmut"
    )
    parser.add_argument("--tools", type=Path, required=True, help="folder of cmake and ninja")
    parser.add_argument(
        "--module", action="append", choices=sorted(FILES_BY_MODULE), help="mutate only this module; repeatable"
    )
    parser.add_argument("--count", type=int, default=SAMPLE_COUNT, help="size of the sample (default: %(default)s)")
    parser.add_argument("--seed", help="seed of the sample (default: hash of the last commit of gdrkit/ or native/)")
    parser.add_argument(
        "--patch", action="append", choices=[patch.name for patch in PATCHES], help="try only this patch; repeatable"
    )
    parser.add_argument("--no-patches", action="store_true", help="try only the random sample")
    parser.add_argument(
        "--jobs", type=int, default=2, help="number of workers, each with a copy of the tree (default: %(default)s)"
    )
    parser.add_argument("--retry", type=Path, help="records of an earlier run; skip the mutants that were killed in it")
    parser.add_argument("--records", type=Path, help="write one record for each mutant and a summary to this file")
    return parser.parse_args(arguments)


def _query_last_commit() -> str:
    """Return the hash of the last commit that changed gdrkit/ or native/."""
    command = ["git", "-C", str(_TREE), "log", "-1", "--format=%H", "--", "gdrkit", "native"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _choose_mutants(options: argparse.Namespace, seed: str) -> list[Mutant]:
    """Return the mutants of this run: patches, and a random sample, as the options select them."""
    # Drawing the sample is slow. The patches come first, so that a patch that does not fit is reported at once.
    patch_mutants = [] if options.no_patches else [make_mutant(patch, _TREE) for patch in PATCHES]
    if options.patch:
        return [mutant for mutant in patch_mutants if mutant.name in options.patch]
    modules = {name: files for name, files in FILES_BY_MODULE.items() if not options.module or name in options.module}
    if options.module:
        patch_mutants = [
            mutant for mutant in patch_mutants if mutant.file in {file for files in modules.values() for file in files}
        ]
    sampled_mutants = (
        draw_mutants(options.operators, _TREE, modules, seed=seed, count=options.count) if options.count else []
    )
    return [*patch_mutants, *sampled_mutants]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse_arguments(arguments)
    seed = options.seed or _query_last_commit()
    start_s = time.monotonic()
    try:
        mutants = _choose_mutants(options, seed)
    except PatchMismatch as error:
        print(error)  # noqa: T201
        return 1
    print(f"{len(mutants)} mutants, seed {seed}", flush=True)  # noqa: T201
    # The folder is in the file system of the tree, because a worker copies the environment by hard links.
    workers_folder = _TREE / "build" / "mutants" / str(os.getpid())
    try:
        workers = [
            Worker(
                workers_folder / str(index),
                source_tree=_TREE,
                environment_folder=Path(sys.prefix),
                tools_folder=options.tools,
            )
            for index in range(options.jobs)
        ]
        recorded_kills = {} if options.retry is None else read_recorded_kills(options.retry, mutants)
        results = try_all_mutants(mutants, workers, read_equivalent_reasons(), recorded_kills)
    except BaselineFailed as error:
        print(error)  # noqa: T201
        return 1
    finally:
        shutil.rmtree(workers_folder, ignore_errors=True)
    duration_s = time.monotonic() - start_s
    if options.records is not None:
        all_arguments = sys.argv[1:] if arguments is None else list(arguments)
        command = " ".join(["nox", "-s", "mutants", "--", *_get_user_arguments(all_arguments)])
        write_records(options.records, results, seed=seed, command=command, duration_s=duration_s)
    return _report(results, duration_s)


def _get_user_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the user, without the options and values that the noxfile adds."""
    return [
        argument
        for index, argument in enumerate(arguments)
        if not {argument, *arguments[max(index - 1, 0) : index]} & {"--operators", "--tools"}
    ]


def _report(results: Sequence[MutantResult], duration_s: float) -> int:
    """Print the survivors and the score, and return the exit code."""
    count_by_outcome = Counter(result.outcome for result in results)
    survivors = [result.mutant for result in results if result.outcome is MutantOutcome.SURVIVED]
    for mutant in survivors:
        print(f"survived: {mutant.name} {mutant.file}:{mutant.line_number} {mutant.operator}")  # noqa: T201
    score_share = compute_score(results)
    outcome_counts_text = ", ".join(f"{count} {outcome.value}" for outcome, count in count_by_outcome.items())
    print(f"{len(results)} mutants in {duration_s / 60:.0f} min: {outcome_counts_text}; score {score_share:.3f}")  # noqa: T201
    if count_by_outcome[MutantOutcome.EQUIVALENT] > EQUIVALENT_SHARE_MAX * len(results):
        print(  # noqa: T201
            f"more than {EQUIVALENT_SHARE_MAX:.0%} of the mutants are in {EQUIVALENT_FILE.name}; "
            "remove entries, and add cases that detect the mutants"
        )
        return 1
    if count_by_outcome[MutantOutcome.NOT_COMPILED]:
        print("a patch does not compile, so it proves nothing; adapt it in suites/meta/mutants/patches.py")  # noqa: T201
        return 1
    return 0 if score_share >= SCORE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
