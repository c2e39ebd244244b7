"""The wheels work in an empty environment outside the checkout, as the README states."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# nox -s meta builds the wheel of gdrkit into this folder, and copies the installed wheel of the software twins
# (libraries that emulate the hardware) into it.
WHEELS_FOLDER = PROJECT_ROOT / "build" / "wheels"
# A wheel has these folders below gdrkit/_data/.
DATA_FOLDERS = ("suites/", "hardware/profiles/", "reports/templates/", "reports/schema/")
PRINT_DEVICES_PROGRAM = """
import json
from gdrkit import cuda, verbs
print(json.dumps({"nics": len(verbs.list_nics()), "gpus": cuda.device_count()}))
"""

pytestmark = pytest.mark.timeout(400)


def run_in_folder(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def run_successfully(command: list[str], folder: Path) -> str:
    result = run_in_folder(command, folder)
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    (path,) = WHEELS_FOLDER.glob("gdrkit-*.whl")
    return path


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new virtual environment with the wheels and their dependencies only."""
    empty_folder = tmp_path_factory.mktemp("empty")
    run_successfully([sys.executable, "-m", "virtualenv", "--quiet", str(empty_folder / "venv")], empty_folder)
    # pip accepts a wheel file together with extras only as NAME[EXTRAS] @ URI.
    requirement = f"gdrkit[qualify,software] @ {wheel.as_uri()}"
    find_links_options = ["--find-links", str(WHEELS_FOLDER)]
    run_successfully(
        [str(empty_folder / "venv" / "bin" / "pip"), "install", "--quiet", *find_links_options, requirement],
        empty_folder,
    )
    return empty_folder / "venv" / "bin"


def test_wheel_has_the_files_of_a_qualification(wheel: Path) -> None:
    file_names = zipfile.ZipFile(wheel).namelist()
    assert [
        folder
        for folder in DATA_FOLDERS
        if not any(file_name.startswith(f"gdrkit/_data/{folder}") for file_name in file_names)
    ] == []
    assert [file_name for file_name in file_names if file_name.endswith(".pyc") or "/suites/meta/" in file_name] == []


def is_native_part(file_name: str) -> bool:
    """Return whether a file is a build output in the package: a module, a library or a header."""
    parts = Path(file_name).parts
    return parts[0] == "gdrkit" and (file_name.endswith(".so") or parts[2:3] in {("lib",), ("include",)})


def test_wheel_has_exactly_the_native_parts_of_this_tree(wheel: Path) -> None:
    # The noxfile built these files into the checkout for this run.
    checkout_files = [
        path.relative_to(PROJECT_ROOT).as_posix() for path in (PROJECT_ROOT / "gdrkit").rglob("*") if path.is_file()
    ]
    built_parts = set(filter(is_native_part, checkout_files))
    assert built_parts
    assert set(filter(is_native_part, zipfile.ZipFile(wheel).namelist())) == built_parts


def test_wheel_runs_programs_on_the_twins(bin_folder: Path, tmp_path: Path) -> None:
    command = [str(bin_folder / "gdrkit"), "run", "--software", "--"]
    output = run_successfully([*command, str(bin_folder / "python"), "-c", PRINT_DEVICES_PROGRAM], tmp_path)
    devices = json.loads(output.splitlines()[-1])
    assert devices["nics"] > 0
    assert devices["gpus"] > 0


def test_wheel_qualifies_on_the_twins(bin_folder: Path, tmp_path: Path) -> None:
    run_successfully(
        [str(bin_folder / "gdrkit"), "qualify", "--software", "--output", str(tmp_path / "report")], tmp_path
    )
    assert {"records.jsonl", "junit.xml", "summary.md", "index.html"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }


def test_plugin_document_works_in_an_empty_project(bin_folder: Path, tmp_path: Path) -> None:
    document = (PROJECT_ROOT / "docs" / "plugin.md").read_text()
    (settings_match, program_match, shell_match, output_match) = (
        re.search(rf"^```{language}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
        for language in ("toml", "python", "sh", "text")
    )
    assert settings_match
    assert program_match
    assert shell_match
    assert output_match
    (tmp_path / "pyproject.toml").write_text(settings_match[1])
    (tmp_path / "test_transfer.py").write_text(program_match[1])
    search_path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-ec", shell_match[1]],
        cwd=tmp_path,
        env={**os.environ, "PATH": search_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert output_match[1].strip() in result.stdout
    assert "1 passed, 1 not run" in result.stdout
    record_lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in record_lines] == ["pass", "not_run"]
