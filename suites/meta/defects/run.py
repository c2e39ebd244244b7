"""Proof that every case of the review can fail: ``python -m meta.defects.run``, with suites/ on PYTHONPATH.

The cases run first without a defect, then once for each defect. A defect replaces functions of gdrkit, or the client
library is a build with the defect from the folder ``--libraries``. A defect is caught if its own case fails in its body
with the expected symptom. An error at import or set-up does not count, nor does another message, nor a defect that also
fails another case. The exit code is 0 if every defect is caught.
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

from meta.defects.defect import NativeUnit
from meta.defects.document import DOCUMENT, render
from meta.defects.table import DEFECTS, FINDINGS

from gdrkit.report import Verdict, read_records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meta.defects.defect import Defect

    from gdrkit.report import Record

__all__ = ["Outcome", "judge", "main"]

SUITES = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a defect is caught, and the observed failure."""

    is_caught: bool
    observed: str


def judge(defect: Defect, records: Mapping[str, Record]) -> Outcome:
    """Return the outcome of a run with this defect."""
    record = records.get(defect.case)
    if record is None:
        return Outcome(is_caught=False, observed="the case has no record")
    others = sorted(case for case, other in records.items() if other.verdict is Verdict.FAIL and case != defect.case)
    if others:
        return Outcome(is_caught=False, observed=f"other cases fail, too: {', '.join(others)}")
    if record.verdict is not Verdict.FAIL:
        return Outcome(is_caught=False, observed=f"the verdict of the case is {record.verdict.value}")
    # A failure before or after the body begins with the phase, and does not count as caught.
    text = record.reasons[0].text
    if text.startswith(("setup:", "teardown:")):
        return Outcome(is_caught=False, observed=text)
    return Outcome(is_caught=defect.symptom in text, observed=text)


def _library(libraries: Path, defect: Defect) -> Path:
    """Return the path of the client library with this defect."""
    return libraries / f"lib{defect.name}.so"


def _records(defect: Defect | None, libraries: Path) -> dict[str, Record]:
    """Run the cases of the review, with or without a defect, and return the records by case below suites/review."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        environ = dict(os.environ)
        paths = [str(SUITES / "meta" / "defects" / "site"), str(SUITES), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environ.pop("GDRKIT_DEFECT", None)
        if defect is not None and isinstance(defect.injection, NativeUnit):
            environ["GDRKIT_USRBIO_LIBRARY"] = str(_library(libraries, defect))
        elif defect is not None:
            environ["GDRKIT_DEFECT"] = defect.name
        command = [sys.executable, "-m", "pytest", "-q", "--seed=1", f"--records={path}", str(SUITES / "review")]
        ended = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, cwd=SUITES.parent
        )
        if not path.exists():
            print(ended.stdout[-4000:] + ended.stderr[-4000:])  # noqa: T201
            return {}
        return {record.case.rpartition("review/")[2]: record for record in read_records(path)}


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    for finding, case, defect, symptom, verdict in rows:
        print(f"{finding:3} {verdict:12} {case}")  # noqa: T201
        print(f"    {defect}\n    -> {symptom}")  # noqa: T201


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, write docs/findings.md, and return 0 if every defect is caught, else 1."""
    parser = argparse.ArgumentParser(prog="meta.defects.run", description=main.__doc__)
    parser.add_argument("--libraries", type=Path, required=True, help="folder of the client libraries with defects")
    libraries = parser.parse_args(arguments).libraries
    native = [defect for defect in DEFECTS.values() if isinstance(defect.injection, NativeUnit)]
    if missing := [_library(libraries, defect) for defect in native if not _library(libraries, defect).exists()]:
        print("not built:", *missing, sep="\n  ")  # noqa: T201
        return 1
    baseline = _records(None, libraries)
    failed = sorted(case for case, record in baseline.items() if record.verdict is not Verdict.PASS)
    required = {defect.case for defect in DEFECTS.values()}
    if failed or not required <= baseline.keys():
        missing_cases = sorted(required - baseline.keys())
        print("these cases do not pass without a defect:", *(failed or missing_cases), sep="\n  ")  # noqa: T201
        return 1
    # Two runs at a time use the processors well, because a run mostly waits for its peers.
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = dict(zip(DEFECTS, pool.map(lambda defect: _records(defect, libraries), DEFECTS.values()), strict=True))
    outcomes = {name: judge(defect, runs[name]) for name, defect in DEFECTS.items()}
    texts = {finding.number: finding.text for finding in FINDINGS}
    for number in sorted(texts):
        print(f"\n{number}: {texts[number]}")  # noqa: T201
        _print(
            (
                number,
                defect.case,
                defect.text,
                defect.symptom if outcomes[name].is_caught else f"{defect.symptom!r}, but: {outcomes[name].observed}",
                "caught" if outcomes[name].is_caught else "NOT CAUGHT",
            )
            for name, defect in DEFECTS.items()
            if defect.finding == number
        )
    count = sum(outcome.is_caught for outcome in outcomes.values())
    print(f"\n{count} of {len(outcomes)} defects caught")  # noqa: T201
    DOCUMENT.write_text(render())
    return 0 if count == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
