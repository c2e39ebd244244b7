"""The sample report in docs/ is self-contained, small, and made from records in this tree by `nox -s sample`.

The same session makes the pictures of the README.
"""

from __future__ import annotations

import re
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SAMPLE_PAGE = PROJECT_ROOT / "docs" / "sample-report" / "index.html"


def test_sample_is_one_small_self_contained_file() -> None:
    page = SAMPLE_PAGE.read_text(encoding="utf-8")
    assert len(page.encode()) < 1_000_000
    assert re.findall(r"<(?:link|img|iframe)\b|\bsrc=|https?://", page) == []
    # The page has one script. Its security policy refuses every other script.
    assert page.count("<script") == 1
    assert "default-src 'none'" in page
    assert [path.name for path in SAMPLE_PAGE.parent.iterdir()] == ["index.html"]


def test_every_record_of_the_sample_exists() -> None:
    record_references = set(
        re.findall(r"<dt>record</dt><dd><code>([\w.-]+\.jsonl):(\d+)</code>", SAMPLE_PAGE.read_text())
    )
    assert len(record_references) > 50
    records_folder = PROJECT_ROOT / "reports" / "baselines" / "h200-1"
    line_counts = {path.name: len(path.read_text().splitlines()) for path in records_folder.glob("*.jsonl")}
    assert [name for name, line_number in record_references if int(line_number) > line_counts.get(name, 0)] == []


def test_sample_shows_the_host_if_its_facts_exist() -> None:
    has_facts = (PROJECT_ROOT / "reports" / "baselines" / "h200-1" / "facts.json").is_file()
    assert (">This host</h2>" in SAMPLE_PAGE.read_text()) == has_facts


def test_pictures_of_the_readme_are_small() -> None:
    picture_names = re.findall(r"!\[[^\]]+\]\((docs/pictures/[\w-]+\.png)\)", (PROJECT_ROOT / "README.md").read_text())
    pictures = [PROJECT_ROOT / name for name in picture_names]
    assert len(pictures) == 2
    assert {path.read_bytes()[:8] for path in pictures} == {b"\x89PNG\r\n\x1a\n"}
    assert max(path.stat().st_size for path in pictures) < 200_000
