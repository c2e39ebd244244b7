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
        _, patched_source = apply_patch(defect.patch, _ROOT)
        patched_path = folder / defect.patch.name / defect.patch.file
        if not patched_path.is_file() or patched_path.read_text() != patched_source:
            patched_path.parent.mkdir(parents=True, exist_ok=True)
            patched_path.write_text(patched_source)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
