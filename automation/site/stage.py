"""Staging of the site: ``python -m automation.site.stage FOLDER`` fills a folder from which Sphinx builds the site.

The folder mirrors the tree, so that the links of the documents stay valid. It has the documents, each file that a
document links to, and the pages that are made from the code.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from automation.site.examples import list_all_programs, map_names_to_programs
from automation.site.flowchart import draw, parse
from automation.site.reference import API_FOLDER, make_api_pages, make_commands_page, make_errors_page
from automation.site.snippets import EXAMPLES_FOLDER, ROOT, list_example_files, list_guides

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_external_links", "find_dead_links", "find_invalid_links", "main", "read_navigation", "stage"]

_START_DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "README.md")
# A flowchart in Mermaid's language.
_FLOWCHART = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_EXAMPLES_PAGE = "docs/examples/README.md"
# In the contents list of the site, the generated pages come first in this section of docs/README.md.
_REFERENCE_SECTION = "Reference"
_REFERENCE_PAGES = [f"{API_FOLDER}/README.md", "docs/reference/commands.md", "docs/reference/errors.md"]


def stage(folder: Path) -> int:
    """Fill `folder`, and return the number of its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {path.relative_to(ROOT).as_posix(): path.read_text() for path in _find_linked_documents()}
    pages = {name: _FLOWCHART.sub(_draw_picture, page_text) for name, page_text in pages.items()}
    pages |= _generate_pages()
    listed_documents = {name for names in read_navigation().values() for name in names}
    for name, page_text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_in_navigation = (
            name in listed_documents or name == "README.md" or name.startswith(("docs/reference/", "docs/examples/"))
        )
        # Sphinx warns about a page that is in no contents list, unless the page is marked as an orphan.
        path.write_text(page_text if is_in_navigation else f"---\norphan: true\n---\n{page_text}")
        for link_target in _find_link_targets(ROOT / name, page_text):
            if link_target.is_file() and link_target.suffix != ".md":
                copied_file = folder / link_target.relative_to(ROOT)
                copied_file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(link_target, copied_file)
    toctrees = [_make_toctree(caption, names) for caption, names in read_navigation().items()]
    start_page = folder / "README.md"
    start_page.write_text("\n".join([start_page.read_text(), *toctrees]))
    return len(pages)


def read_navigation() -> dict[str, list[str]]:
    """Return the pages in the contents list of the site by section: the links of docs/README.md, and the reference."""
    docs_readme = (ROOT / "docs" / "README.md").read_text()
    sections = re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", docs_readme, re.MULTILINE | re.DOTALL)
    links_by_section = {
        title: re.findall(r"^- \[[^\]]+\]\(([^)#]+\.md)\)", body, re.MULTILINE) for title, body in sections
    }
    pages_by_section = {
        title: [os.path.normpath(f"docs/{link}") for link in links] for title, links in links_by_section.items()
    }
    pages_by_section[_REFERENCE_SECTION][:0] = _REFERENCE_PAGES
    return pages_by_section


def check_external_links() -> list[str]:
    """Return a line for each external link of the documents that is not a valid address. No address is fetched."""
    return [
        f"{path.relative_to(ROOT)}: {link} is not a valid https address"
        for path in _find_linked_documents()
        for link in find_invalid_links(path.read_text())
    ]


def find_dead_links() -> list[str]:
    """Return a line for each link of the documents to a file that does not exist. The headings are left to Sphinx."""
    return [
        f"{path.relative_to(ROOT)}: {link}"
        for path in _find_linked_documents()
        for link in _LINK.findall(_remove_code(path.read_text()))
        if not urlsplit(link).scheme and not (path.parent / link.partition("#")[0]).exists()
    ]


def find_invalid_links(text: str) -> Iterator[str]:
    """Yield the external links of a document that are not an https address of a named host."""
    for link in _LINK.findall(_remove_code(text)):
        address = urlsplit(link)
        if (address.scheme or address.netloc) and (address.scheme != "https" or "." not in address.netloc):
            yield link


def _draw_picture(flowchart: re.Match[str]) -> str:
    return f"<div>{draw(parse(flowchart[1]))}</div>"


def _make_toctree(caption: str, names: list[str]) -> str:
    entries = "\n".join(name.removesuffix(".md") for name in names)
    return f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _find_linked_documents() -> list[Path]:
    """Return the start documents, the guides, and the documents that they link to, directly or indirectly."""
    linked_documents: dict[Path, None] = {}
    unread_documents = [*_START_DOCUMENTS, *list_guides()]
    while unread_documents:
        path = unread_documents.pop(0)
        if path not in linked_documents:
            linked_documents[path] = None
            unread_documents += [
                link_target for link_target in _find_link_targets(path, path.read_text()) if link_target.suffix == ".md"
            ]
    return [path for path in linked_documents if path.is_file()]


def _find_link_targets(path: Path, text: str) -> Iterator[Path]:
    """Yield the files of this tree that a document links to."""
    for link in _LINK.findall(_remove_code(text)):
        link_target = Path(os.path.normpath(path.parent / link.partition("#")[0]))
        if not urlsplit(link).scheme and link_target.is_relative_to(ROOT) and link_target.is_file():
            yield link_target


def _remove_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def _generate_pages() -> dict[str, str]:
    pages = {f"docs/reference/{name}.md": text for name, text in _make_reference_pages().items()}
    pages |= make_api_pages(_group_examples_by_name())
    for path in list_example_files():
        pages[f"docs/examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
    pages[_EXAMPLES_PAGE] = _make_examples_page()
    return pages


def _make_reference_pages() -> dict[str, str]:
    return {"commands": make_commands_page(), "errors": make_errors_page()}


def _make_examples_page() -> str:
    """Return the list of the examples, with the first sentence of each docstring."""
    rows = []
    for path in list_example_files():
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        rows.append(f"| [{path.name}]({path.stem}.md) | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    table = "\n".join(["| program | contents |", "|---|---|", *rows])
    entries = "\n".join(path.stem for path in list_example_files())
    introduction = (EXAMPLES_FOLDER / "README.md").read_text()
    return f"{introduction}\n{table}\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def _group_examples_by_name() -> dict[str, list[str]]:
    """Return, for the full name of a public object, links from its page to the programs that show it."""
    return {
        name: [f"[{Path(path).name}]({_link_to_program(path)})" for path in paths]
        for name, paths in map_names_to_programs(list_all_programs()).items()
    }


def _link_to_program(path: str) -> str:
    page = f"{path.removesuffix('.py')}.md" if path.endswith(".py") else path
    return os.path.relpath(page, API_FOLDER)


def main() -> None:
    """Fill the folder that the command line names, and end with 1 if an external link is invalid."""
    (folder,) = map(Path, sys.argv[1:])
    problems = check_external_links()
    sys.stderr.writelines(f"{line}\n" for line in problems)
    sys.stdout.write(f"{stage(folder)} pages\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
