"""Mutation testing of the product: ``python -m meta.mutants.run``, with suites/ on PYTHONPATH (`nox -s mutants`).

The operators of mutmut give a random sample of mutants, and the committed patches are added. Each mutant is put into a
copy of the tree, and the nearest cases run against it. A mutant is killed if a case fails, and fails again when it runs
alone. The cases must pass without any mutant, or the run is refused. The exit code is 0 if at least nine of ten mutants
that are not equivalent are killed, and 1 otherwise.
"""

from __future__ import annotations

import argparse
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

from meta.mutants.modules import CASES, MODULES
from meta.mutants.mutant import EQUIVALENT, Mutant, MutantOutcome, PatchMismatch, Result, changed_lines, equivalents
from meta.mutants.patches import PATCHES, mutant_of
from meta.mutants.worker import BaselineFailed, Worker

import gdrkit
from gdrkit.install_paths import install_paths
from gdrkit.inventory import probe
from gdrkit.report.record import SCHEMA_VERSION, CaseReason, Record, Verdict, append_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["draw", "main", "score", "try_all", "write_records"]

SAMPLE_COUNT = 150
SCORE_MIN = 0.9
EQUIVALENT_MAX = 0.05
_KILLED = frozenset({MutantOutcome.KILLED, MutantOutcome.TIMEOUT})
_GENERATE_TIMEOUT_S = 600
_TREE = Path(__file__).resolve().parents[3]


def draw(python: Path, tree: Path, modules: Mapping[str, Sequence[str]], *, seed: str, count: int) -> list[Mutant]:
    """Return a sample of mutants; `python` is the interpreter of the environment that has mutmut."""
    request = {"root": str(tree), "seed": seed, "count": count, "modules": dict(modules)}
    answer = subprocess.run(
        [str(python), str(Path(__file__).with_name("generate.py"))],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_GENERATE_TIMEOUT_S,
    )
    drawn = []
    for each in json.loads(answer.stdout):
        line, before, after = changed_lines((tree / each["file"]).read_text(), each["source"])
        content = (each["module"], each["file"], line, each["operator"], before, after, each["source"])
        drawn.append(Mutant(*content, CASES[each["file"]]))
    return drawn


def score(results: Sequence[Result]) -> float:
    """Return the share of killed mutants among those that compile and are not equivalent; 1 if there are none."""
    counted = [each for each in results if each.outcome not in {MutantOutcome.EQUIVALENT, MutantOutcome.NOT_COMPILED}]
    return sum(each.outcome in _KILLED for each in counted) / len(counted) if counted else 1.0


class _Campaign:
    """A set of mutants that is distributed among workers. Each worker has its own thread."""

    def __init__(self, mutants: Sequence[Mutant], reasons: Mapping[tuple[str, str, str, str], str]) -> None:
        self.results: dict[int, Result] = {}
        self.stopping = False
        self._native: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
        self._python: queue.SimpleQueue[tuple[int, Mutant]] = queue.SimpleQueue()
        self._baselines: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()
        self._baseline_lock = threading.Lock()
        self._count = len(mutants)
        for number, mutant in enumerate(mutants):
            reason = reasons.get(mutant.content)
            if reason is not None:
                self._add(number, Result(mutant, MutantOutcome.EQUIVALENT, note=reason))
            else:
                (self._native if mutant.is_native else self._python).put((number, mutant))

    def work(self, worker: Worker, *, compiles: bool) -> None:
        """Try mutants until there are none left. Only one worker takes native mutants, because only it has a build."""
        is_done = False
        try:
            if compiles and not self._native.empty():
                worker.build_baseline()
                self._take(worker, self._native)
            self._take(worker, self._python)
            is_done = True
        finally:
            self.stopping |= not is_done

    def _take(self, worker: Worker, mutants: queue.SimpleQueue[tuple[int, Mutant]]) -> None:
        while not self.stopping:
            try:
                number, mutant = mutants.get_nowait()
            except queue.Empty:
                return
            with self._baseline_lock:
                if mutant.cases not in self._baselines:
                    self._baselines[mutant.cases] = worker.baseline(mutant.cases)
            self._add(number, worker.attempt(mutant, baseline_s=self._baselines[mutant.cases]))

    def _add(self, number: int, result: Result) -> None:
        mutant = result.mutant
        with self._lock:
            self.results[number] = result
            done = f"{len(self.results)}/{self._count}"
        print(  # noqa: T201
            f"{done} {result.outcome.value:10} {mutant.file}:{mutant.line} {mutant.operator} {result.duration_s:.0f} s "
            f"{result.killed_by or result.note}",
            flush=True,
        )
        if result.outcome is MutantOutcome.SURVIVED:
            print(f"    - {mutant.before}\n    + {mutant.after}", flush=True)  # noqa: T201


