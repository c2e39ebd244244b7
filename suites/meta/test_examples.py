"""Each program in docs/examples runs on the software twins without an error or a Python warning.

Software twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from automation.site.snippets import list_example_files

if TYPE_CHECKING:
    from pathlib import Path

# One of the examples collects all cases of the suites, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("path", list_example_files(), ids=lambda path: path.stem)
def test_example_runs_on_the_twins(path: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--quiet", "--"]
    command = [*launcher, sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    # pytest's plug-ins leave hidden folders in the current folder.
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == []
