"""A file of known bytes on a disk, and scenarios of cuFile with it, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from support import cufile_child, udev

from gdrkit import serialization
from gdrkit.evidence import LoadedLibrary
from gdrkit.harness.needs.cufile import vectors

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.case import Case
    from gdrkit.inventory import Facts

__all__ = ["Scene"]

# A scenario takes a second; one that takes this long hangs, and is ended.
_LIMIT_S = 60
# What scenarios answered, for cases that look at one answer from several sides.
_answered: dict[str, tuple[dict[str, Any], tuple[LoadedLibrary, ...]]] = {}


@dataclass
class Scene:
    """A file of known bytes, and where scenarios with it run."""

    path: Path
    seed: int
    case: Case
    facts: Facts
    environ: dict[str, str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    plan_path: Path | None = None
    program: str = cufile_child.__file__

    def play(self, scenario: str, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 - what goes into JSON.
        """Run a scenario of :mod:`support.cufile_child` where udev knows the disk."""
        with udev.present(self.path.parent):
            return self.play_as_it_is(scenario, **asked)

    def play_once(self, scenario: str, **asked: Any) -> dict[str, Any]:  # noqa: ANN401
        """As :meth:`play`, or what an earlier case got for the same."""
        key = json.dumps([scenario, asked, self.rules, self.environ])
        if key not in _answered:
            answer = self.play(scenario, **asked)
            _answered[key] = answer, self.case.peers[-1][1]
        else:
            self.case.peers.append((scenario, _answered[key][1]))
        return _answered[key][0]

    def play_as_it_is(self, scenario: str, **asked: Any) -> dict[str, Any]:  # noqa: ANN401
        """Run a scenario; whoever calls sees to udev."""
        with tempfile.TemporaryFile() as answer:
            planned = {} if self.plan_path is None else {"GDRKIT_TWINS_FAULTS": str(self.plan_path)}
            given = {"path": str(self.path), "seed": self.seed, "answer_fd": answer.fileno(), **asked}
            ended = subprocess.run(
                [sys.executable, self.program, scenario],
                input=json.dumps(given),
                # Without this, libcufile leaves its log in the current folder.
                env={
                    "CUFILE_LOGFILE_PATH": f"{tempfile.gettempdir()}/cufile.log",
                    **os.environ,
                    **self.environ,
                    **planned,
                },
                pass_fds=[answer.fileno()],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
            answer.seek(0)
            said = answer.read()
        assert ended.returncode == 0, f"{scenario} ended with {ended.returncode}: {ended.stderr}"
        found: dict[str, Any] = json.loads(said)
        libraries = serialization.from_json_data(tuple[LoadedLibrary, ...], found.pop("libraries"))
        self.case.peers.append((scenario, libraries))
        return found

    @property
    def has_vectors(self) -> bool:
        """Whether libcufile has cuFileReadv."""
        return vectors.check(self.facts) is None

    def plan(self, folder: Path, *rules: str) -> Scene:
        """The same with a fault plan for the twins."""
        path = folder / "plan"
        path.write_text("\n".join(["gdrkit-faults 1", *rules]) + "\n", encoding="utf-8")
        return replace(self, plan_path=path, rules=rules)

    def with_environ(self, **environ: str) -> Scene:
        """The same with more variables."""
        return replace(self, environ={**self.environ, **environ})
