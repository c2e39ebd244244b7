"""Every place that states the version states the same one."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import gdrkit

PROJECT_ROOT = Path(__file__).resolve().parents[2]
DESCRIPTIONS = [tomllib.loads((PROJECT_ROOT / place / "pyproject.toml").read_text()) for place in ("", "native/twins")]
PRODUCT, TWINS = (description["project"] for description in DESCRIPTIONS)


def test_the_package_and_its_metadata_agree() -> None:
    assert PRODUCT["version"] == gdrkit.__version__


def test_the_software_extra_asks_for_the_twins_of_this_tree() -> None:
    assert PRODUCT["optional-dependencies"]["software"] == [f"{TWINS['name']}=={TWINS['version']}"]
    assert TWINS["version"] == PRODUCT["version"]


def test_the_changelog_names_the_version() -> None:
    assert f"## {gdrkit.__version__}" in (PROJECT_ROOT / "CHANGELOG.md").read_text()


def test_wheels_are_built_here_by_what_pip_takes_elsewhere() -> None:
    (said,) = re.findall(r"^BUILD = (\(.*\))$", (PROJECT_ROOT / "automation" / "builds.py").read_text(), re.MULTILINE)
    needed = {each for description in DESCRIPTIONS for each in description["build-system"]["requires"]}
    assert needed <= set(ast.literal_eval(said))


def test_ci_runs_every_python_that_the_metadata_names() -> None:
    workflow = (PROJECT_ROOT / ".github" / "workflows" / "ci.yml").read_text()
    named = {entry.rpartition(" ")[2] for entry in PRODUCT["classifiers"] if re.search(r":: 3\.\d+$", entry)}
    assert set(re.findall(r'python: "([\d.]+)"', workflow)) == named


def test_changelog_dates_every_release() -> None:
    headings = re.findall(r"^## (.+)$", (PROJECT_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"Unreleased|[\d.]+ \(\d{4}-\d\d-\d\d\)", heading) for heading in headings)
