"""The build of the documentation site and of the pictures in the README, for the sessions `docs` and `sample`."""

from __future__ import annotations

import shutil
from pathlib import Path

from automation.builds import BROWSERS, ensure_playwright
from automation.commands import ROOT, call, prepend_to_pythonpath, print_line
from automation.environments import ensure_environment
from automation.machine import find_interpreter

__all__ = ["DOCS_REQUIREMENTS", "build_site", "take_pictures"]

# Sphinx 9.1 needs Python 3.12, and the project supports 3.11; see docs/decisions/0013-documentation-site.md.
DOCS_REQUIREMENTS = ("sphinx==9.0.4", "myst-parser==5.2.0", "furo==2025.12.19")
_SITE = ROOT / "build" / "docs"


def build_site(run_bin: Path) -> int:
    """Build the site into build/docs/html with the Python in the folder `run_bin`, and return 0 or the exit code.

    A warning, such as a link to a page or heading that does not exist, is an error.
    """
    docs_bin = ensure_environment("docs", python=find_interpreter()[0], requirements=DOCS_REQUIREMENTS)
    # gdrkit is imported from the environment `run`, and Sphinx from `docs`. Both environments have the same Python.
    environ = prepend_to_pythonpath(next(docs_bin.parent.glob("lib/python*/site-packages")))
    python, pages, html_folder = str(run_bin / "python"), _SITE / "pages", _SITE / "html"
    shutil.rmtree(html_folder, ignore_errors=True)
    sphinx = [python, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "2", "-d", str(_SITE / "cache")]
    sphinx += ["-c", str(ROOT / "automation" / "site"), str(pages), str(html_folder)]
    code = call([python, "-m", "automation.site.stage", str(pages)]) or call(sphinx, environ=environ)
    if code == 0:
        _finish_pages(html_folder)
        print_line(f"open {(html_folder / 'index.html').relative_to(ROOT)}")
    return code


def take_pictures(run_bin: Path, page: Path) -> int:
    """Write the pictures of the README from a report page into docs/pictures, and return 0 or the exit code."""
    environ = ensure_playwright()
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    pictures = ROOT / "docs" / "pictures"
    command = [str(run_bin / "python"), "-m", "automation.site.pictures", str(browser), str(page), str(pictures)]
    return call(command, environ=environ)


def _finish_pages(html_folder: Path) -> None:
    """Make the README the first page, and let a browser show the linked files instead of saving them."""
    shutil.copyfile(html_folder / "README.html", html_folder / "index.html")
    for page in html_folder.rglob("*.html"):
        text = page.read_text()
        if ' download=""' in text:
            page.write_text(text.replace(' download=""', ""))
