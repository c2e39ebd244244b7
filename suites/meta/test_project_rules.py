"""The project follows its own rules, and each rule detects a violation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from meta.levels import LEVELS, SAME_LEVEL, SIBLINGS_LEVEL
from meta.rules import RULES, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECT_ROOT = Path(__file__).resolve().parents[2]


def build(root: Path, sources: Mapping[str, str]) -> None:
    for name, text in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_project_follows_the_rule(rule: Rule) -> None:
    breaches = list(rule.breaches(PROJECT_ROOT))
    assert not breaches, "\n".join([rule.why, *breaches])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_detects_a_violation(rule: Rule, tmp_path: Path) -> None:
    build(tmp_path, rule.must_fail)
    assert list(rule.breaches(tmp_path))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_accepts_valid_code(rule: Rule, tmp_path: Path) -> None:
    build(tmp_path, rule.must_pass)
    assert not list(rule.breaches(tmp_path))


def test_package_has_one_level() -> None:
    packages = [package for level in LEVELS for package in level]
    assert len(packages) == len(set(packages))


def test_real_apis_have_no_exception() -> None:
    assert not {package for pair in SAME_LEVEL for package in pair} & LEVELS[SIBLINGS_LEVEL]
