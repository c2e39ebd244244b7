"""The package `automation`, which prepares machines for the nox sessions: apt, interpreters, environment stamps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from automation import commands, environments, machine, system_packages
from automation.gdrkit_commands import suite_folders
from automation.side_by_side import Part, call_side_by_side

ROOT = Path(__file__).resolve().parents[2]
# Lines that `apt-get --simulate install` prints: a new package, an update, and replacements from other archives.
ADDED = "Inst xfsprogs (6.1.0-1 Debian:12.4/stable [amd64])"
UPDATED = "Inst libc6 [2.36-9] (2.36-10 Debian:12.4/stable [amd64])"
FOREIGN = "Inst libibverbs1 [2307mlnx47-1] (44.0-2 Debian:12.4/stable [amd64])"
THIRD_PARTY = "Inst libc6 [2.36-9] (2.40-1 example.com:stable [amd64])"


def write_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def install_with(folder: Path) -> subprocess.CompletedProcess[str]:
    """Call system_packages.install in a process whose PATH is `folder` alone."""
    call = "from automation import system_packages; system_packages.install(['xfsprogs'])"
    environ = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", call]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_added_package_is_not_a_replacement() -> None:
    assert not system_packages.is_replacement(ADDED)
    assert system_packages.is_replacement(UPDATED)


@pytest.mark.parametrize(("change", "allowed"), [(UPDATED, True), (FOREIGN, False), (THIRD_PARTY, False)])
def test_replacement_is_allowed_within_the_release_only(change: str, allowed: bool) -> None:  # noqa: FBT001 - a parameter of the case
    assert system_packages.is_release_update(change) is allowed


def test_apt_is_not_called_beside_a_vendor_stack(tmp_path: Path) -> None:
    called = tmp_path / "called"
    write_program(tmp_path, "ofed_info", "")
    write_program(tmp_path, "apt-get", f"echo >{called}")
    result = install_with(tmp_path)
    assert (result.returncode, called.exists()) == (3, False)
    assert "ofed_info is installed" in result.stdout


def test_apt_that_would_replace_foreign_packages_is_stopped(tmp_path: Path) -> None:
    called = tmp_path / "called"
    # The RDMA libraries, if this machine has any, come from the distribution.
    write_program(tmp_path, "dpkg-query", 'case "$*" in -S*) echo "libibverbs1: x";; *) echo "44.0-2 Debian";; esac')
    write_program(tmp_path, "apt-get", f'case "$*" in *" -s") echo "{FOREIGN}";; *) echo >{called};; esac')
    result = install_with(tmp_path)
    assert (result.returncode, called.exists()) == (3, False)
    if os.geteuid() == 0:
        assert FOREIGN in result.stdout


def test_machine_without_apt_is_told_what_to_install(tmp_path: Path) -> None:
    result = install_with(tmp_path)
    assert result.returncode == 3
    assert "xfsprogs" in result.stdout


def test_program_that_is_not_python_has_version_zero(tmp_path: Path) -> None:
    write_program(tmp_path, "python3", "echo three")
    assert machine.python_version(str(tmp_path / "python3")) == (0,)
    assert machine.python_version(str(tmp_path / "missing")) == (0,)
    assert machine.python_version(sys.executable) == sys.version_info[:2]


def test_digest_changes_with_arguments_and_contents(tmp_path: Path) -> None:
    source = tmp_path / "pyproject.toml"
    source.write_text("a")
    before = environments.digest(["pip"], [source])
    assert environments.digest(["pip"], [source]) == before
    assert environments.digest(["pip", ""], [source]) != before
    source.write_text("b")
    assert environments.digest(["pip"], [source]) != before


def shell_part(name: str, text: str) -> Part:
    return Part(name, ("sh", "-c", text))


def test_side_by_side_keeps_output_and_exit_codes(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Each command waits for a file that the other one creates, so both end only if they run at the same time.
    wait = "until [ -e {0}/{2} ]; do :; done; echo {1}; echo {1}; exit {3}"
    parts = [
        shell_part(name, f"echo {name}; touch {tmp_path}/{name}; " + wait.format(tmp_path, name, other, code))
        for name, other, code in (("first", "second", 0), ("second", "first", 3))
    ]
    assert call_side_by_side(parts, jobs=2) == {"first": 0, "second": 3}
    output = capfd.readouterr().out
    assert "first\nfirst\nfirst\n" in output
    assert "second\nsecond\nsecond\n" in output


def test_side_by_side_runs_no_more_than_jobs(tmp_path: Path) -> None:
    # mkdir fails if another command runs at the same time.
    alone = f"mkdir {tmp_path}/one && rmdir {tmp_path}/one"
    codes = call_side_by_side([shell_part(str(number), alone) for number in range(5)], jobs=1)
    assert codes == dict.fromkeys(map(str, range(5)), 0)


def test_every_default_suite_is_a_part_once() -> None:
    parts = suite_folders()
    assert len(parts) == len(set(parts))
    cases = {path for part in parts for path in part.rglob("test_*.py")}
    default = {*(ROOT / "suites").rglob("test_*.py"), *(ROOT / "hardware" / "throughput").rglob("test_*.py")}
    assert cases == {path for path in default if path.relative_to(ROOT).parts[1] != "meta"}


def test_quiet_command_reports_that_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.call(["sleep", "0.5"], progress_period_s=0.05) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "> sleep 0.5"
    assert len(lines) > 2
    assert lines[1].startswith("  sleep is running (")
