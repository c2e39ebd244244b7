"""The cases of this folder also pass on Gaudi 1 and on Gaudi 3. By default, the hl-thunk twin emulates Gaudi 2.

The hl-thunk twin is a library that emulates hl-thunk and its devices. GDRKIT_TWINS_GAUDI selects the generation, and
must be set before a process starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit.harness.needs import needs, software

GAUDI_FOLDER = Path(__file__).parent
# The child process does not run these files. This file would run itself. test_without_cuda.py already runs on all
# generations. The other files are slow, or do not depend on the generation.
IGNORED_FILES = (
    Path(__file__).name,
    "test_without_cuda.py",
    "test_facts.py",
    "test_first_light.py",
    "test_threads.py",
    "test_library.py",
)


@needs(software("hlthunk"))
@pytest.mark.timeout(600)
# Each entry has a generation and the minimum number of cases that must pass on it.
@pytest.mark.parametrize(("generation", "passed_count_min"), [("gaudi", 38), ("gaudi3", 66)])
def test_cases_pass_on_generation(generation: str, passed_count_min: int) -> None:
    ignore_options = [f"--ignore={GAUDI_FOLDER / name}" for name in IGNORED_FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        str(GAUDI_FOLDER.parent / "pytest.ini"),
        str(GAUDI_FOLDER),
        *ignore_options,
    ]
    completed = subprocess.run(
        command,
        env={**os.environ, "GDRKIT_TWINS_GAUDI": generation},
        capture_output=True,
        text=True,
        check=False,
        timeout=570,
    )
    assert completed.returncode == 0, completed.stdout[-5000:] + completed.stderr[-2000:]
    passed_match = re.search(r"(\d+) passed", completed.stdout)
    assert passed_match is not None
    assert int(passed_match[1]) >= passed_count_min
