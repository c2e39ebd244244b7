"""One version, said in several places, is the same in all of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import gdrkit

HOUSE = Path(__file__).resolve().parents[2]
PRODUCT = tomllib.loads((HOUSE / "pyproject.toml").read_text())["project"]
TWINS = tomllib.loads((HOUSE / "native" / "twins" / "pyproject.toml").read_text())["project"]


def test_the_package_and_its_metadata_agree() -> None:
    assert PRODUCT["version"] == gdrkit.__version__


def test_the_software_extra_asks_for_the_twins_of_this_tree() -> None:
    assert PRODUCT["optional-dependencies"]["software"] == [f"{TWINS['name']}=={TWINS['version']}"]
    assert TWINS["version"] == PRODUCT["version"]


def test_the_changelog_names_the_version() -> None:
    assert f"## {gdrkit.__version__}" in (HOUSE / "CHANGELOG.md").read_text()
