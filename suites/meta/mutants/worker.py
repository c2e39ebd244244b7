"""Worker of mutation testing, which tries one mutant at a time in a private copy of the tree and its environment.

gdrkit is installed in editable mode, so a mutant in the tree itself would affect every process that uses the tree. A
worker therefore copies the sources. It copies the environment `.nox/run` by hard links, and makes that copy import
gdrkit from the copied sources.
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

from meta.mutants.mutant import CasesRun, MutantOutcome, MutantResult

if TYPE_CHECKING:
    from meta.mutants.mutant import Mutant

__all__ = ["BaselineFailed", "Worker"]

# Maximum number of runs of all cases against one mutant. Several runs are needed if a case fails only sometimes.
_ROUNDS_MAX = 3
# Time limit of one case, with and without a mutant.
_CASE_TIMEOUT_S = 40
# The time limit of a run with a mutant is the time without a mutant, times the factor, but at least the minimum.
_LIMIT_FACTOR, _LIMIT_MIN_S = 3, 90.0
_BASELINE_LIMIT_S = 400.0
# Time that pytest has for its tear-down after SIGINT.
_TEAR_DOWN_TIMEOUT_S = 15
_BUILD_TIMEOUT_S = 900
# Environment variable that marks all processes of a run.
_MARKER_VARIABLE = "GDRKIT_MUTANT_RUN"
_IGNORE_COMPILED_PYTHON = shutil.ignore_patterns("__pycache__", "*.pyc")
_FOLDERS_NOT_COPIED = frozenset({"build", "dist"})
# pytest prints a failed case as: FAILED PATH::CASE - MESSAGE
_FAILED_CASE_PATTERN = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
# Modification time of the first mutant, in seconds since 1970: long ago, so that no real file has it.
_FIRST_MTIME_S = 1_000_000_000


class BaselineFailed(Exception):
    """Cases fail without any mutant. A failure with a mutant would then prove nothing."""


class Worker:
    """A copy of the tree and of its environment, for one mutant at a time.

    Parameters
    ----------
    folder : Path
        The folder of the copies. Existing contents are removed.
    source_tree : Path
        The tree to copy.
    environment_folder : Path
        The virtual environment to copy, in which gdrkit is installed from `source_tree` in editable mode.
    tools_folder : Path or None
        The folder of cmake and ninja, or None if there are no native mutants.
    """

    def __init__(
        self, folder: Path, *, source_tree: Path, environment_folder: Path, tools_folder: Path | None = None
    ) -> None:
        self.tree = folder / "tree"
        self._environment = folder / "environment"
        self._tools_folder = tools_folder
        self._python_write_count = 0
        # True if the native parts of the copy may contain a mutant.
        self._may_contain_native_mutant = False
        shutil.rmtree(folder, ignore_errors=True)
        self.tree.mkdir(parents=True)
        for entry in source_tree.iterdir():
            if entry.is_dir() and not entry.name.startswith(".") and entry.name not in _FOLDERS_NOT_COPIED:
                shutil.copytree(entry, self.tree / entry.name, ignore=_IGNORE_COMPILED_PYTHON, symlinks=True)
            elif entry.is_file() and entry.name != ".git":  # In a git worktree, .git is a file.
                shutil.copy2(entry, self.tree / entry.name)
        shutil.copytree(environment_folder, self._environment, copy_function=os.link, symlinks=True)
        self._redirect_paths(source_tree, environment_folder)

    def _redirect_paths(self, source_tree: Path, environment_folder: Path) -> None:
        """Replace the original paths of tree and environment by the paths of the copies, in the copied environment."""
        scripts = (self._environment / "bin").iterdir()
        editable_loaders = self._environment.glob("lib/python*/site-packages/_editable*.py")
        path_files = self._environment.glob("lib/python*/site-packages/*.pth")
        for path in [*scripts, *editable_loaders, *path_files]:
            if path.is_symlink() or not path.is_file():
                continue
            original_bytes = path.read_bytes()
            redirected_bytes = original_bytes.replace(os.fsencode(environment_folder), os.fsencode(self._environment))
            redirected_bytes = redirected_bytes.replace(os.fsencode(source_tree), os.fsencode(self.tree))
            if redirected_bytes != original_bytes:
                mode = path.stat().st_mode
                # The file is a hard link to the file of the original environment, and the original file must not
                # change.
                path.unlink()
                path.write_bytes(redirected_bytes)
                path.chmod(mode)

    def remove(self) -> None:
        """Remove the copies."""
        shutil.rmtree(self.tree.parent, ignore_errors=True)

    def run_baseline(self, cases: tuple[str, ...]) -> float:
        """Run cases without any mutant and return their duration in seconds.

        Raises
        ------
        BaselineFailed
            The cases fail, or the arguments select no case.
        """
        self._remove_native_mutant()
        cases_run, output = self._run_cases(cases, limit_s=_BASELINE_LIMIT_S)
        if not cases_run.passed:
            cause = "the cases took too long" if cases_run.timed_out else cases_run.first_failed_case
            message = f"without any mutant, {' '.join(cases)} fails: {cause}\n{output[-3000:]}"
            raise BaselineFailed(message)
        return cases_run.duration_s

    def try_mutant(self, mutant: Mutant, *, baseline_s: float) -> MutantResult:
        """Try one mutant: put it into the copy, run its cases, and restore the original."""
        limit_s = max(_LIMIT_FACTOR * baseline_s, _LIMIT_MIN_S)
        if not mutant.is_native:
            self._remove_native_mutant()
        path = self.tree / mutant.file
        original_text = path.read_text()
        start_s = time.monotonic()
        self._write(path, mutant.source)
        try:
            if mutant.is_native and not self.build():
                classified_result = MutantResult(mutant, MutantOutcome.NOT_COMPILED)
            else:
                classified_result = self._run_and_classify(mutant, limit_s)
        finally:
            self._write(path, original_text)
            self._may_contain_native_mutant |= mutant.is_native
        duration_s = round(time.monotonic() - start_s, 1)
        return MutantResult(
            mutant,
            classified_result.outcome,
            classified_result.killed_by,
            classified_result.note,
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
        self._may_contain_native_mutant = False

    def _remove_native_mutant(self) -> None:
        """Compile the native parts without any mutant if they may contain one."""
        if self._may_contain_native_mutant:
            self.build_baseline()

    def build(self) -> bool:
        """Compile the native parts of the copy and install them into it. Return False if they do not compile."""
        if self._tools_folder is None:
            message = "native mutants need --tools, the folder of cmake and ninja"
            raise ValueError(message)
        native_folder = self.tree / "native"
        environ = {**os.environ, "PATH": f"{self._tools_folder}{os.pathsep}{os.environ['PATH']}"}
        build_commands = [["cmake", "--build", "--preset", "release"]]
        if not (self.tree / "build" / "native" / "release" / "build.ninja").exists():
            configure_options = [
                "-DBUILD_TESTING=OFF",
                f"-DPython_EXECUTABLE={self._tools_folder / 'python'}",
                "--no-warn-unused-cli",
            ]
            build_commands.insert(0, ["cmake", "--preset", "release", *configure_options])
        build_commands.append(
            ["cmake", "--install", "../build/native/release", "--prefix", str(self.tree), "--component", "python"]
        )
        for build_command in build_commands:
            command = [str(self._tools_folder / build_command[0]), *build_command[1:]]
            completed = subprocess.run(
                command, cwd=native_folder, env=environ, capture_output=True, check=False, timeout=_BUILD_TIMEOUT_S
            )
            if completed.returncode != 0:
                return False
        return True

    def _run_and_classify(self, mutant: Mutant, limit_s: float) -> MutantResult:
        """Run the cases against the mutant in the copy, several times if a failure does not repeat."""
        previous_failed_case, note = "", ""
        for _ in range(_ROUNDS_MAX):
            cases_run, _ = self._run_cases(mutant.cases, limit_s=limit_s)
            if cases_run.passed:
                break
            if cases_run.timed_out:
                return MutantResult(mutant, MutantOutcome.TIMEOUT, note="the cases did not end")
            failed_case = cases_run.first_failed_case
            if failed_case == previous_failed_case:
                return MutantResult(
                    mutant, MutantOutcome.KILLED, failed_case, note="the case fails only after the cases before it"
                )
            # A case that fails only sometimes does not kill the mutant, so the failed case runs again, alone. If it
            # passes then, all cases run again, because a later case may detect the mutant.
            run_of_failed_case, _ = self._run_cases(
                (failed_case,) if "::" in failed_case else mutant.cases, limit_s=limit_s
            )
            if run_of_failed_case.first_failed_case == failed_case:
                return MutantResult(mutant, MutantOutcome.KILLED, failed_case)
            previous_failed_case, note = failed_case, f"{failed_case} failed once, and then passed"
        return MutantResult(mutant, MutantOutcome.SURVIVED, note=note)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            # Python uses a compiled file again if the source has the same size and mtime in seconds. Each change
            # therefore gets a new mtime.
            self._python_write_count += 1
            os.utime(path, (_FIRST_MTIME_S + self._python_write_count, _FIRST_MTIME_S + self._python_write_count))

    def _run_cases(self, cases: tuple[str, ...], *, limit_s: float) -> tuple[CasesRun, str]:
        """Run pytest with these arguments in the copy, and return the result and the output."""
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
        environ = {**os.environ, _MARKER_VARIABLE: marker}
        environ.pop("PYTHONPATH", None)  # PYTHONPATH contains the suites of the original tree.
        start_s = time.monotonic()
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
                output, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                # After SIGINT, pytest tears its fixtures down, which also unmounts file systems.
                os.killpg(child.pid, signal.SIGINT)
                try:
                    output, _ = child.communicate(timeout=_TEAR_DOWN_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    _kill_marked_processes(marker)
                    output, _ = child.communicate()
        _kill_marked_processes(marker)
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        failure_match = _FAILED_CASE_PATTERN.search(output)
        failed_case = failure_match[1] if failure_match else f"the run ended with exit status {child.returncode}"
        passed = child.returncode == 0 and not timed_out
        return CasesRun(passed, timed_out, "" if passed else failed_case, time.monotonic() - start_s), output


def _kill_marked_processes(marker: str) -> None:
    """Kill the remaining processes of a run: every process whose environment has the marker."""
    marker_entry = f"{_MARKER_VARIABLE}={marker}".encode()
    # A process may start children while this loop reads /proc, so the loop is repeated.
    for _ in range(3):
        has_killed = False
        for process_folder in Path("/proc").glob("[0-9]*"):
            try:
                if marker_entry in (process_folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process_folder.name), signal.SIGKILL)
                    has_killed = True
            except OSError:  # The process has ended, or it belongs to another user.
                continue
        if not has_killed:
            return
