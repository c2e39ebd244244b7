"""Requirements and claims of the five documents from which gdrkit began, with the code and cases of gdrkit for each.

One TOML file in this folder describes one document. :func:`find_problems` finds references that no longer exist.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DOCUMENTS", "Document", "Item", "State", "find_problems", "read_document"]


class State(StrEnum):
    """The state of an item. The TOML files and docs/findings.md contain these values."""

    DONE = "done"
    # The real headers contradict the item, or gdrkit has something else in its place. `Item.guide` has the explanation.
    DIFFERS = "differs"
    PARTLY = "partly"
    NEEDS_HARDWARE = "needs hardware"


@dataclass(frozen=True, slots=True)
class Item:
    """A requirement, function, file, test, number or claim of a document.

    Attributes
    ----------
    text : str
        The item in a few words.
    state : State
        State of the item in gdrkit.
    code : tuple of str
        References ``PATH::SYMBOL`` to the code, from the root of the project.
    cases : tuple of str
        References ``PATH::NAME`` to test functions, in Python or C++.
    note : str
        Explanation of the state: the difference, the missing part, or the needed hardware. Empty only if the item is
        done.
    guide : str
        The Markdown file of the project, with an optional ``#heading``, that explains a difference. Else empty.
    """

    text: str
    state: State
    code: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    note: str = ""
    guide: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A document: its number, a short title, and its items in the order of the document."""

    number: str
    title: str
    items: tuple[Item, ...]


def _parse_item(fields: dict[str, Any]) -> Item:
    references = {name: tuple(fields.get(name, ())) for name in ("code", "cases")}
    return Item(**(fields | references | {"state": State(fields["state"])}))


def read_document(path: Path) -> Document:
    """Return the document that a TOML file describes. An unknown field or state is an error."""
    table = tomllib.loads(path.read_text())
    return Document(path.stem, table["title"], tuple(_parse_item(fields) for fields in table["items"]))


DOCUMENTS = tuple(read_document(path) for path in sorted(Path(__file__).parent.glob("*.toml")))


def find_problems(root: Path, document: Document) -> Iterator[str]:
    """Yield one line for each problem: a repeated item, a missing note, guide or reference, or a dead reference.

    The paths of references begin at `root`.
    """
    for text, count in Counter(item.text for item in document.items).items():
        if count > 1:
            yield f"{document.number} {text}: the item is listed {count} times"
    for item in document.items:
        yield from (f"{document.number} {item.text}: {problem}" for problem in _find_problems_of_item(root, item))


def _find_problems_of_item(root: Path, item: Item) -> Iterator[str]:
    if item.state is not State.DONE and not item.note:
        yield f"the state is '{item.state}', and no note says why"
    if item.state is State.DONE and not (item.code and item.cases):
        yield "the item is done, so it needs a reference to code and one to a case"
    if (item.state is State.DIFFERS) != bool(item.guide):
        yield f"the state is '{item.state}', and the guide is '{item.guide}': an item has a guide only if it 'differs'"
    if item.guide and not _guide_exists(root, item.guide):
        yield f"the guide {item.guide} does not exist"
    for reference in item.code:
        if not _symbol_exists(root, reference):
            yield f"{reference} does not exist"
    for reference in item.cases:
        if not _case_exists(root, reference):
            yield f"{reference} is not a case"


def _guide_exists(root: Path, guide: str) -> bool:
    file, _, anchor = guide.partition("#")
    path = root / file
    if not path.is_file():
        return False
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    # GitHub makes the anchor from the heading: lower case, hyphens for blanks, no punctuation.
    return not anchor or anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _symbol_exists(root: Path, reference: str) -> bool:
    """Return whether a file has a symbol.

    The symbol is a definition in Python, a word outside of comments in C and C++, and any word in other files.
    """
    file, _, symbol = reference.partition("::")
    path = root / file
    if not symbol or not path.is_file():
        return False
    source_text = path.read_text()
    if path.suffix in {".py", ".pyi"}:
        return symbol in set(_find_definitions(ast.parse(source_text)))
    if path.suffix in {".c", ".cpp", ".h", ".hpp"}:
        source_text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source_text, flags=re.DOTALL)
    return re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", source_text) is not None


def _find_definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Yield the names that a module or class defines. A name in a class has the form ``Class.name``."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from _find_definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def _case_exists(root: Path, reference: str) -> bool:
    """Return whether a reference ``PATH::NAME`` names a test function that pytest or a C++ test program runs.

    A C++ test program runs a function if the file has its name a second time. ``main`` is the case of a C++ test
    program that is a single test.
    """
    file, _, case_name = reference.partition("::")
    path = root / file
    if not path.is_file():
        return False
    if case_name == "main":
        return path.name.endswith("_test.cpp") and _symbol_exists(root, reference)
    if not case_name.startswith("test_"):
        return False
    if path.suffix == ".py":
        return path.name.startswith("test_") and _symbol_exists(root, reference)
    source_text = re.sub(r"//[^\n]*", "", path.read_text())
    is_defined = re.search(rf"^(?:static )?void {re.escape(case_name)}\(", source_text, re.MULTILINE) is not None
    return is_defined and len(re.findall(rf"\b{re.escape(case_name)}\b", source_text)) > 1
