"""The parts of hardware/gpu/run.py, which runs cases on a machine with GPUs: their cases, time limits and records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hardware.gpu import run

PROJECT_ROOT = Path(__file__).resolve().parents[2]
RUN_PY = PROJECT_ROOT / "hardware" / "gpu" / "run.py"


def call_run_py(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(RUN_PY), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part_name", run.PARTS)
def test_part_has_its_cases_and_is_in_the_readme(part_name: str) -> None:
    part = run.PARTS[part_name]
    assert [case for case in part.cases if not (PROJECT_ROOT / case).exists()] == []
    assert part.root_folder in {"suites", "hardware"}
    assert f"`{part_name}`" in (PROJECT_ROOT / "hardware" / "README.md").read_text()


def test_every_benchmark_of_a_gpu_belongs_to_a_part() -> None:
    cases_of_parts = {case for part in run.PARTS.values() for case in part.cases}
    benchmarks = {str(path.relative_to(PROJECT_ROOT)) for path in (PROJECT_ROOT / "suites" / "bench").glob("test_*.py")}
    # These benchmarks need no GPU: their results are recorded on a machine without hardware.
    assert benchmarks - cases_of_parts == {
        f"suites/bench/{name}.py" for name in ("test_doctor_cost", "test_iov_cost", "test_tier_policy")
    }


def test_wrong_usage_and_empty_folder_are_reported(tmp_path: Path) -> None:
    assert "--tar" in call_run_py("--help").stdout
    result_with_unknown_part = call_run_py("everything")
    assert (
        result_with_unknown_part.returncode,
        "PART must be one of inventory, " in result_with_unknown_part.stderr,
    ) == (2, True)
    assert "not everything" in result_with_unknown_part.stderr
    result_with_empty_bundle = call_run_py("--bundle", str(tmp_path))
    assert (result_with_empty_bundle.returncode, "run nox -s bundle" in result_with_empty_bundle.stdout) == (3, True)


def test_output_and_exit_code_of_a_part_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('the output'); raise SystemExit(5)"]
    exit_code = run.run_limited(command, dict(os.environ), tmp_path, tmp_path / "log", 60.0)
    assert (exit_code, (tmp_path / "log").read_text()) == (5, "the output\n")


def test_part_that_hangs_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    # run_limited sends SIGABRT, and then SIGKILL if the process has not ended.
    assert run.run_limited(command, dict(os.environ), tmp_path, tmp_path / "log", 1.0) in {
        -signal.SIGABRT,
        -signal.SIGKILL,
    }


def test_records_are_packed_into_one_archive(tmp_path: Path) -> None:
    (tmp_path / "out" / "h200-1").mkdir(parents=True)
    (tmp_path / "out" / "h200-1" / "cost.jsonl").write_text("{}\n")
    archive = tmp_path / "back" / "all.tar.gz"
    # The second call replaces the archive of the first.
    for _ in range(2):
        run.pack(tmp_path / "out", archive)
    with tarfile.open(archive) as archive_file:
        assert "records/h200-1/cost.jsonl" in archive_file.getnames()
    assert [path.name for path in archive.parent.iterdir()] == ["all.tar.gz"]
