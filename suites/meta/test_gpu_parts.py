"""The parts of `gpu.py`, which runs the cases on a machine with GPUs, exist, end in time, and return one archive."""

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
PROGRAM = PROJECT_ROOT / "hardware" / "gpu" / "run.py"


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", run.PARTS)
def test_the_cases_of_a_part_are_there_and_the_readme_knows_it(name: str) -> None:
    part = run.PARTS[name]
    assert [case for case in part.cases if not (PROJECT_ROOT / case).exists()] == []
    assert part.root in {"suites", "hardware"}
    assert f"`{name}`" in (PROJECT_ROOT / "hardware" / "README.md").read_text()


def test_every_benchmark_of_a_gpu_belongs_to_a_part() -> None:
    ours = {case for part in run.PARTS.values() for case in part.cases}
    benches = {str(path.relative_to(PROJECT_ROOT)) for path in (PROJECT_ROOT / "suites" / "bench").glob("test_*.py")}
    # The results of these cases are recorded on a machine without hardware.
    assert benches - ours == {"suites/bench/test_doctor_cost.py", "suites/bench/test_tier_policy.py"}


def test_wrong_usage_and_an_empty_folder_are_said_at_once(tmp_path: Path) -> None:
    assert "--tar" in called("--help").stdout
    unknown = called("everything")
    assert (unknown.returncode, "no part everything" in unknown.stderr) == (2, True)
    empty = called("--bundle", str(tmp_path))
    assert (empty.returncode, "make the folder by nox -s bundle" in empty.stdout) == (3, True)


def test_what_a_part_prints_is_kept_and_its_exit_code_is_given(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('what it found'); raise SystemExit(5)"]
    code = run.run_limited(command, dict(os.environ), tmp_path, tmp_path / "log", 60.0)
    assert (code, (tmp_path / "log").read_text()) == (5, "what it found\n")


def test_a_part_that_hangs_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert run.run_limited(command, dict(os.environ), tmp_path, tmp_path / "log", 1.0) in {
        -signal.SIGABRT,
        -signal.SIGKILL,
    }


def test_everything_comes_back_as_one_file(tmp_path: Path) -> None:
    (tmp_path / "out" / "h200-1").mkdir(parents=True)
    (tmp_path / "out" / "h200-1" / "cost.jsonl").write_text("{}\n")
    for _ in range(2):
        run.pack(tmp_path / "out", tmp_path / "back" / "all.tar.gz")
    with tarfile.open(tmp_path / "back" / "all.tar.gz") as packed:
        assert "records/h200-1/cost.jsonl" in packed.getnames()
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["all.tar.gz"]
