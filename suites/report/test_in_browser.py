"""The report pages are checked in headless Chromium: overflow, console errors, accessibility, keyboard and print.

`nox -s pages` provides the browser, Playwright and axe-core, a script that finds accessibility violations. The
environment variable GDRKIT_AXE is the path of this script, and GDRKIT_PICTURES the folder for screenshots of the pages.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.hosts import make_host_facts, make_host_records, write_run

from gdrkit.harness.needs import host, needs
from gdrkit.install_paths import install_paths
from gdrkit.report import RunFolder, RunState
from gdrkit.report.fleet import render_fleet
from gdrkit.report.render import render
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [needs(host.variable("GDRKIT_AXE")), pytest.mark.timeout(600)]

WIDTHS_PX = (1280, 390)
BROWSER_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SAMPLE_REPORT = install_paths().root / "docs" / "sample-report" / "index.html"
# Largest height of the page of a large run with all folders of cases folded, in CSS pixels at a width of 1280.
HEIGHT_MAX_PX = 6000
# The fields of a run that lead to each state of a host.
RUN_FIELDS_BY_STATE: dict[RunState, dict[str, Any]] = {
    RunState.QUALIFIED: {},
    RunState.SOFTWARE_ONLY: {"software_asked": True, "substrate": {"verbs": "twin", "cuda": "twin"}},
    RunState.PARTIAL: {"selection": "-k write"},
    RunState.INTERRUPTED: {"is_interrupted": True},
    RunState.FAILED: {"exit_code": 1, "causes": ("GPU 1 <- NIC mlx5_0 by dmabuf: registered by a copy",)},
    RunState.WRONG_USAGE: {"exit_code": 2},
    RunState.SETUP_MISSING: {
        "exit_code": 3,
        "causes": ("loader: dlopen libcuda.so.1() failed: No such file or directory (ENOENT)",),
        "to_do": ("install the NVIDIA driver",),
    },
    RunState.NOTHING_PROVEN: {"exit_code": 4},
}
# JavaScript that returns a line for each of the first five elements that extend beyond the window. Elements in hidden
# or scrollable parts are left out.
OVERFLOW_SCRIPT = """
() => [...document.querySelectorAll('body *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || element.closest('.scroll, .hidden, .skip, thead') || element.closest('pre')) return false;
  return box.right > innerWidth + 1 || box.left < -1;
}).slice(0, 5).map(element =>
  element.tagName + '.' + element.getAttribute('class') + ': ' + element.textContent.trim().slice(0, 60))
"""
# JavaScript that runs axe-core, and returns a line for each violation with the elements that have it.
AXE_SCRIPT = """
() => axe.run(document, {resultTypes: ['violations']}).then(result => result.violations.map(violation =>
  violation.id + ': ' + violation.help + ': ' +
  violation.nodes.slice(0, 3).map(node => node.target.join(' ')).join(' | ')))
