"""cuda-python's own tests on the CUDA twin, joined case by case with their results on a GPU.

cuda_python_child.py writes the results file of each machine. A case counts if it passes on the GPU and needs neither
kernels, nor a compiler, nor the CUDA runtime that is linked statically into cuda.bindings.runtime.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hardware.peers.run import DeviceUnderTest

__all__ = ["CudaPythonJoin", "format_share_table", "join_results", "run_cuda_python"]

TIMEOUT_S = 1200.0
SHARE_MIN_PERCENT = 95.0
_CHILD_SCRIPT = Path(__file__).with_name("cuda_python_child.py")
_PASS, _FAIL = "pass", "fail"
# A failure on the twin with one of these texts means that the case needs a compiler, or the static CUDA runtime.
_EXCLUDING_TEXT_PATTERN = re.compile(r"is hidden, so that no case compiles|cudaErrorNotSupported")


@dataclass(frozen=True, slots=True)
class CudaPythonJoin:
    """The results of each test on a GPU and on the twin.

    Attributes
    ----------
    gpu_machine, twin_machine : mapping
        For each of the two machines, the versions of the packages and of the driver, and the device.
    outcomes : mapping
        For each case, its outcome on the GPU and on the twin: ``pass``, ``fail``, ``skip``, ``crash``,
        ``not collected`` or ``absent``.
    counted_cases : frozenset of str
        The cases that count: they pass on the GPU and need nothing that the twin lacks.
    failure_text_by_case : mapping
        For each case that counts and does not pass on the twin, its outcome on the twin.
    """

    gpu_machine: Mapping[str, str]
    twin_machine: Mapping[str, str]
    outcomes: Mapping[str, tuple[str, str]]
    counted_cases: frozenset[str]
    failure_text_by_case: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed_count(self) -> int:
        """Number of the cases that count and pass on the twin."""
        return len(self.counted_cases) - len(self.failure_text_by_case)

    @property
    def share_percent(self) -> float:
        """Percentage of the counted cases that pass on the twin."""
        return 100.0 * self.passed_count / len(self.counted_cases) if self.counted_cases else 0.0

    @property
    def cases_passing_only_on_twin(self) -> list[str]:
        """The cases that pass on the twin and fail on the GPU. There must be none."""
        return [
            case
            for case, (gpu_outcome, twin_outcome) in self.outcomes.items()
            if gpu_outcome == _FAIL and twin_outcome == _PASS
        ]

    @property
    def failure(self) -> str:
        """The sentence that says why the twin does not pass, or an empty string."""
        reasons = []
        if self.share_percent < SHARE_MIN_PERCENT:
            reasons.append(
                f"{self.share_percent:.1f} % of {len(self.counted_cases)} cases pass, not {SHARE_MIN_PERCENT:g} %"
            )
        cases = self.cases_passing_only_on_twin
        if cases:
            count_text = "1 case passes" if len(cases) == 1 else f"{len(cases)} cases pass"
            reasons.append(f"{count_text} on the twin, but not on the GPU, such as {cases[0]}")
        return "; ".join(reasons)


def run_cuda_python(python: str, tests: Path, device_under_test: DeviceUnderTest, results_file: Path) -> None:
    """Run the tests in the folder `tests` on the twin, and write their results to `results_file`."""
    command = [*device_under_test.launcher, "--", python, str(_CHILD_SCRIPT), str(tests), str(results_file)]
    # The twin has several GPUs. With one visible GPU, it runs the same cases as a machine with one GPU.
    subprocess.run(["env", "CUDA_VISIBLE_DEVICES=0", *command], check=True, timeout=TIMEOUT_S)


def join_results(gpu_file: Path, twin_file: Path) -> CudaPythonJoin:
    """Join the results of the GPU and of the twin, case by case."""
    gpu_machine, gpu_results = _read_results(gpu_file)
    twin_machine, twin_results = _read_results(twin_file)
    absent_result: dict[str, Any] = {"outcome": "absent", "needs": []}
    outcomes: dict[str, tuple[str, str]] = {}
    counted_cases: set[str] = set()
    failure_text_by_case: dict[str, str] = {}
    for case in [*gpu_results, *(case for case in twin_results if case not in gpu_results)]:
        gpu_result, twin_result = gpu_results.get(case, absent_result), twin_results.get(case, absent_result)
        gpu_outcome, twin_outcome = _get_outcome(gpu_result), _get_outcome(twin_result)
        outcomes[case] = (gpu_outcome, twin_outcome)
        needs = {*gpu_result["needs"], *twin_result["needs"]}
        if gpu_outcome != _PASS or needs or _EXCLUDING_TEXT_PATTERN.search(twin_result["outcome"]):
            continue
        counted_cases.add(case)
        if twin_outcome != _PASS:
            failure_text_by_case[case] = " ".join(twin_result["outcome"].split())
    return CudaPythonJoin(gpu_machine, twin_machine, outcomes, frozenset(counted_cases), failure_text_by_case)


def format_share_table(joined_results: CudaPythonJoin) -> str:
    """Return a table in Markdown: for each module of tests, the cases that count and how many pass on the twin."""
    count_by_module = Counter(_get_module_name(case) for case in joined_results.counted_cases)
    failure_count_by_module = Counter(_get_module_name(case) for case in joined_results.failure_text_by_case)
    rows = ["| module of tests | passes on the GPU, counted | of these, passes on the twin |", "|---|---|---|"]
    rows += [
        f"| `{module}` | {count} | {count - failure_count_by_module[module]} |"
        for module, count in sorted(count_by_module.items())
    ]
    passed_text = f"{joined_results.passed_count} ({joined_results.share_percent:.1f} %)"
    rows.append(f"| all | {len(joined_results.counted_cases)} | {passed_text} |")
    return "\n".join(rows)


def _read_results(path: Path) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    machine_entry, *case_entries = map(json.loads, path.read_text().splitlines())
    return machine_entry["machine"], {entry["test"]: entry for entry in case_entries}


def _get_outcome(result: Mapping[str, Any]) -> str:
    return str(result["outcome"]).partition(":")[0]


def _get_module_name(case: str) -> str:
    return case.partition("::")[0].replace("/tests/", "/")
