"""Every item of the documents from which gdrkit began names existing code and cases, and is in docs/findings.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from meta.defects.document import DOCUMENT
from meta.items.document import ESCAPED_BAR
from meta.items.item import DOCUMENTS, Document, Item, State, find_problems, read_document

ROOT = Path(__file__).resolve().parents[2]
# The number of items of each document. It changes only if an item is added or removed on purpose.
ITEM_COUNTS = {"000": 37, "001": 86, "002": 49, "003": 35, "004": 75}

PYTHON_SOURCE = """
LIMIT = 1
class Cache:
    size: int = 0
    def lease(self): ...
def test_helper(): ...
"""
GUIDE_TEXT = "# Guide\n\n## Which NIC, and why?\n"
# The files of a small tree. The references of the items below point to its files.
TREE_FILES = {
    "gdrkit/cache.py": PYTHON_SOURCE,
    "native/cache.cpp": "// invalidate() is in cache.py.\nint lease_count() { return 0; }\n",
    "native/cache_test.cpp": "void test_lease() {}\nvoid test_unused() {}\nint main() { test_lease(); }\n",
    "suites/test_cache.py": "def test_lease():\n    ...\n",
    "docs/cache.md": GUIDE_TEXT,
}
VALID_ITEM = Item("a cache", State.DONE, ("gdrkit/cache.py::Cache",), ("suites/test_cache.py::test_lease",))
PARTLY_ITEM = replace(VALID_ITEM, state=State.PARTLY, note="no eviction")
DIFFERING_ITEM = replace(VALID_ITEM, state=State.DIFFERS, note="a list", guide="docs/cache.md")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.number))
def test_every_reference_of_a_document_exists(document: Document) -> None:
    assert not list(find_problems(ROOT, document)), f"change suites/meta/items/{document.number}.toml"
    assert len(document.items) == ITEM_COUNTS[document.number]


def test_every_document_has_a_list() -> None:
    assert [document.number for document in DOCUMENTS] == list(ITEM_COUNTS)


def test_findings_show_every_item() -> None:
    row_prefixes = tuple(f"| {document_number} |" for document_number in ITEM_COUNTS)
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(row_prefixes)]
    items = [(document.number, item) for document in DOCUMENTS for item in document.items]
    for row, (document_number, item) in zip(rows, items, strict=True):
        row_number, item_text, state, _code, _cases = row.removeprefix("| ").removesuffix(" |").split(" | ")
        assert (row_number, item_text.replace(ESCAPED_BAR, "|"), state.partition(":")[0]) == (
            document_number,
            item.text,
            item.state,
        )


def find_problems_in_small_tree(tmp_path: Path, *items: Item) -> list[str]:
    """Return the problems of a document with these items in a tree with the files of `TREE_FILES`."""
    for name, text in TREE_FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(find_problems(tmp_path, Document("009", "a document", items)))


VALID_ITEMS = [
    pytest.param(VALID_ITEM, id="class"),
    pytest.param(replace(VALID_ITEM, code=("gdrkit/cache.py::Cache.lease", "gdrkit/cache.py::LIMIT")), id="method"),
    pytest.param(replace(VALID_ITEM, code=("gdrkit/cache.py::Cache.size",)), id="attribute"),
    pytest.param(replace(VALID_ITEM, code=("native/cache.cpp::lease_count",)), id="C++"),
    pytest.param(replace(VALID_ITEM, code=("docs/cache.md::Guide",)), id="text"),
    pytest.param(replace(VALID_ITEM, cases=("native/cache_test.cpp::test_lease",)), id="C++ test"),
    pytest.param(replace(VALID_ITEM, cases=("native/cache_test.cpp::main",)), id="C++ program"),
    pytest.param(PARTLY_ITEM, id="partly"),
    pytest.param(DIFFERING_ITEM, id="differs"),
    pytest.param(replace(DIFFERING_ITEM, guide="docs/cache.md#which-nic-and-why"), id="heading"),
    pytest.param(Item("a NIC", State.NEEDS_HARDWARE, note="a NIC"), id="hardware"),
]


@pytest.mark.parametrize("item", VALID_ITEMS)
def test_item_with_existing_references_has_no_problem(tmp_path: Path, item: Item) -> None:
    assert find_problems_in_small_tree(tmp_path, item) == []


INVALID_ITEMS = [
    pytest.param(replace(VALID_ITEM, code=("gdrkit/gone.py::Cache",)), id="no file"),
    pytest.param(replace(VALID_ITEM, code=("gdrkit/cache.py",)), id="file without symbol"),
    pytest.param(replace(VALID_ITEM, code=("gdrkit/cache.py::lease",)), id="method without its class"),
    pytest.param(replace(VALID_ITEM, code=("gdrkit/cache.py::Cach",)), id="part of a name"),
    pytest.param(replace(VALID_ITEM, code=("native/cache.cpp::invalidate",)), id="name in a comment"),
    pytest.param(replace(VALID_ITEM, code=("native/cache.cpp::lease",)), id="part of a word"),
    pytest.param(replace(VALID_ITEM, cases=("suites/test_cache.py::test_gone",)), id="no case"),
    pytest.param(replace(VALID_ITEM, cases=("gdrkit/cache.py::test_helper",)), id="not a test file"),
    pytest.param(replace(VALID_ITEM, cases=("native/cache_test.cpp::test_unused",)), id="test that is never called"),
    pytest.param(replace(VALID_ITEM, cases=("native/cache.cpp::main",)), id="not a test program"),
    pytest.param(replace(VALID_ITEM, cases=()), id="done without a case"),
    pytest.param(replace(VALID_ITEM, code=()), id="done without code"),
    pytest.param(replace(PARTLY_ITEM, note=""), id="partly without a note"),
    pytest.param(replace(DIFFERING_ITEM, guide=""), id="differs without a guide"),
    pytest.param(replace(DIFFERING_ITEM, guide="docs/gone.md"), id="no guide"),
    pytest.param(replace(DIFFERING_ITEM, guide="docs/cache.md#which-nic"), id="no heading"),
    pytest.param(replace(VALID_ITEM, guide="docs/cache.md"), id="done with a guide"),
]


@pytest.mark.parametrize("item", INVALID_ITEMS)
def test_item_with_a_missing_reference_is_a_problem(tmp_path: Path, item: Item) -> None:
    (problem,) = find_problems_in_small_tree(tmp_path, item)
    assert problem.startswith("009 a cache: ")


def test_item_that_is_listed_twice_is_a_problem(tmp_path: Path) -> None:
    assert find_problems_in_small_tree(tmp_path, VALID_ITEM, PARTLY_ITEM) == ["009 a cache: the item is listed 2 times"]


@pytest.mark.parametrize("item_lines", ['state = "finished"', 'state = "done"\nevidence = "none"'])
def test_unknown_state_or_field_is_an_error(tmp_path: Path, item_lines: str) -> None:
    path = tmp_path / "009.toml"
    path.write_text(f'title = "a document"\n[[items]]\ntext = "a cache"\n{item_lines}\n')
    with pytest.raises((TypeError, ValueError)):
        read_document(path)
