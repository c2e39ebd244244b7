"""The wheels alone, in an empty environment outside the checkout, behave as the README says."""

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
# The noxfile makes these wheels for this run. The wheel of the twins is the one that it installed.
WHEELS = PROJECT_ROOT / "build" / "wheels"
CARRIED = ("suites/", "hardware/profiles/", "reports/templates/", "reports/schema/")
SHOW_DEVICES = """
import json
from gdrkit import cuda, verbs
print(json.dumps({"nics": len(verbs.list_nics()), "gpus": cuda.device_count()}))
"""

pytestmark = pytest.mark.timeout(400)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def succeed(command: list[str], folder: Path) -> str:
    result = run(command, folder)
    assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    (found,) = WHEELS.glob("gdrkit-*.whl")
    return found


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheels, in a folder that contains nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    succeed([sys.executable, "-m", "virtualenv", "--quiet", str(folder / "venv")], folder)
    # pip needs a file name with extras in this form.
    product = f"gdrkit[qualify,software] @ {wheel.as_uri()}"
    find = ["--find-links", str(WHEELS)]
    succeed([str(folder / "venv" / "bin" / "pip"), "install", "--quiet", *find, product], folder)
    return folder / "venv" / "bin"


def test_the_wheel_carries_what_a_qualification_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [part for part in CARRIED if not any(name.startswith(f"gdrkit/_data/{part}") for name in names)] == []
    assert [name for name in names if name.endswith(".pyc") or "/suites/meta/" in name] == []


def native_part(name: str) -> bool:
    """Return whether a file is a build output in the package: a module, a library or a header."""
    parts = Path(name).parts
    return parts[0] == "gdrkit" and (name.endswith(".so") or parts[2:3] in {("lib",), ("include",)})


def test_the_wheel_carries_the_native_parts_of_this_checkout_and_no_others(wheel: Path) -> None:
    # The noxfile built these files into the checkout for this run.
    files = [
        path.relative_to(PROJECT_ROOT).as_posix() for path in (PROJECT_ROOT / "gdrkit").rglob("*") if path.is_file()
    ]
    built = set(filter(native_part, files))
    assert built
    assert set(filter(native_part, zipfile.ZipFile(wheel).namelist())) == built


def test_the_wheel_runs_programs_on_the_twins(empty: Path, tmp_path: Path) -> None:
    command = [str(empty / "gdrkit"), "run", "--software", "--", str(empty / "python"), "-c", SHOW_DEVICES]
    shown = json.loads(succeed(command, tmp_path).splitlines()[-1])
    assert shown["nics"] > 0
    assert shown["gpus"] > 0


def test_the_wheel_qualifies_on_the_twins(empty: Path, tmp_path: Path) -> None:
    succeed([str(empty / "gdrkit"), "qualify", "--software", "--output", str(tmp_path / "report")], tmp_path)
    assert {"records.jsonl", "junit.xml", "summary.md", "index.html"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }


def test_the_plugin_serves_an_empty_project_as_its_document_says(empty: Path, tmp_path: Path) -> None:
    document = (PROJECT_ROOT / "docs" / "plugin.md").read_text()
    (settings, program, shell, said) = (
        re.search(rf"^```{kind}\n(.*?)^```$", document, re.MULTILINE | re.DOTALL)
        for kind in ("toml", "python", "sh", "text")
    )
    assert settings
    assert program
    assert shell
    assert said
    (tmp_path / "pyproject.toml").write_text(settings[1])
    (tmp_path / "test_transfer.py").write_text(program[1])
    path = f"{empty}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-ec", shell[1]],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert said[1].strip() in ended.stdout
    assert "1 passed, 1 not run" in ended.stdout
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in records] == ["pass", "not_run"]
