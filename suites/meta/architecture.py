"""Generator of docs/architecture.md from the imports of the code.

``python -m meta.architecture`` with suites/ on the path prints the document. test_architecture.py compares it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meta.checks import crossings
from meta.levels import LEVELS

__all__ = ["DOCUMENT", "render"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
LOWEST_DRAWN_LEVEL = 2

_HEAD = """\
# Architecture

The picture is made from the imports of the code; `nox -s meta` fails if it is out of date. An arrow means *imports*.
A box is a level, and arrows only go down. The packages of levels 0 and 1 (errors, units, values and small tools) are
used by nearly all others and are left out. An arrow is left out, too, if a longer path has the same start and end.

```mermaid
"""

_TAIL = """\
```

- **The APIs** (level 2) wrap one real library each, and do not know each other.
- **CUDA and Gaudi export** a `DmabufRange`, **verbs imports** one, and `registration` is the only package that knows
  both.
- **Native code** lies below single packages: `native/verbs` (posting work requests), `native/engine` (the copy engine),
  `native/storage` (chunks and checksums of the storage service) and `native/usrbio` (the hf3fs client library and the
  agent's loop). Each is imported by one seam.
- **The twins** (`native/twins`) are below everything: shared libraries with the SONAMEs of the real ones. No package
  knows whether it runs on them, except `launch`, which finds them, and `report.substrate`, which says what was loaded.

[layout.md](layout.md) lists the folders, the levels and the seams.
"""


def render(root: Path = ROOT) -> str:
    """Return the text of docs/architecture.md for the tree at `root`."""
    drawn = {package: level for level, packages in enumerate(LEVELS) for package in packages}
    drawn = {package: level for package, level in drawn.items() if level >= LOWEST_DRAWN_LEVEL}
    # The command line is drawn as one box, whatever the number of its modules.
    names = {package: "cli" if package.startswith(("cli", "__main__")) else package for package in drawn}
    edges = {
        (names[package], names[other])
        for _, package, other in crossings(root)
        if package in drawn and other in drawn and names[package] != names[other]
    }
    lines = ["flowchart TD"]
    for level in reversed(range(LOWEST_DRAWN_LEVEL, len(LEVELS))):
        lines.append(f'  subgraph level{level}["level {level}"]')
        lines += [f"    {name}" for name in sorted({names[it] for it in drawn if drawn[it] == level})]
        lines.append("  end")
    lines += [f"  {start} --> {end}" for start, end in sorted(_without_shortcuts(edges))]
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _without_shortcuts(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the edges for which no longer path connects the same two names."""
    after: dict[str, set[str]] = {}
    for start, end in edges:
        after.setdefault(start, set()).add(end)

    def reaches(start: str, end: str, banned: tuple[str, str]) -> bool:
        unseen, seen = [start], {start}
        while unseen:
            here = unseen.pop()
            for each in after.get(here, ()):
                if (here, each) == banned or each in seen:
                    continue
                if each == end:
                    return True
                seen.add(each)
                unseen.append(each)
        return False

    return {edge for edge in edges if not reaches(*edge, banned=edge)}


if __name__ == "__main__":
    sys.stdout.write(render())
