"""Pictures of a report page for the README: ``python -m automation.site.pictures BROWSER PAGE FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

__all__ = ["main"]

_WIDTH_PX, _HEIGHT_PX = 1180, 760


def main() -> None:
    """Write report.png, the first screen of the page, and topology.png, the section with the topology."""
    browser_program, page_path, folder = sys.argv[1:]
    with sync_playwright() as playwright:
        # Chromium does not start as root with its sandbox.
        browser = playwright.chromium.launch(executable_path=browser_program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH_PX, "height": _HEIGHT_PX}, color_scheme="light")
        page.goto(Path(page_path).resolve().as_uri())
        page.screenshot(path=f"{folder}/report.png")
        page.locator("section[aria-labelledby=topology]").screenshot(path=f"{folder}/topology.png")
        browser.close()


if __name__ == "__main__":
    main()
