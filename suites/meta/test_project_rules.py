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
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    breaches = list(rule.breaches(PROJECT_ROOT))
    assert not breaches, "\n".join([rule.why, *breaches])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_rule_notices_a_breach(rule: Rule, tmp_path: Path) -> None:
    build(tmp_path, rule.must_fail)
    assert list(rule.breaches(tmp_path))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_rule_accepts_what_is_right(rule: Rule, tmp_path: Path) -> None:
    build(tmp_path, rule.must_pass)
    assert not list(rule.breaches(tmp_path))


def test_a_room_has_one_level() -> None:
    rooms = [room for level in LEVELS for room in level]
    assert len(rooms) == len(set(rooms))


def test_the_real_apis_are_never_excepted() -> None:
    assert not {room for pair in SAME_LEVEL for room in pair} & LEVELS[SIBLINGS_LEVEL]
