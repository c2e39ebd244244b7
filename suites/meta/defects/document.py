"""Generator of docs/findings.md: the defects that reviews found, and the requirements of the first documents.

``python -m meta.defects.document``, with suites/ on PYTHONPATH, writes the file and runs no case.
``nox -s review`` runs the cases, and then writes the file, too.
"""

from __future__ import annotations

from pathlib import Path

from meta.defects.table import DEFECTS, FINDINGS
from meta.items import document as items_document

__all__ = ["DOCUMENT", "render"]

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "findings.md"

_HEAD = """# Findings: the defects of the first GDR code, and the items of the first documents

[The items](#the-items-of-the-five-documents) of the documents that gdrkit began with are at the end.

The first GDR (GPUDirect RDMA) code had the defects 1 to 6 and a to o. The findings with numbers are from its first
review, those with letters are from later reviews. p to t are defects of earlier versions of gdrkit, which reported
a path or data as good although no transfer had proven that ([proven.md](proven.md)). gdrkit has none of the defects,
and a case in `suites/review` detects each of them.

`nox -s review` shows that each case can fail. For each defect, the session starts a separate process in which the
defect is put back into gdrkit. The case must then fail with the symptom below, and no other case of its file may fail;
`nox -s long` requires this of all cases of the review. For a defect of the C library, the process loads a build of the
library that has the defect. The session prints these tables with the observed symptoms, and writes this file.
"""


def render() -> str:
    """Return the text of docs/findings.md."""
    lines = [_HEAD]
    for finding in sorted(FINDINGS, key=lambda finding: finding.identifier):
        defects = [defect for defect in DEFECTS.values() if defect.finding_identifier == finding.identifier]
        lines += [
            f"## {finding.identifier}: {finding.description}\n",
            "| case | defect that is put back | symptom |",
            "|---|---|---|",
        ]
        lines += [
            f"| `{defect.case.rpartition('::')[2]}` | {defect.description} | {defect.symptom} |" for defect in defects
        ]
        lines.append("")
    lines.append(items_document.render())
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render())
