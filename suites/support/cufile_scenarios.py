"""The parent's side of the scenarios in :mod:`support.cufile_child`, which call cuFile in a child process.

A scenario uses a file of known bytes on a real disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from support import cufile_child, udev
from support.python_child import suites_environ

from gdrkit import serialization
from gdrkit.evidence import LoadedLibrary
from gdrkit.harness.needs.cufile import vectors

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.case import Case
    from gdrkit.inventory import Facts

__all__ = ["ScenarioRunner"]

# Time limit of a scenario. A scenario takes about a second.
_TIMEOUT_S = 60
# Results and loaded libraries of earlier scenarios, for cases that run an equal scenario (`run_cached`).
_finished_scenarios: dict[str, tuple[dict[str, Any], tuple[LoadedLibrary, ...]]] = {}


@dataclass
class ScenarioRunner:
    """Runs scenarios with a file of known bytes.

    Attributes
    ----------
    path : Path
        The file with known bytes.
    seed : int
        Seed of the pattern in the file.
    case : Case
        The case that runs the scenarios. Its record gets the libraries that the child processes loaded.
    facts : Facts
        Facts of this machine.
    environ : dict of str to str
        Additional environment variables.
    rules : tuple of str
        Rules in the fault plan of the twins.
    plan_path : Path, optional
        File of the fault plan; None without one.
    program : str
        Path of the Python program of the child process.
    """

    path: Path
    seed: int
    case: Case
    facts: Facts
    environ: dict[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    plan_path: Path | None = None
    program: str = cufile_child.__file__

    def run(self, scenario: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value.
        """Run a scenario while udev's database has an entry for the disk, and return the result of the scenario.

        libcufile reads the type of the file system from that entry.
        """
        with udev.provide_entry(self.path.parent):
            return self.run_without_adding_udev_entry(scenario, **arguments)

    def run_cached(self, scenario: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return the result of :meth:`run`. The scenario runs only once for all cases with equal arguments."""
        scenario_key = json.dumps([scenario, arguments, self.rules, self.environ])
        if scenario_key not in _finished_scenarios:
            result = self.run(scenario, **arguments)
            # run() appended the scenario and its libraries to `peer_libraries`.
            _finished_scenarios[scenario_key] = result, self.case.peer_libraries[-1][1]
        else:
            self.case.peer_libraries.append((scenario, _finished_scenarios[scenario_key][1]))
        return _finished_scenarios[scenario_key][0]

    def run_without_adding_udev_entry(self, scenario: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Run a scenario without the entry that :meth:`run` adds to udev's database, and return its result."""
        with tempfile.TemporaryFile() as result_file:
            fault_variables = {} if self.plan_path is None else {"GDRKIT_TWINS_FAULTS": str(self.plan_path)}
            arguments = {"path": str(self.path), "seed": self.seed, "result_fd": result_file.fileno(), **arguments}
            completed = subprocess.run(
                [sys.executable, self.program, scenario],
                input=json.dumps(arguments),
                # Without CUFILE_LOGFILE_PATH, libcufile writes its log to the current folder.
                env={
                    "CUFILE_LOGFILE_PATH": f"{tempfile.gettempdir()}/cufile.log",
                    # With 0, the twin reads udev's database, as libcufile does. run() provides the entry of the disk.
                    "GDRKIT_TWINS_UDEV": "0",
                    **suites_environ(),
                    **self.environ,
                    **fault_variables,
                },
                pass_fds=[result_file.fileno()],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
            result_file.seek(0)
            result_json = result_file.read()
        assert completed.returncode == 0, f"{scenario} ended with exit code {completed.returncode}: {completed.stderr}"
        result: dict[str, Any] = json.loads(result_json)
        libraries = serialization.from_json_data(tuple[LoadedLibrary, ...], result.pop("libraries"))
        self.case.peer_libraries.append((scenario, libraries))
        return result

    @property
    def has_vectors(self) -> bool:
        """Whether libcufile has cuFileReadv."""
        return vectors.check(self.facts) is None

    def with_faults(self, folder: Path, *rules: str) -> ScenarioRunner:
        """Write a fault plan with these rules to the folder, and return a runner whose child processes use it."""
        plan_path = folder / "plan"
        plan_path.write_text("\n".join(["gdrkit-faults 1", *rules]) + "\n", encoding="utf-8")
        return replace(self, plan_path=plan_path, rules=rules)

    def with_environ(self, **environ: str) -> ScenarioRunner:
        """Return a runner with additional environment variables."""
        return replace(self, environ={**self.environ, **environ})
