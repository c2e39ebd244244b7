"""The build of the documentation site and of the pictures in the README, for the sessions `docs` and `sample`."""

from __future__ import annotations

import shutil
from pathlib import Path

from automation.builds import BROWSER_PROGRAMS, ensure_playwright
from automation.commands import ROOT, call, prepend_to_pythonpath, print_line
from automation.environments import ensure_environment
from automation.machine import find_interpreter

__all__ = ["DOCS_REQUIREMENTS", "build_site", "take_pictures"]

# Sphinx 9.1 needs Python 3.12, and the project supports 3.11; see docs/decisions/0013-documentation-site.md.
DOCS_REQUIREMENTS = ("sphinx==9.0.4", "myst-parser==5.2.0", "furo==2025.12.19")
_SITE_FOLDER = ROOT / "build" / "docs"


def build_site(run_bin: Path) -> int:
    """Build the site into build/docs/html with the Python in the folder `run_bin`, and return 0 or the exit code.

    Sphinx treats each warning as an error, for example a link to a page or heading that does not exist.
    """
    docs_bin = ensure_environment("docs", python=find_interpreter()[0], requirements=DOCS_REQUIREMENTS)
    # gdrkit is imported from the environment `run`, and Sphinx from `docs`. Both environments have the same Python.
    environ = prepend_to_pythonpath(next(docs_bin.parent.glob("lib/python*/site-packages")))
    python, pages_folder, html_folder = str(run_bin / "python"), _SITE_FOLDER / "pages", _SITE_FOLDER / "html"
    shutil.rmtree(html_folder, ignore_errors=True)
    sphinx_command = [python, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-j", "2"]
    sphinx_command += ["-d", str(_SITE_FOLDER / "cache")]
    sphinx_command += ["-c", str(ROOT / "automation" / "site"), str(pages_folder), str(html_folder)]
    code = call([python, "-m", "automation.site.stage", str(pages_folder)]) or call(sphinx_command, environ=environ)
    if code == 0:
        _finish_pages(html_folder)
        print_line(f"open {(html_folder / 'index.html').relative_to(ROOT)}")
    return code


def take_pictures(run_bin: Path, report_page: Path) -> int:
    """Take the pictures of the README from a report page, for docs/pictures. Return 0 or the exit code."""
    environ = ensure_playwright()
    browser_program = next(filter(None, map(shutil.which, BROWSER_PROGRAMS)))
    pictures_folder = ROOT / "docs" / "pictures"
    command = [str(run_bin / "python"), "-m", "automation.site.pictures"]
    command += [str(browser_program), str(report_page), str(pictures_folder)]
    return call(command, environ=environ)


def _finish_pages(html_folder: Path) -> None:
    """Make the README the first page, and let a browser show the linked files instead of saving them."""
    shutil.copyfile(html_folder / "README.html", html_folder / "index.html")
    for page in html_folder.rglob("*.html"):
        text = page.read_text()
        if ' download=""' in text:
            page.write_text(text.replace(' download=""', ""))
