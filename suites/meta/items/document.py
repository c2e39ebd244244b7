"""Generator of the tables in docs/findings.md about the items of the five documents from which gdrkit began."""

from __future__ import annotations

import posixpath
from collections import Counter
from typing import TYPE_CHECKING

from meta.items.item import DOCUMENTS, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meta.items.item import Item

__all__ = ["ESCAPED_BAR", "render"]

# An escaped vertical bar, which does not end a cell of a Markdown table.
ESCAPED_BAR = "\\|"

_HEAD = """## The items of the five documents

Five documents asked for this project, or described earlier code for it. These tables have every requirement, function,
file, test, number, hint about troubleshooting and plan for the future of each document, in the order of the document.

| state | meaning |
|---|---|
| `done` | gdrkit has it, and a case checks it |
| `differs` | the vendor's headers contradict it, or gdrkit does it in another way; the linked document explains why |
| `partly` | the row says what is missing |
| `needs hardware` | the row names the hardware on which the case must run |

The path of a case is relative to `suites/`, unless it begins with `native/` or `hardware/`. The tables are made from
`suites/meta/items/*.toml`. `nox -s meta` fails if a file, a symbol or a case that a row names does not exist.
"""


def render() -> str:
    """Return the section of docs/findings.md."""
    lines = [_HEAD, *_make_summary(), ""]
    for document in DOCUMENTS:
        lines += [
            f"### {document.number}: {document.title}\n",
            "| document | item | state | code | case |",
            "|---|---|---|---|---|",
        ]
        for item in document.items:
            cells = (
                document.number,
                item.text,
                _format_state(item),
                _format_references(item.code),
                _format_references(item.cases),
            )
            lines.append(f"| {' | '.join(cell.replace('|', ESCAPED_BAR) for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _make_summary() -> Iterator[str]:
    """Yield the lines of a table with the number of items of each document in each state."""
    yield f"| number and title | items | {' | '.join(State)} |"
    yield "|---" * (2 + len(State)) + "|"
    totals = Counter[State]()
    for document in DOCUMENTS:
        counts = Counter(item.state for item in document.items)
        totals += counts
        yield _format_count_row(f"{document.number}: {document.title}", counts)
    yield _format_count_row("all", totals)


def _format_count_row(title: str, counts: Counter[State]) -> str:
    item_counts = [counts.total(), *(counts[state] for state in State)]
    return f"| {title} | {' | '.join(map(str, item_counts))} |"


def _format_state(item: Item) -> str:
    link = f" ([{posixpath.basename(item.guide).partition('#')[0]}]({_make_link(item.guide)}))" if item.guide else ""
    return f"{item.state}: {item.note}{link}" if item.note else str(item.state)


def _make_link(path: str) -> str:
    """Return the link from a file in docs/ to a file of the project."""
    return posixpath.relpath(path, "docs")


def _format_references(references: Iterable[str]) -> str:
    return ", ".join(f"`{reference.removeprefix('suites/')}`" for reference in references) or "none"
