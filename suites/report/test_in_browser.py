"""The page in headless Chromium: no overflow, no complaint, nothing that axe-core finds; `nox -s pages` has the tools.

Each page is kept as a picture in the folder GDRKIT_PICTURES, for whoever looks at it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.browser import Browser
from support.hosts import host_facts, host_records, write_run

from gdrkit.harness.needs import host, needs
from gdrkit.install_paths import install_paths
from gdrkit.report.fleet import render_fleet
from gdrkit.report.render import render

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [needs(host.variable("GDRKIT_AXE")), pytest.mark.timeout(600)]

WIDTHS = (1280, 390)
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SAMPLE = install_paths().root / "docs" / "sample-report" / "index.html"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, PROGRAMS)))
    with Browser(program, tmp_path / "profile") as found:
        yield found


def made(name: str, folder: Path) -> Path:
    """The page of this name."""
    if name == "sample":
        return SAMPLE
    if name == "fleet":
        for number in range(12):
            facts = host_facts(gpus=2, nics=1 + number % 2)
            slow = 0.8 if number == 7 else 1.0
            render(
                write_run(folder / f"run{number}", facts, list(host_records(facts, factor=slow)), host=f"node{number}")
            )
        return Path(render_fleet(folder).index)
    count = 1 if name == "one_route" else 8
    facts = host_facts(gpus=count, nics=count)
    return render(write_run(folder / "run", facts, list(host_records(facts)))).index


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one_route", "64_routes", "fleet", "sample"])
def test_the_page_fits_complains_of_nothing_and_axe_finds_nothing(
    browser: Browser, tmp_path: Path, name: str, width: int, scheme: str
) -> None:
    page = browser.page(width=width, is_dark=scheme == "dark")
    page.open(made(name, tmp_path))
    pictures = Path(os.environ.get("GDRKIT_PICTURES", tmp_path))
    page.picture(pictures / f"{name}-{width}-{scheme}.png")
    assert page.complaints() == []
    assert page.overflow() == []
    assert page.violations(Path(os.environ["GDRKIT_AXE"])) == []
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert background == {"light": "rgb(252, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]


def test_the_check_itself_notices_overflow_complaints_and_missing_words(browser: Browser, tmp_path: Path) -> None:
    bad = "<!doctype html><title>x</title><img src=data:,><div style='width:2000px'>wide</div><script>fail()</script>"
    (tmp_path / "bad.html").write_text(bad)
    page = browser.page(width=390, is_dark=False)
    page.open(tmp_path / "bad.html")
    assert any("fail is not defined" in line for line in page.complaints())
    assert page.overflow()
    assert {"image-alt", "html-has-lang"} <= {
        it.partition(":")[0] for it in page.violations(Path(os.environ["GDRKIT_AXE"]))
    }


def test_with_the_keyboard_alone_one_gets_into_the_report_and_along_its_links(browser: Browser, tmp_path: Path) -> None:
    page = browser.page(width=1280, is_dark=False)
    page.open(made("one_route", tmp_path))
    seen = []
    for _ in range(6):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert seen[0] == "Skip to the report"
    assert seen[1] == "10 passed"
    assert len(set(seen)) == 6
    # Whoever is somewhere by the keyboard sees where.
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_printed_it_has_all_its_sections_and_no_cut_off_table(browser: Browser, tmp_path: Path) -> None:
    page = browser.page(width=794, is_dark=False)
    page.open(made("64_routes", tmp_path))
    page.emulate_print()
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert page.evaluate("getComputedStyle(document.querySelector('.skip')).display") == "none"
    assert page.overflow() == []
    assert page.printed_pages() > 3
