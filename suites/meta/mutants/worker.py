"""A private copy of the tree and of its environment, in which mutants are tried one after the other.

The package is an editable installation, so a change of the tree would affect every process that uses it at that moment.
A worker therefore copies the sources, links the files of the environment `.nox/run` into a second environment, and
makes that environment import gdrkit from the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from meta.mutants.mutant import CasesRun, MutantOutcome, Result

if TYPE_CHECKING:
    from meta.mutants.mutant import Mutant

__all__ = ["BaselineFailed", "Worker"]

# A case that takes longer than this, in seconds, counts as hung. Every case of the baseline must be faster.
# Runs of all cases against one mutant.
_ROUNDS_MAX = 3
_CASE_TIMEOUT_S = 40
_LIMIT_FACTOR, _LIMIT_MIN_S, _BASELINE_LIMIT_S = 3, 90.0, 400.0
_INTERRUPT_S = 15
_BUILD_TIMEOUT_S = 900
_MARKER = "GDRKIT_MUTANT_RUN"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
_NOT_COPIED = frozenset({"build", "dist"})
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
_FIRST_MTIME = 1_000_000_000


class BaselineFailed(Exception):
    """Cases fail without any mutant, so that a failure with a mutant would prove nothing."""


class Worker:
    """A copy of the tree.

    Parameters
    ----------
    folder : Path
        The folder of the copy. Existing contents are removed.
    source : Path
        The tree.
    environment : Path
        The environment of the suites of that tree, in which gdrkit is installed in editable mode.
    tools : Path or None
        The folder of cmake and ninja, for native mutants.
    """

    def __init__(self, folder: Path, *, source: Path, environment: Path, tools: Path | None = None) -> None:
        self.tree = folder / "tree"
        self._environment = folder / "environment"
        self._tools = tools
        self._changes = 0
        # This flag says whether the native parts of the copy may be those of a mutant.
        self._is_stale = False
        shutil.rmtree(folder, ignore_errors=True)
        self.tree.mkdir(parents=True)
        for entry in source.iterdir():
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in _NOT_COPIED:
                shutil.copytree(entry, self.tree / entry.name, ignore=_LEFT_OUT, symlinks=True)
            elif entry.is_file() and entry.name != ".git":
                shutil.copy2(entry, self.tree / entry.name)
        shutil.copytree(environment, self._environment, copy_function=os.link, symlinks=True)
        self._redirect(source, environment)

    def _redirect(self, source: Path, environment: Path) -> None:
        """Replace the paths of the environment and of the tree in the second environment by its own and the copy's."""
        scripts = (self._environment / "bin").iterdir()
        links = self._environment.glob("lib/python*/site-packages/_editable*.py")
        paths = self._environment.glob("lib/python*/site-packages/*.pth")
        for path in [*scripts, *links, *paths]:
            if path.is_symlink() or not path.is_file():
                continue
            data = path.read_bytes()
            changed = data.replace(os.fsencode(environment), os.fsencode(self._environment))
            changed = changed.replace(os.fsencode(source), os.fsencode(self.tree))
            if changed != data:
                mode = path.stat().st_mode
                path.unlink()  # This file is a hard link to that of the first environment.
                path.write_bytes(changed)
                path.chmod(mode)

    def remove(self) -> None:
        """Remove the copy."""
        shutil.rmtree(self.tree.parent, ignore_errors=True)

    def baseline(self, cases: tuple[str, ...]) -> float:
        """Run cases without any mutant and return their duration in seconds.

        Raises
        ------
        BaselineFailed
            The cases fail, or there are none.
        """
        self._refresh()
        verdict, text = self._run(cases, limit_s=_BASELINE_LIMIT_S)
        if not verdict.passed:
            what = verdict.case or ("they took too long" if verdict.timed_out else "no case was named")
            message = f"without any mutant, {' '.join(cases)} fails: {what}\n{text[-3000:]}"
            raise BaselineFailed(message)
        return verdict.duration_s

    def attempt(self, mutant: Mutant, *, baseline_s: float) -> Result:
        """Try one mutant: put it into the copy, run its cases, and restore the original."""
        limit_s = max(_LIMIT_FACTOR * baseline_s, _LIMIT_MIN_S)
        if not mutant.is_native:
            self._refresh()
        path = self.tree / mutant.file
        original = path.read_text()
        began = time.monotonic()
        self._write(path, mutant.source)
        try:
            if mutant.is_native and not self.build():
                outcome = Result(mutant, MutantOutcome.NOT_COMPILED)
            else:
                outcome = self._run_and_classify(mutant, limit_s)
        finally:
            self._write(path, original)
            self._is_stale |= mutant.is_native
        duration_s = round(time.monotonic() - began, 1)
        return Result(
            mutant,
            outcome.outcome,
            outcome.killed_by,
            outcome.note,
            duration_s,
            round(baseline_s, 1),
            round(limit_s, 1),
        )

    def build_baseline(self) -> None:
        """Compile the native parts without any mutant.

        Raises
        ------
        BaselineFailed
            The native parts do not compile.
        """
        if not self.build():
            message = "the native parts do not compile without any mutant"
            raise BaselineFailed(message)
        self._is_stale = False

    def _refresh(self) -> None:
        if self._is_stale:
            self.build_baseline()

    def build(self) -> bool:
        """Compile the native parts of the copy and install them into it. Return False if they do not compile."""
        if self._tools is None:
            message = "native mutants need --tools, the folder of cmake"
            raise ValueError(message)
        native = self.tree / "native"
        environ = {**os.environ, "PATH": f"{self._tools}{os.pathsep}{os.environ['PATH']}"}
        steps = [["cmake", "--build", "--preset", "release"]]
        if not (self.tree / "build" / "native" / "release" / "build.ninja").exists():
            options = ["-DBUILD_TESTING=OFF", f"-DPython_EXECUTABLE={self._tools / 'python'}", "--no-warn-unused-cli"]
            steps.insert(0, ["cmake", "--preset", "release", *options])
        steps.append(
            ["cmake", "--install", "../build/native/release", "--prefix", str(self.tree), "--component", "python"]
        )
        for step in steps:
            program = [str(self._tools / step[0]), *step[1:]]
            ended = subprocess.run(
                program, cwd=native, env=environ, capture_output=True, check=False, timeout=_BUILD_TIMEOUT_S
            )
            if ended.returncode != 0:
                return False
        return True

    def _run_and_classify(self, mutant: Mutant, limit_s: float) -> Result:
        before, note = "", ""
        for _ in range(_ROUNDS_MAX):
            whole, _ = self._run(mutant.cases, limit_s=limit_s)
            if whole.passed:
                break
            if whole.timed_out:
                return Result(mutant, MutantOutcome.TIMEOUT, note="the cases did not end")
            if whole.case == before:
                return Result(mutant, MutantOutcome.KILLED, before, note="it fails only behind the cases before it")
            # The case runs again, alone: a case that fails only sometimes is not a kill. Then all cases run again,
            # because one behind it may notice the mutant.
            alone, _ = self._run((whole.case,) if "::" in whole.case else mutant.cases, limit_s=limit_s)
            if alone.case == whole.case:
                return Result(mutant, MutantOutcome.KILLED, whole.case)
            before, note = whole.case, f"{whole.case} failed once, and then passed"
        return Result(mutant, MutantOutcome.SURVIVED, note=note)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            # Python compares mtime in seconds and size to decide whether its compiled file is current, so each change
            # has another mtime.
            self._changes += 1
            os.utime(path, (_FIRST_MTIME + self._changes, _FIRST_MTIME + self._changes))

    def _run(self, cases: tuple[str, ...], *, limit_s: float) -> tuple[CasesRun, str]:
        python = str(self._environment / "bin" / "python")
        command = [
            python,
            "-m",
            "gdrkit",
            "run",
            "--software",
            "--isolated",
            "--seed",
            "1",
            "--",
            python,
            "-m",
            "pytest",
        ]
        command += ["-c", str(self.tree / "suites" / "pytest.ini"), "-x", "-q", "--tb=short", "--seed=1"]
        command += ["--hypothesis-seed=1", "-o", f"timeout={_CASE_TIMEOUT_S}", *cases]
        marker = uuid.uuid4().hex
        environ = {**os.environ, _MARKER: marker}
        environ.pop("PYTHONPATH", None)  # PYTHONPATH contains the suites of the tree.
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self.tree,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child:
            timed_out = False
            try:
                text, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                # After this signal pytest tears its fixtures down, mounts among them.
                os.killpg(child.pid, signal.SIGINT)
                try:
                    text, _ = child.communicate(timeout=_INTERRUPT_S)
                except subprocess.TimeoutExpired:
                    _end_marked(marker)
                    text, _ = child.communicate()
        _end_marked(marker)
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        failed = _FAILED.search(text)
        case = failed[1] if failed else f"the run ended with {child.returncode}"
        passed = child.returncode == 0 and not timed_out
        return CasesRun(passed, timed_out, "" if passed else case, time.monotonic() - began), text


def _end_marked(marker: str) -> None:
    """Kill the remaining processes of a run: every process whose environment has its marker."""
    variable = f"{_MARKER}={marker}".encode()
    for _ in range(3):
        killed_any = False
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    killed_any = True
            except OSError:  # The process has ended, or it belongs to another user.
                continue
        if not killed_any:
            return
