"""The READMEs list exactly the existing cases and folders."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SUITES = Path(__file__).resolve().parents[1]
LEAST_CASES = 12


def test_the_readme_of_the_suites_lists_the_cases_of_a_qualification() -> None:
    command = [sys.executable, "-m", "pytest", str(SUITES), f"--ignore={SUITES / 'meta'}", "-m", "qualify"]
    shown = subprocess.run([*command, "--collect-only", "-q"], check=True, capture_output=True, text=True)
    cases = {line.partition("[")[0] for line in shown.stdout.splitlines() if "::" in line}
    listed = set(re.findall(r"^- `(\S+::\S+)`$", (SUITES / "README.md").read_text(), re.MULTILINE))
    assert len(cases) >= LEAST_CASES
    assert listed == cases


def test_the_readme_of_the_suites_lists_the_folders() -> None:
    folders = {path.name for path in SUITES.iterdir() if any(path.glob("*.*"))}
    listed = set(re.findall(r"^\| `(\w+)/` \|", (SUITES / "README.md").read_text(), re.MULTILINE))
    assert listed == folders
