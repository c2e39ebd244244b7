"""Program that writes source files of the usrbio client library with one defect each.

``python -m meta.defects.native FOLDER`` writes each patched file to ``FOLDER/<defect>/<path in the tree>``. The
CMakeLists.txt in the folder native/ beside this file compiles the patched file in place of the original file.
"""

from __future__ import annotations

import sys
from pathlib import Path

from meta.defects.proof import NATIVE_PROOF_DEFECTS
from meta.defects.usrbio import NATIVE_DEFECTS
from meta.mutants.patches import apply_patch

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[3]


def main(folder: Path) -> None:
    """Write the patched files. Leave a file with the right contents as it is, so that it is not compiled again."""
    for defect in (*NATIVE_DEFECTS, *NATIVE_PROOF_DEFECTS):
        _, source = apply_patch(defect.patch, _ROOT)
        path = folder / defect.patch.name / defect.patch.file
        if not path.is_file() or path.read_text() != source:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
