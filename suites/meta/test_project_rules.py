"""The project follows its own rules, and each rule detects a violation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from meta.levels import API_BINDING_LEVEL, IMPORT_LEVELS, IMPORTS_WITHIN_A_LEVEL
from meta.rules import RULES, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def write_tree(root: Path, text_by_path: Mapping[str, str]) -> None:
    for relative_path, text in text_by_path.items():
        path = root / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_project_follows_the_rule(rule: Rule) -> None:
    violations = list(rule.find_violations(PROJECT_ROOT))
    assert not violations, "\n".join([rule.why, *violations])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_detects_a_violation(rule: Rule, tmp_path: Path) -> None:
    write_tree(tmp_path, rule.violating_files)
    assert list(rule.find_violations(tmp_path))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_accepts_valid_code(rule: Rule, tmp_path: Path) -> None:
    write_tree(tmp_path, rule.valid_files)
    assert not list(rule.find_violations(tmp_path))


def test_package_has_one_level() -> None:
    packages = [package for level in IMPORT_LEVELS for package in level]
    assert len(packages) == len(set(packages))


def test_real_api_packages_never_import_each_other() -> None:
    assert not {package for pair in IMPORTS_WITHIN_A_LEVEL for package in pair} & IMPORT_LEVELS[API_BINDING_LEVEL]
