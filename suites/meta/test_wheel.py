"""The wheels alone, in an empty environment outside the checkout, do what the README says."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]
# Made by the noxfile when it installed the twins for this very run.
TWINS_WHEELS = HOUSE / "build" / "wheels"
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    succeed([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(HOUSE)], folder)
    return next(folder.glob("gdrkit-*.whl"))


@pytest.fixture(scope="module")
def empty(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheels, in a folder that has nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    succeed([sys.executable, "-m", "virtualenv", "--quiet", str(folder / "venv")], folder)
    # A file name with extras, as pip wants it.
    product = f"gdrkit[qualify,software] @ {wheel.as_uri()}"
    find = ["--find-links", str(TWINS_WHEELS)]
    succeed([str(folder / "venv" / "bin" / "pip"), "install", "--quiet", *find, product], folder)
    return folder / "venv" / "bin"


def test_the_wheel_carries_what_a_qualification_needs(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert [part for part in CARRIED if not any(name.startswith(f"gdrkit/_house/{part}") for name in names)] == []
    assert [name for name in names if name.endswith((".so", ".pyc")) or "/suites/meta/" in name] == []


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
