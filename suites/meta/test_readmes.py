"""suites/README.md lists all folders of the suites, and exactly the cases of a qualification."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SUITES = Path(__file__).resolve().parents[1]
# `gdrkit qualify` runs at least this number of cases.
CASES_MIN = 12


def test_suites_readme_lists_the_qualification_cases() -> None:
    command = [sys.executable, "-m", "pytest", str(SUITES), f"--ignore={SUITES / 'meta'}", "-m", "qualify"]
    collection = subprocess.run([*command, "--collect-only", "-q"], check=True, capture_output=True, text=True)
    qualification_cases = {line.partition("[")[0] for line in collection.stdout.splitlines() if "::" in line}
    listed_cases = set(re.findall(r"^- `(\S+::\S+)`$", (SUITES / "README.md").read_text(), re.MULTILINE))
    assert len(qualification_cases) >= CASES_MIN
    assert listed_cases == qualification_cases


def test_suites_readme_lists_the_folders() -> None:
    folders = {path.name for path in SUITES.iterdir() if path.name != "__pycache__" and any(path.glob("*.*"))}
    listed_folders = set(re.findall(r"^\| `(\w+)/` \|", (SUITES / "README.md").read_text(), re.MULTILINE))
    assert listed_folders == folders
