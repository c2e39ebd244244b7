"""A nox session ends with the exit code of the command that it runs. By itself, nox ends with 1 after every failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# A row of the table of exit codes in README.md.
EXIT_CODE_ROW = re.compile(r"^\| (\d) \| (.+) \|$", re.MULTILINE)


def run_nox(*arguments: str, search_path: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", "-f", str(PROJECT_ROOT / "noxfile.py"), *arguments]
    environ = {**os.environ, "PATH": search_path or os.environ["PATH"]}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture
def vendor_machine_path(tmp_path: Path) -> str:
    """Value of PATH for a machine that has a vendor's RDMA stack (ofed_info) and no C++ compiler."""
    for name in ("bash", "dpkg-query", "git"):
        program_path = shutil.which(name)
        if program_path:
            (tmp_path / name).symlink_to(program_path)
    vendor_program = tmp_path / "ofed_info"
    vendor_program.write_text("#!/bin/sh\n")
    vendor_program.chmod(0o755)
    return str(tmp_path)


def test_wrong_usage_of_gdrkit_is_2() -> None:
    assert run_nox("-s", "qualify", "--", "--no-such-option").returncode == 2


def test_wrong_usage_of_pytest_is_2() -> None:
    assert run_nox("-s", "suites", "--", "--no-such-option", "suites/meta").returncode == 2


def test_selection_without_cases_is_2() -> None:
    assert run_nox("-s", "meta", "--", "-k", "there_is_no_such_case").returncode == 2


def test_missing_tools_beside_a_vendor_stack_are_3(vendor_machine_path: str) -> None:
    result = run_nox("-s", "native", search_path=vendor_machine_path)
    assert result.returncode == 3
    assert "ofed_info" in result.stdout
    assert "g++" in result.stdout


def test_readme_and_help_agree_on_exit_codes() -> None:
    meaning_by_code = dict(EXIT_CODE_ROW.findall((PROJECT_ROOT / "README.md").read_text()))
    assert list(meaning_by_code) == ["0", "1", "2", "3", "4"]
    command = [sys.executable, "-m", "gdrkit", "qualify", "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    help_line = " ".join(help_text.split())
    missing_rows = [
        f"{code} {meaning}" for code, meaning in meaning_by_code.items() if f"{code} {meaning}" not in help_line
    ]
    assert not missing_rows, help_text
