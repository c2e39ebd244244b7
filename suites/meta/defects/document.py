"""Generator of docs/findings.md from the table of the review."""

from __future__ import annotations

from pathlib import Path

from meta.defects.table import DEFECTS, FINDINGS

__all__ = ["DOCUMENT", "render"]

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "findings.md"

_HEAD = """# What was found in the first GDR code, and the cases that keep it out

Numbers are those of the GDR review, letters those of defects that came to light later. Each case is shown able to
fail: `nox -s review` puts each defect back into gdrkit, in a process of its own, and wants to see its case fail with
that symptom, and no other case of the review with it. A defect of the C library is put back by a build of it with one
translation unit replaced. The session prints this table with what it saw, and writes this file.
"""


def render() -> str:
    """Return the text of the document."""
    lines = [_HEAD]
    for finding in sorted(FINDINGS, key=lambda finding: finding.number):
        rows = [defect for defect in DEFECTS.values() if defect.finding == finding.number]
        lines += [
            f"## {finding.number}: {finding.text}\n",
            "| case | defect that is put back | symptom |",
            "|---|---|---|",
        ]
        lines += [f"| `{row.case.rpartition('::')[2]}` | {row.text} | {row.symptom} |" for row in rows]
        lines.append("")
    return "\n".join(lines)
