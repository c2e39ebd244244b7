"""Every file that contains the version of the project contains the same version."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import gdrkit

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PYPROJECTS = [tomllib.loads((PROJECT_ROOT / folder / "pyproject.toml").read_text()) for folder in ("", "native/twins")]
GDRKIT_METADATA, TWINS_METADATA = (pyproject["project"] for pyproject in PYPROJECTS)
HF3FS_METADATA = tomllib.loads((PROJECT_ROOT / "deploy" / "hf3fs" / "pyproject.toml").read_text())["project"]


def test_package_and_metadata_agree() -> None:
    assert GDRKIT_METADATA["version"] == gdrkit.__version__


def test_software_extra_requires_the_twins_of_this_tree() -> None:
    assert GDRKIT_METADATA["optional-dependencies"]["software"] == [
        f"{TWINS_METADATA['name']}=={TWINS_METADATA['version']}"
    ]
    assert TWINS_METADATA["version"] == GDRKIT_METADATA["version"]


def test_hf3fs_names_require_the_product_of_this_tree() -> None:
    assert HF3FS_METADATA["version"] == GDRKIT_METADATA["version"]
    assert HF3FS_METADATA["dependencies"] == [f"{GDRKIT_METADATA['name']}=={GDRKIT_METADATA['version']}"]


def test_changelog_has_the_version() -> None:
    assert f"## {gdrkit.__version__}" in (PROJECT_ROOT / "CHANGELOG.md").read_text()


def test_local_build_tools_include_those_of_pip() -> None:
    source = (PROJECT_ROOT / "automation" / "builds.py").read_text()
    (requirements_literal,) = re.findall(r"^BUILD_REQUIREMENTS = (\(.*\))$", source, re.MULTILINE)
    required_tools = {tool for pyproject in PYPROJECTS for tool in pyproject["build-system"]["requires"]}
    assert required_tools <= set(ast.literal_eval(requirements_literal))


def test_ci_runs_every_python_of_the_metadata() -> None:
    workflow = (PROJECT_ROOT / ".github" / "workflows" / "ci.yml").read_text()
    python_versions = {
        classifier.rpartition(" ")[2]
        for classifier in GDRKIT_METADATA["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    }
    assert set(re.findall(r'python: "([\d.]+)"', workflow)) == python_versions


def test_changelog_dates_every_release() -> None:
    headings = re.findall(r"^## (.+)$", (PROJECT_ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"Unreleased|[\d.]+ \(\d{4}-\d\d-\d\d\)", heading) for heading in headings)
