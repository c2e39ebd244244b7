"""Functions that find the code blocks in the documents, the example programs, and the names of gdrkit that they use."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "EXAMPLES_FOLDER",
    "GUIDES_OUTSIDE_DOCS",
    "ROOT",
    "Snippet",
    "find_snippets",
    "find_used_names",
    "list_example_files",
    "list_guides",
]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES_FOLDER = ROOT / "docs" / "examples"
# The guides are these documents and all documents in docs/ except findings.md, which `nox -s review` writes.
GUIDES_OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md")
_FENCE = re.compile(r"^```(?P<language>\w*)$")


@dataclass(frozen=True)
class Snippet:
    """A block of code in a document.

    Attributes
    ----------
    document : str
        Path of the document, relative to the root of the tree.
    line_number : int
        Number of the first line of the block, from 1.
    language : str
        The language that the block names; empty for an indented block.
    text : str
        The code, without indentation.
    """

    document: str
    line_number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line_number}: {self.text.splitlines()[0]}"


def list_guides() -> list[Path]:
    """Return the documents whose code the cases of suites/meta check."""
    documents = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "findings.md"]
    return [*(ROOT / name for name in GUIDES_OUTSIDE_DOCS), *documents]


def list_example_files() -> list[Path]:
    """Return the programs in docs/examples."""
    return sorted(EXAMPLES_FOLDER.glob("*.py"))


def find_snippets(path: Path) -> Iterator[Snippet]:
    """Yield the blocks of code in a document: fenced blocks, and blocks that are indented by four spaces."""
    document = path.relative_to(ROOT).as_posix()
    lines = path.read_text().splitlines()
    line_index = 0
    while line_index < len(lines):
        start_index, fence = line_index, _FENCE.match(lines[line_index])
        line_index += 1
        if fence:
            end_index = lines.index("```", line_index)
            yield Snippet(document, start_index + 2, fence["language"], "\n".join(lines[line_index:end_index]) + "\n")
            line_index = end_index + 1
        elif lines[start_index].startswith("    ") and start_index > 0 and not lines[start_index - 1].strip():
            while line_index < len(lines) and (lines[line_index].startswith("    ") or not lines[line_index].strip()):
                line_index += 1
            block = "\n".join(line.removeprefix("    ") for line in lines[start_index:line_index]).strip("\n")
            yield Snippet(document, start_index + 1, "", block + "\n")


def find_used_names(source: str) -> set[str]:
    """Return the full names that a program imports from gdrkit and uses: ``gdrkit.cuda.Device``."""
    tree = ast.parse(source)
    full_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gdrkit":
            full_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            full_names |= {alias.name.partition(".")[0]: "gdrkit" for alias in node.names if "gdrkit" in alias.name}
    used_names = set()
    for node in ast.walk(tree):
        name_parts = _make_dotted_name(node)
        if name_parts and name_parts[0] in full_names:
            used_names.add(".".join([full_names[name_parts[0]], *name_parts[1:]]))
    return used_names


def _make_dotted_name(node: ast.AST) -> list[str]:
    """Return the parts of a dotted name, or an empty list for any other expression."""
    if isinstance(node, ast.Attribute):
        name_parts = _make_dotted_name(node.value)
        return [*name_parts, node.attr] if name_parts else []
    return [node.id] if isinstance(node, ast.Name) else []