def try_all(
    mutants: Sequence[Mutant], workers: Sequence[Worker], reasons: Mapping[tuple[str, str, str, str], str]
) -> list[Result]:
    """Try every mutant and return the results in the order of the mutants.

    Raises
    ------
    BaselineFailed
        Cases fail without any mutant.
    """
    campaign = _Campaign(mutants, reasons)
    with ThreadPoolExecutor(max_workers=max(len(workers), 1)) as pool:
        futures = [pool.submit(campaign.work, worker, compiles=index == 0) for index, worker in enumerate(workers)]
        try:
            for future in futures:
                future.result()
        finally:
            campaign.stopping = True
    return [campaign.results[number] for number in range(len(mutants))]


def _record(result: Result, seed: str, command: str) -> Record:
    mutant = result.mutant
    survived = result.outcome is MutantOutcome.SURVIVED
    verdict = Verdict.PASS if result.outcome in _KILLED else Verdict.FAIL if survived else Verdict.NOT_RUN
    text = result.note or ("no case noticed it" if survived else result.outcome.value)
    reasons = () if verdict is Verdict.PASS else (CaseReason(text=text, foreseen=None if survived else True),)
    evidence: dict[str, object] = {
        "module": mutant.module,
        "file": mutant.file,
        "line": mutant.line,
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
    return _plain_record(
        f"meta/mutants::{mutant.name}", verdict, reasons, evidence, numbers, result.duration_s, command
    )


@functools.cache
def _facts_digest() -> str:
    return probe(query_apis=False).digest


def _plain_record(
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
        title="a mutant of the product and the cases that notice it",
        verdict=verdict,
        reasons=reasons,
        profile="bare",
        facts_digest=_facts_digest(),
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


def write_records(path: Path, results: Sequence[Result], *, seed: str, command: str, duration_s: float) -> None:
    """Write a record for each result, and a summary record, to a new file."""
    path.unlink(missing_ok=True)
    for result in results:
        append_record(path, _record(result, seed, command))
    counts = Counter(result.outcome.value for result in results)
    achieved = score(results)
    enough = achieved >= SCORE_MIN
    evidence: dict[str, object] = {
        "seed": seed,
        "survivors": [each.mutant.name for each in results if each.outcome is MutantOutcome.SURVIVED],
    }
    numbers = {f"{outcome.value}_count": float(counts[outcome.value]) for outcome in MutantOutcome}
    reasons = () if enough else (CaseReason(text=f"the score is {achieved:.3f}, but must be at least {SCORE_MIN}"),)
    numbers |= {"mutants_count": float(len(results)), "score_share": round(achieved, 4)}
    verdict = Verdict.PASS if enough else Verdict.FAIL
    append_record(
        path, _plain_record("meta/mutants::summary", verdict, reasons, evidence, numbers, duration_s, command)
    )


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description="Change the product on purpose.")
    parser.add_argument("--operators", type=Path, required=True, help="Python of the environment that has mutmut")
    parser.add_argument("--tools", type=Path, required=True, help="folder of cmake and ninja")
    parser.add_argument("--module", action="append", choices=sorted(MODULES), help="of this module alone; repeatable")
    parser.add_argument("--count", type=int, default=SAMPLE_COUNT, help="size of the sample (default: %(default)s)")
    parser.add_argument("--seed", help="of the sample (default: the hash of the last commit of gdrkit/ or native/)")
    parser.add_argument(
        "--patch", action="append", choices=[patch.name for patch in PATCHES], help="these patches alone"
    )
    parser.add_argument("--no-patches", action="store_true", help="leave the committed patches out")
    parser.add_argument("--jobs", type=int, default=2, help="workers, each with its own copy (default: %(default)s)")
    parser.add_argument("--records", type=Path, help="write one record for each mutant and a summary to this file")
    return parser.parse_args(arguments)


def _last_commit() -> str:
    command = ["git", "-C", str(_TREE), "log", "-1", "--format=%H", "--", "gdrkit", "native"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def _chosen(options: argparse.Namespace, seed: str) -> list[Mutant]:
    # The patches are made first, so that a patch that does not fit is reported at once.
    patches = [] if options.no_patches else [mutant_of(patch, _TREE) for patch in PATCHES]
    if options.patch:
        return [mutant for mutant in patches if mutant.name in options.patch]
    modules = {name: files for name, files in MODULES.items() if not options.module or name in options.module}
    if options.module:
        patches = [
            mutant for mutant in patches if mutant.file in {file for files in modules.values() for file in files}
        ]
    drawn = draw(options.operators, _TREE, modules, seed=seed, count=options.count) if options.count else []
    return [*patches, *drawn]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parsed(arguments)
    seed = options.seed or _last_commit()
    began = time.monotonic()
    try:
        mutants = _chosen(options, seed)
    except PatchMismatch as error:
        print(error)  # noqa: T201
        return 1
    print(f"{len(mutants)} mutants, seed {seed}", flush=True)  # noqa: T201
    # The folder is in the file system of the tree, since the environment of a worker consists of hard links.
    folder = _TREE / "build" / "mutants" / str(os.getpid())
    try:
        workers = [
            Worker(folder / str(number), source=_TREE, environment=Path(sys.prefix), tools=options.tools)
            for number in range(options.jobs)
        ]
        results = try_all(mutants, workers, equivalents())
    except BaselineFailed as error:
        print(error)  # noqa: T201
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    duration_s = time.monotonic() - began
    if options.records is not None:
        words = sys.argv[1:] if arguments is None else list(arguments)
        command = " ".join(["nox", "-s", "mutants", "--", *_own_words(words)])
        write_records(options.records, results, seed=seed, command=command, duration_s=duration_s)
    return _judged(results, duration_s)


def _own_words(words: Sequence[str]) -> list[str]:
    """Return the options that the user gave, without those that the noxfile adds before them."""
    return [
        word
        for index, word in enumerate(words)
        if not {word, *words[max(index - 1, 0) : index]} & {"--operators", "--tools"}
    ]


def _judged(results: Sequence[Result], duration_s: float) -> int:
    counts = Counter(result.outcome for result in results)
    survivors = [result.mutant for result in results if result.outcome is MutantOutcome.SURVIVED]
    for mutant in survivors:
        print(f"survived: {mutant.name} {mutant.file}:{mutant.line} {mutant.operator}")  # noqa: T201
    achieved = score(results)
    listed = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items())
    print(f"{len(results)} mutants in {duration_s / 60:.0f} min: {listed}; score {achieved:.3f}")  # noqa: T201
    if counts[MutantOutcome.EQUIVALENT] > EQUIVALENT_MAX * len(results):
        print(f"more than {EQUIVALENT_MAX:.0%} are in {EQUIVALENT.name}; write cases instead")  # noqa: T201
        return 1
    if counts[MutantOutcome.NOT_COMPILED]:
        print("a patch that does not compile shows nothing; adapt it")  # noqa: T201
        return 1
    return 0 if achieved >= SCORE_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
