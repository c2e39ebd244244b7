"""Generator of docs/findings.md from the table of the review."""

from __future__ import annotations

from pathlib import Path

from meta.defects.table import DEFECTS, FINDINGS

__all__ = ["DOCUMENT", "render"]

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "findings.md"

_HEAD = """# Defects of the first GDR code, and the cases that detect them

The numbered findings are from the GDR review. The lettered ones were found later. `nox -s review` shows that each case
can fail: it puts each defect back into gdrkit, in a separate process, and requires that the case fails with the symptom
below and that no other case of the review fails. For a defect of the C library, the session builds the library with the
defect. The session prints this table with the observed symptoms, and writes this file.
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
