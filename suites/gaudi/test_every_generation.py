"""The cases of this folder also pass on the other generations, which a process selects before it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit.harness.needs import needs, software

HERE = Path(__file__).parent
# The slowest cases run the same code on all generations. test_without_cuda.py covers all generations itself.
LEFT_OUT = (
    Path(__file__).name,
    "test_without_cuda.py",
    "test_facts.py",
    "test_first_light.py",
    "test_threads.py",
    "test_library.py",
)


@needs(software("hlthunk"))
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("generation", "passed_min"), [("gaudi", 38), ("gaudi3", 66)])
def test_cases_pass_on_generation(generation: str, passed_min: int) -> None:
    ignored = [f"--ignore={HERE / name}" for name in LEFT_OUT]
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(HERE.parent / "pytest.ini"), str(HERE), *ignored]
    done = subprocess.run(
        command,
        env={**os.environ, "GDRKIT_TWINS_GAUDI": generation},
        capture_output=True,
        text=True,
        check=False,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary[1]) >= passed_min
