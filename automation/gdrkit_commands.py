"""Functions that compose pytest and gdrkit commands for the nox sessions, and that run the suites side by side."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automation.commands import (
    PYTEST_BAD_OPTION,
    ROOT,
    SETUP_MISSING,
    call,
    exit_with_pytest_code,
    exit_with_setup_error,
    fail_unless_zero,
    get_output,
    print_line,
)
from automation.side_by_side import Part, call_side_by_side, choose_job_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import nox

__all__ = [
    "add_default_cases",
    "list_meta_parts",
    "list_suite_parts",
    "make_pytest_command",
    "make_twin_command",
    "read_session_plans",
    "run_suites",
]

_COVERAGE_FILE = ROOT / "build" / "coverage" / "data"
_COVERAGE_OPTIONS = (f"--rcfile={ROOT / 'pyproject.toml'}", f"--data-file={_COVERAGE_FILE}")
# Each of these suites runs in two processes, with half of its files each. A single process would still
# run when all other suites have ended.
_HALVED_SUITES = ("usrbio", "qualify")
# The longest parts start first, so that all processors are busy until the end.
_SLOWEST_SUITES_FIRST = (
    *(*_HALVED_SUITES, "gds", "storage", "inventory", "contract"),
    *("observe", "gaudi", "rdma", "tiers", "fault", "report", "property"),
)
_SLOWEST_META_FIRST = ("test_snippets", "test_wheel", "test_second_library", "test_project_rules", "test_examples")


def read_session_plans(run_bin: Path) -> dict[str, dict[str, Any]]:
    """Return, for each nox session that tests hardware, what `gdrkit plan --json` prints about it.

    The entry of a session has the arguments of the session, and says whether the session fits this machine and why.
    """
    plan_json = get_output([str(run_bin / "gdrkit"), "plan", "--json"])
    if not plan_json:
        exit_with_setup_error(f"`{run_bin / 'gdrkit'} plan --json` printed nothing; run it to see why.")
    sessions: dict[str, dict[str, Any]] = json.loads(plan_json)["sessions"]
    return {name: entry for name, entry in sessions.items() if entry["hardware"]}


def make_pytest_command(run_bin: Path) -> list[str]:
    """Return the first words of a pytest command.

    These words name the settings file. Without it, pytest would search for a settings file in the folder of the first
    argument that is an existing path.
    """
    return [str(run_bin / "python"), "-m", "pytest", "-c", str(ROOT / "suites" / "pytest.ini")]


def add_default_cases(arguments: Sequence[str], *default_cases: str) -> list[str]:
    """Return the arguments for pytest: `arguments`, preceded by the `default_cases` if `arguments` names no cases.

    An argument names cases if it is a path below suites/ or hardware/. ``--ignore=suites/meta`` and the path of a
    records file do not name cases.
    """
    top_folders = {Path(os.path.relpath(ROOT / argument, ROOT)).parts[:1] for argument in arguments}
    return [*(() if top_folders & {("suites",), ("hardware",)} else default_cases), *arguments]


def run_suites(
    session: nox.Session,
    run_bin: Path,
    paths_by_part: Mapping[str, Sequence[Path]],
    *launcher: str,
    measures_coverage: bool = False,
) -> None:
    """Run each part, a group of case files, in a separate process, several at the same time, and report the failures.

    If the setup of a part is missing (code 3) or pytest refuses an option (code 4), nox ends with 3 or 2. If a part
    failed for another reason, the session fails, and nox continues with the next session.

    `launcher` has the words of the command that starts each process, such as `gdrkit run`. A session with arguments
    runs a single process with them and does not call this function. With `measures_coverage`, the function prints which
    share of the statements of gdrkit the pytest processes executed. The coverage does not include child processes such
    as agents and servers, because measuring changes their time and memory.
    """
    python, *module_and_options = make_pytest_command(run_bin)
    if measures_coverage:
        shutil.rmtree(_COVERAGE_FILE.parent, ignore_errors=True)
        _COVERAGE_FILE.parent.mkdir(parents=True)
        module_and_options = ["-m", "coverage", "run", *_COVERAGE_OPTIONS, *module_and_options]
    command_prefix = [*launcher, python, *module_and_options]
    parts = [Part(name, (*command_prefix, "-q", *map(str, paths))) for name, paths in paths_by_part.items()]
    code_by_part = call_side_by_side(parts, jobs_max=choose_job_count())
    if measures_coverage:
        _print_coverage(run_bin)
    for name, code in code_by_part.items():
        if code:
            print_line(f"{name} failed with exit code {code}; its output is above")
    for code in (SETUP_MISSING, PYTEST_BAD_OPTION):
        if code in code_by_part.values():
            exit_with_pytest_code(session, code)
    fail_unless_zero(session, list(code_by_part.values()))


def _print_coverage(run_bin: Path) -> None:
    coverage_command = [str(run_bin / "python"), "-m", "coverage"]
    call([*coverage_command, "combine", "--quiet", *_COVERAGE_OPTIONS])
    report_command = [*coverage_command, "report", "--format=total", "--precision=1", *_COVERAGE_OPTIONS]
    executed_percent = get_output(report_command).strip()
    print_line(f"the suites executed {executed_percent} % of the statements of gdrkit, not counting child processes")
    data_file = os.path.relpath(_COVERAGE_FILE, ROOT)
    print_line(f"for details, run {os.path.relpath(run_bin, ROOT)}/coverage report --data-file={data_file}")


def list_suite_parts() -> dict[str, list[Path]]:
    """Return the folders or files of each part of the default suites, by its name. The slowest parts are first."""
    folders = {path.parent for path in (ROOT / "suites").glob("*/test_*.py")} - {ROOT / "suites" / "meta"}
    slow_folders = [ROOT / "suites" / name for name in _SLOWEST_SUITES_FIRST]
    parts = dict[str, list[Path]]()
    for folder in [*slow_folders, *sorted(folders - set(slow_folders)), ROOT / "hardware" / "throughput"]:
        name = os.path.relpath(folder, ROOT)
        if folder.name in _HALVED_SUITES:
            files = sorted(folder.glob("test_*.py"))
            parts |= {f"{name}, half {half + 1}": files[half::2] for half in range(2)}
        else:
            parts[name] = [folder]
    return parts


def list_meta_parts() -> dict[str, list[Path]]:
    """Return the path of each file of suites/meta by its name. The slowest files are first."""
    path_by_name = {path.stem: path for path in sorted((ROOT / "suites" / "meta").glob("test_*.py"))}
    return {name: [path_by_name[name]] for name in dict.fromkeys([*_SLOWEST_META_FIRST, *path_by_name])}


def make_twin_command(run_bin: Path, *options: str) -> list[str]:
    """Return the first words of a command that runs on the software twins, isolated from other processes on twins."""
    return [str(run_bin / "gdrkit"), "run", "--software", "--isolated", "--quiet", *options, "--"]
