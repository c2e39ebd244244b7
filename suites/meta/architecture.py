"""Generator of docs/architecture.md, whose picture shows the imports between the packages of gdrkit.

``python -m meta.architecture`` with suites/ on PYTHONPATH prints the document. test_architecture.py checks that the
committed document is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meta.checks import find_cross_package_imports
from meta.levels import IMPORT_LEVELS

__all__ = ["DOCUMENT", "render"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
# The picture omits packages below this level, because nearly all other packages use them.
LOWEST_DRAWN_LEVEL = 2

_HEAD = """\
# Architecture

The picture is made from the imports of the code, and `nox -s meta` fails if it is out of date. An arrow means
*imports*. A box is a level, and arrows only go down. The packages of levels 0 and 1 (errors, units, values and small
tools) are omitted, because nearly all others use them. An arrow is omitted if a longer path has the same start and end.

```mermaid
"""

_TAIL = """\
```

- **The APIs** (level 2) wrap one real library each, and do not import each other.
- **CUDA and Gaudi export** a `DmabufRange`, **verbs imports** one, and `registration` is the only package that imports
  both sides.
- **Native code** lies below single packages: `native/verbs` (posting work requests), `native/engine` (the copy engine),
  `native/storage` (chunks and checksums of the storage service) and `native/usrbio` (the hf3fs client library and the
  agent's loop). Each of them has a seam, the only file that imports it.
- **The twins** (`native/twins`) are shared libraries with the SONAMEs of the real ones, below all packages. No package
  can tell them from hardware except `launch`, which finds them, and `report.substrate`, which reports what was loaded.

[layout.md](layout.md) lists the folders, the levels and the seams.
"""


def render(root: Path = ROOT) -> str:
    """Return the text of docs/architecture.md for the tree at `root`."""
    level_by_package = {package: level for level, packages in enumerate(IMPORT_LEVELS) for package in packages}
    level_by_package = {package: level for package, level in level_by_package.items() if level >= LOWEST_DRAWN_LEVEL}
    # All modules of the command line are drawn as one box.
    box_names = {package: "cli" if package.startswith(("cli", "__main__")) else package for package in level_by_package}
    edges_between_boxes = {
        (box_names[package], box_names[imported_package])
        for _, package, imported_package in find_cross_package_imports(root)
        if package in level_by_package
        and imported_package in level_by_package
        and box_names[package] != box_names[imported_package]
    }
    lines = ["flowchart TD"]
    for level in reversed(range(LOWEST_DRAWN_LEVEL, len(IMPORT_LEVELS))):
        lines.append(f'  subgraph level{level}["level {level}"]')
        lines += [
            f"    {name}"
            for name in sorted(
                {box_names[package] for package in level_by_package if level_by_package[package] == level}
            )
        ]
        lines.append("  end")
    lines += [f"  {start} --> {end}" for start, end in sorted(_remove_shortcuts(edges_between_boxes))]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _remove_shortcuts(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges whose start and end are not also connected by a path of several edges."""
    successors: dict[str, set[str]] = {}
    for start, end in edges:
        successors.setdefault(start, set()).add(end)

    def has_path(start: str, end: str, omitted_edge: tuple[str, str]) -> bool:
        unvisited, visited = [start], {start}
        while unvisited:
            current = unvisited.pop()
            for successor in successors.get(current, ()):
                if (current, successor) == omitted_edge or successor in visited:
                    continue
                if successor == end:
                    return True
                visited.add(successor)
                unvisited.append(successor)
        return False

    return {edge for edge in edges if not has_path(*edge, omitted_edge=edge)}


if __name__ == "__main__":
    sys.stdout.write(render())
