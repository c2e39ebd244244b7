"""A function that runs test cases by a child pytest with the plugin of gdrkit.harness, and returns their records."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gdrkit.report import Record, read_records

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.inventory import Facts

__all__ = ["ChildRun", "run_cases"]


@dataclass(frozen=True)
class ChildRun:
    """The exit code and the output of the child process, and the record of each case by the name of the case."""

    exit_code: int
    output: str
    records: dict[str, Record]


def run_cases(folder: Path, facts: Facts, case_source: str, *options: str) -> ChildRun:
    """Write the Python text `case_source` to a file in `folder`, and run its cases with these options of pytest.

    The harness takes the facts about the machine from `facts`, and queries no API.
    """
    (folder / "test_cases.py").write_text(textwrap.dedent(case_source), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\nfilterwarnings = error\n")
    records_path = folder / "records.jsonl"
    (folder / "facts.json").write_text(facts.to_json(), encoding="utf-8")
    plugin_options = [f"--records={records_path}", f"--facts={folder / 'facts.json'}"]
    command = [sys.executable, "-m", "pytest", "-p", "gdrkit.harness.plugin", *plugin_options, *options]
    process = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        # With this variable, pytest does not import other installed plugins, which would take time.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    # A record names a case as FILE::CASE.
    records_by_case = {
        record.case.partition("::")[2]: record
        for record in (read_records(records_path) if records_path.exists() else ())
    }
    return ChildRun(exit_code=process.returncode, output=process.stdout + process.stderr, records=records_by_case)