"""


@pytest.fixture
def browser() -> Iterator[Browser]:
    # Only the environment of `nox -s pages` has Playwright.
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSER_PROGRAMS)))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield chromium
        chromium.close()


def open_page(browser: Browser, path: Path, *, width_px: int, is_dark: bool = False) -> tuple[Page, list[str]]:
    """Open a file in a new window, and return the page and the list of its console messages and exceptions."""
    # Without bypass_csp, the Content-Security-Policy of the page would block the script of axe-core.
    page = browser.new_page(
        viewport={"width": width_px, "height": 900}, color_scheme="dark" if is_dark else "light", bypass_csp=True
    )
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(path.as_uri())
    return page, messages


def find_overflow(page: Page) -> list[str]:
    """Return a line if the page is wider than the window, and a line for each element that extends beyond it."""
    overflow_px = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    element_lines = [str(line) for line in page.evaluate(OVERFLOW_SCRIPT)]
    return [f"the page is {overflow_px} pixels too wide", *element_lines] if overflow_px > 0 else element_lines


def find_violations(page: Page) -> list[str]:
    """Return a line for each accessibility violation that axe-core finds in the page."""
    page.add_script_tag(path=os.environ["GDRKIT_AXE"])
    return [str(violation) for violation in page.evaluate(AXE_SCRIPT)]


def make_page(page_name: str, output_folder: Path) -> Path:
    """Create the page `page_name` (bare, one_route, 64_routes, fleet or sample), and return its path."""
    if page_name == "sample":
        return SAMPLE_REPORT
    if page_name == "fleet":
        return make_fleet_page(output_folder)
    device_count = {"bare": 0, "one_route": 1}.get(page_name, 8)
    facts = make_host_facts(gpu_count=device_count, nic_count=device_count)
    # A host without devices has only the record of the case that did not run.
    records = [record for record in make_host_records(facts) if device_count or record.verdict is Verdict.NOT_RUN]
    run_path = write_run(output_folder / "run", facts, records)
    if page_name == "bare":
        bare_run_fields = {"exit_code": 4, "verdict": "Nothing was proven on hardware", "substrate": {}}
        RunFolder(run_path).write_run(dataclasses.replace(RunFolder(run_path).read_run(), **bare_run_fields))  # type: ignore[arg-type]
    return render(run_path).index


def make_fleet_page(output_folder: Path) -> Path:
    """Create the page of a fleet with one host in each state. One host is slower, and one has fewer NICs."""
    for host_index, (state, run_fields) in enumerate(RUN_FIELDS_BY_STATE.items()):
        facts = make_host_facts(gpu_count=2, nic_count=1 if host_index == 3 else 2)
        rate_factor = 0.8 if state is RunState.PARTIAL else 1.0
        run_path = write_run(
            output_folder / f"run{host_index}",
            facts,
            list(make_host_records(facts, rate_factor=rate_factor)),
            host=f"node{host_index}",
        )
        run = RunFolder(run_path).read_run()
        run = dataclasses.replace(run, exit_code=0, verdict=f"A run with the state {state.value!r}")
        RunFolder(run_path).write_run(dataclasses.replace(run, **run_fields))
        render(run_path)
    fleet = render_fleet(output_folder)
    assert {host.state for host in fleet.hosts} == {state.value for state in RunState}
    return Path(fleet.index)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width_px", WIDTHS_PX)
@pytest.mark.parametrize("page_name", ["bare", "one_route", "64_routes", "fleet", "sample"])
def test_page_fits_and_axe_finds_nothing(
    browser: Browser, tmp_path: Path, page_name: str, width_px: int, scheme: str
) -> None:
    page, messages = open_page(browser, make_page(page_name, tmp_path), width_px=width_px, is_dark=scheme == "dark")
    picture_folder = Path(os.environ.get("GDRKIT_PICTURES", tmp_path))
    page.screenshot(path=picture_folder / f"{page_name}-{width_px}-{scheme}.png", full_page=True)
    assert messages == []
    assert find_overflow(page) == []
    assert find_violations(page) == []
    background_color = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert background_color == {"light": "rgb(252, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]


def test_page_of_a_thousand_cases_is_short_and_searchable(browser: Browser) -> None:
    page, messages = open_page(browser, SAMPLE_REPORT, width_px=1280)
    # Each table row with an id is a case.
    assert page.locator("tr[id]").count() >= 844
    assert page.evaluate("document.documentElement.scrollHeight") < HEIGHT_MAX_PX
    page.fill("#search", "copy device")
    visible_rows = page.locator("tr[id]:visible")
    assert page.inner_text("#found") == f"{visible_rows.count()} cases"
    assert 0 < visible_rows.count() < page.locator("tr[id]").count()
    page.fill("#search", "")
    page.select_option("#verdict", "not_run")
    assert page.locator("tr[id]:visible .state.not_run").count() == page.locator("tr[id]:visible").count() > 0
    assert messages == []


def test_link_to_a_case_unfolds_its_folder(browser: Browser) -> None:
    page, _ = open_page(browser, SAMPLE_REPORT, width_px=1280)
    # r5 is the id of the row of the record with index 5. The row is hidden, because its folder of cases is folded.
    assert not page.locator("#r5").is_visible()
    page.evaluate("location.hash = 'r5'")
    page.wait_for_selector("#r5", state="visible")


def test_page_without_scripts_can_be_unfolded(browser: Browser) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(SAMPLE_REPORT.as_uri())
    assert not page.locator(".search").is_visible()
    page.locator("details.suite > summary").first.click()
    assert page.locator("details.suite").first.locator("tr[id]").first.is_visible()


def test_browser_runs_no_script_that_a_record_brings(browser: Browser, tmp_path: Path) -> None:
    sample_html = SAMPLE_REPORT.read_text()
    page_with_script = tmp_path / "injected.html"
    page_with_script.write_text(sample_html.replace("<main", "<script>document.title = 'owned'</script><main", 1))
    page = browser.new_page()
    page.goto(page_with_script.as_uri())
    assert page.title() != "owned"
    assert page.locator(".search").is_visible()  # The script of the page itself has run: it shows the search.


def test_checks_notice_overflow_exceptions_and_missing_text(browser: Browser, tmp_path: Path) -> None:
    # The page has a wide element, a script that raises an exception, no language, and an image without a text.
    invalid_html = (
        "<!doctype html><title>x</title><img src=data:,><div style='width:2000px'>wide</div><script>fail()</script>"
    )
    (tmp_path / "bad.html").write_text(invalid_html)
    page, messages = open_page(browser, tmp_path / "bad.html", width_px=390)
    assert any("fail is not defined" in line for line in messages)
    assert find_overflow(page)
    assert {"image-alt", "html-has-lang"} <= {line.partition(":")[0] for line in find_violations(page)}


def test_keyboard_reaches_the_report_and_its_links(browser: Browser, tmp_path: Path) -> None:
    page, _ = open_page(browser, make_page("one_route", tmp_path), width_px=1280)
    # The Tab key moves the focus through six elements.
    focused_texts = []
    for _ in range(6):
        page.keyboard.press("Tab")
        focused_texts.append(page.evaluate("document.activeElement.textContent.trim()"))
    assert focused_texts[0] == "Skip to the report"
    assert focused_texts[1] == "10 passed"
    assert len(set(focused_texts)) == 6
    # The focused element has an outline.
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_printed_report_has_all_sections_and_whole_tables(browser: Browser, tmp_path: Path) -> None:
    page, _ = open_page(browser, make_page("64_routes", tmp_path), width_px=794)  # An A4 page is 794 CSS pixels wide.
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    assert page.evaluate("getComputedStyle(document.querySelector('.skip')).display") == "none"
    assert find_overflow(page) == []
    page_count = len(re.findall(rb"/Type /Page\b", page.pdf()))
    assert page_count > 3
