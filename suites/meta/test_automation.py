"""The package `automation`, which prepares machines for the nox sessions: packages, interpreters and environments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from automation import commands, environments, machine, system_packages
from automation.gdrkit_commands import list_suite_parts
from automation.side_by_side import Part, call_side_by_side
from gdrkit import remedies

ROOT = Path(__file__).resolve().parents[2]
# Lines that `apt-get --simulate install` prints: a new package, an update from the archive of the distribution, the
# replacement of a package of a vendor, and an update from the archive of a third party.
APT_ADDITION = "Inst xfsprogs (6.1.0-1 Debian:12.4/stable [amd64])"
APT_UPDATE = "Inst libc6 [2.36-9] (2.36-10 Debian:12.4/stable [amd64])"
APT_VENDOR_REPLACEMENT = "Inst libibverbs1 [2307mlnx47-1] (44.0-2 Debian:12.4/stable [amd64])"
APT_THIRD_PARTY_UPDATE = "Inst libc6 [2.36-9] (2.40-1 example.com:stable [amd64])"
# Transactions that `dnf install --assumeno` prints: one with changes that the project refuses (of the packages
# mlnx-tools, libibverbs, kernel-headers and openmpi), and one with only allowed changes.
DNF_REFUSED_TRANSACTION = """\
Last metadata expiration check: 0:00:01 ago.
Dependencies resolved.
================================================================================
 Package                 Arch      Version               Repository        Size
================================================================================
Installing:
 xfsprogs                x86_64    6.4.0-4.el9           baseos           1.0 M
     replacing  mlnx-tools.noarch 24.10-0
 python3.12-a-module-with-a-long-name
                         x86_64    3.12.5-2.el9_5        appstream        344 k
Upgrading:
 glibc                   x86_64    2.34-125.el9_5.1      baseos           2.0 M
 libibverbs              x86_64    51.0-1.el9_5          baseos           446 k
 kernel-headers          x86_64    6.12-1                elrepo           1.0 M
Installing dependencies:
 inih                    x86_64    49-6.el9              baseos            18 k
Removing dependent packages:
 openmpi                 x86_64    4.1.7a1-1             @System          8.0 M

Transaction Summary
================================================================================
Install  3 Packages
"""
DNF_ALLOWED_TRANSACTION = """\
Installing:
 xfsprogs                x86_64    6.4.0-4.el9           baseos           1.0 M
Upgrading:
 glibc                   x86_64    2.34-125.el9_5.1      baseos           2.0 M

Transaction Summary
"""


def write_program(folder: Path, name: str, script: str) -> None:
    """Write an executable shell script, which takes the place of the program `name`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_install(folder: Path, distribution: str = "debian") -> subprocess.CompletedProcess[str]:
    """Run the installation of a package and a compiler with PATH set to `folder`, on a machine of this distribution."""
    (folder / "os-release").write_text(f'NAME="A Linux"\nID="{distribution}"\n')
    argument_code = f"['xfsprogs', 'g++'], os_release=pathlib.Path({str(folder / 'os-release')!r})"
    program = (
        f"import pathlib; from automation import system_packages; system_packages.install_packages({argument_code})"
    )
    environ = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_failed_optional_packages_are_named_and_tried_again(tmp_path: Path) -> None:
    digest_arguments = [
        sys.executable,
        str(machine.python_version(sys.executable)),
        "first==1",
        "second==2",
        "third==3",
    ]
    (tmp_path / "run" / "bin").mkdir(parents=True)
    # The environment exists, but pip could not install the two optional packages. The script in place of pip fails
    # until the file `network` exists.
    (tmp_path / "run" / "made-from").write_text(environments.compute_digest(digest_arguments, []))
    write_program(tmp_path / "run" / "bin", "pip", f'echo "$@" >> {tmp_path}/calls; test -e {tmp_path}/network')
    program = f"""
import pathlib, sys
from automation import environments
environments.ENVIRONMENTS = pathlib.Path({str(tmp_path)!r})
environments.ensure_environment(
    "run", python=sys.executable, requirements=["first==1"], optional_requirements=["second==2", "third==3"]
)
"""
    command = [sys.executable, "-c", program]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output(command, env=environ, text=True)
    assert "Continuing without second==2, third==3" in output
    (tmp_path / "network").touch()
    # The first of these runs installs the packages, so the second run has nothing to install.
    for _ in range(2):
        assert "Continuing" not in subprocess.check_output(command, env=environ, text=True)
    assert (tmp_path / "calls").read_text() == "install --quiet --no-deps second==2 third==3\n" * 2


@pytest.mark.parametrize(
    ("apt_line", "replaces", "is_allowed"),
    [
        (APT_ADDITION, False, True),
        (APT_UPDATE, True, True),
        (APT_VENDOR_REPLACEMENT, True, False),
        (APT_THIRD_PARTY_UPDATE, True, False),
    ],
)
def test_apt_may_update_within_the_release_only(apt_line: str, *, replaces: bool, is_allowed: bool) -> None:
    (change,) = system_packages.list_apt_changes(f"Reading package lists...\n{apt_line}\nConf xfsprogs\n")
    assert (change.replaces, change.is_allowed) == (replaces, is_allowed)
    assert change.text == apt_line.removeprefix("Inst ")


def test_dnf_may_update_within_the_release_only() -> None:
    change_by_package = {change.package: change for change in system_packages.list_dnf_changes(DNF_REFUSED_TRANSACTION)}
    assert [name for name, change in change_by_package.items() if not change.replaces] == [
        "xfsprogs",
        "python3.12-a-module-with-a-long-name",
        "inih",
    ]
    assert change_by_package["glibc"].replaces
    forbidden_packages = [name for name, change in change_by_package.items() if not change.is_allowed]
    assert forbidden_packages == ["mlnx-tools.noarch", "libibverbs", "kernel-headers", "openmpi"]
    assert change_by_package["libibverbs"].text == "upgrading: libibverbs x86_64 51.0-1.el9_5 baseos"


def test_apt_is_not_called_beside_a_vendor_stack(tmp_path: Path) -> None:
    calls_file = tmp_path / "called"
    write_program(tmp_path, "ofed_info", "")
    write_program(tmp_path, "apt-get", f"echo >{calls_file}")
    result = run_install(tmp_path)
    assert (result.returncode, calls_file.exists()) == (3, False)
    assert "ofed_info is installed" in result.stdout


def test_apt_that_would_replace_foreign_packages_is_stopped(tmp_path: Path) -> None:
    calls_file = tmp_path / "called"
    # The query reports that the RDMA libraries of the machine come from the distribution.
    write_program(tmp_path, "dpkg-query", 'case "$*" in -S*) echo "libibverbs1: x";; *) echo "44.0-2 Debian";; esac')
    write_program(
        tmp_path, "apt-get", f'case "$*" in *" -s") echo "{APT_VENDOR_REPLACEMENT}";; *) echo >{calls_file};; esac'
    )
    result = run_install(tmp_path)
    assert (result.returncode, calls_file.exists()) == (3, False)
    if os.geteuid() == 0:
        assert APT_VENDOR_REPLACEMENT.removeprefix("Inst ") in result.stdout


def test_apt_waits_for_the_lock_of_another_apt(tmp_path: Path) -> None:
    calls_file = tmp_path / "called"
    write_program(tmp_path, "dpkg-query", 'case "$*" in -S*) echo "libibverbs1: x";; *) echo "44.0-2 Debian";; esac')
    write_program(
        tmp_path, "apt-get", f'case "$*" in *" -s") echo "{APT_ADDITION}";; *) echo "$*" >{calls_file};; esac'
    )
    result = run_install(tmp_path)
    # For users other than root, the program prints the command and installs nothing.
    assert result.returncode == (0 if os.geteuid() == 0 else 3), result.stdout
    assert os.geteuid() != 0 or "DPkg::Lock::Timeout=600" in calls_file.read_text()


@pytest.mark.parametrize(
    ("distribution", "expected_text"),
    [
        ("debian", "apt-get is not installed."),
        ("rocky", "dnf is not installed."),
        ("arch", "apt-get is not installed."),
    ],
)
def test_machine_without_manager_is_told_what_to_install(tmp_path: Path, distribution: str, expected_text: str) -> None:
    # The query reports that the RDMA libraries of the machine come from the distribution.
    query_program = "rpm" if distribution == "rocky" else "dpkg-query"
    write_program(tmp_path, query_program, "echo libibverbs 51.0-1 Rocky, Debian")
    result = run_install(tmp_path, distribution)
    assert result.returncode == 3
    assert expected_text in result.stdout
    assert result.stdout.strip().endswith("xfsprogs gcc-c++" if distribution == "rocky" else "xfsprogs g++")


@pytest.mark.parametrize(("updated_package", "exit_code"), [("glibc", 0), ("libibverbs", 3)])
def test_dnf_installs_what_its_dry_run_announced(tmp_path: Path, updated_package: str, exit_code: int) -> None:
    calls_file = tmp_path / "called"
    dry_run_output = (
        DNF_REFUSED_TRANSACTION.replace("\n", "\\n")
        if updated_package == "libibverbs"
        else DNF_ALLOWED_TRANSACTION.replace("\n", "\\n")
    )
    write_program(tmp_path, "rpm", "echo libibverbs 51.0-1 Rocky Enterprise Software Foundation")
    write_program(
        tmp_path,
        "dnf",
        f'case "$*" in *--assumeno*) printf \'{dry_run_output}\'; exit 1;; *) echo "$*" >{calls_file};; esac',
    )
    result = run_install(tmp_path, "rocky")
    if os.geteuid() != 0:
        assert "sudo dnf install -y --setopt=install_weak_deps=False xfsprogs gcc-c++" in result.stdout
        return
    assert result.returncode == exit_code, result.stdout
    if exit_code:
        assert not calls_file.exists()
        assert "upgrading: libibverbs x86_64 51.0-1.el9_5 baseos" in result.stdout
    else:
        assert "dnf updates, within this release: glibc\ndnf installs: xfsprogs glibc\n" in result.stdout
        assert calls_file.read_text() == "install -y --setopt=install_weak_deps=False xfsprogs gcc-c++ -q\n"


@pytest.mark.parametrize(
    ("os_release_text", "expected_command"),
    [
        ('ID="rhel"\n', "dnf install gcc-c++ rdma-core-devel python3.12-devel fuse3 fuse3-libs"),
        (
            'NAME="X"\nID=x\nID_LIKE="rhel centos fedora"\n',
            "dnf install gcc-c++ rdma-core-devel python3.12-devel fuse3 fuse3-libs",
        ),
        ("ID=ubuntu\nID_LIKE=debian\n", "apt-get install g++ libibverbs-dev python3.12-dev fuse3"),
    ],
)
def test_remedy_has_the_names_of_the_distribution(tmp_path: Path, os_release_text: str, expected_command: str) -> None:
    (tmp_path / "os-release").write_text(os_release_text)
    packages = ("g++", "libibverbs-dev", "python3.12-dev", "fuse3")
    assert remedies.system_install(*packages, os_release=tmp_path / "os-release") == expected_command
    assert remedies.system_install("g++", os_release=tmp_path / "missing") == "apt-get install g++"


def test_remedy_names_the_packages_of_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("mpi", "fuse", "cufile", "qualify"):
        command = remedies.pip_install(extra)
        assert command.startswith("pip install '")
        # The metadata may state the limits of a version in another order.
        package_names = [re.split(r"[<>=]", requirement)[0] for requirement in extras[extra]]
        assert re.findall(r"'([\w-]+)", command) == package_names


def test_no_remedy_names_a_package_that_no_index_has() -> None:
    # gdrkit and gdrkit-twins are not on a package index, so pip cannot install them by name.
    pattern = re.compile(r"pip install [^`\n]*gdrkit(\[|-twins)")
    sources = (ROOT / "gdrkit").rglob("*.py")
    assert [str(path) for path in sources if pattern.search(path.read_text())] == []


def test_program_that_is_not_python_has_version_zero(tmp_path: Path) -> None:
    write_program(tmp_path, "python3", "echo three")
    assert machine.python_version(str(tmp_path / "python3")) == (0,)
    assert machine.python_version(str(tmp_path / "missing")) == (0,)
    assert machine.python_version(sys.executable) == sys.version_info[:2]


def test_digest_changes_with_arguments_and_contents(tmp_path: Path) -> None:
    digested_file = tmp_path / "pyproject.toml"
    digested_file.write_text("a")
    first_digest = environments.compute_digest(["pip"], [digested_file])
    assert environments.compute_digest(["pip"], [digested_file]) == first_digest
    assert environments.compute_digest(["pip", ""], [digested_file]) != first_digest
    digested_file.write_text("b")
    assert environments.compute_digest(["pip"], [digested_file]) != first_digest


def make_shell_part(name: str, script: str) -> Part:
    return Part(name, ("sh", "-c", script))


def test_side_by_side_keeps_output_and_exit_codes(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # Each of the two commands waits for a file that the other command creates. Both end only if they run at the
    # same time.
    wait_for_other_script = "until [ -e {0}/{2} ]; do :; done; echo {1}; echo {1}; exit {3}"
    parts = [
        make_shell_part(
            name,
            f"echo {name}; touch {tmp_path}/{name}; "
            + wait_for_other_script.format(tmp_path, name, other_name, exit_code),
        )
        for name, other_name, exit_code in (("first", "second", 0), ("second", "first", 3))
    ]
    assert call_side_by_side(parts, jobs_max=2) == {"first": 0, "second": 3}
    output = capfd.readouterr().out
    assert "first\nfirst\nfirst\n" in output
    assert "second\nsecond\nsecond\n" in output


def test_side_by_side_runs_no_more_than_jobs(tmp_path: Path) -> None:
    # mkdir fails if another command runs at the same time.
    command = f"mkdir {tmp_path}/one && rmdir {tmp_path}/one"
    exit_codes = call_side_by_side([make_shell_part(str(number), command) for number in range(5)], jobs_max=1)
    assert exit_codes == dict.fromkeys(map(str, range(5)), 0)


def test_every_default_case_file_is_in_one_part() -> None:
    part_paths = [path for paths in list_suite_parts().values() for path in paths]
    files_of_parts = [file for path in part_paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    default_files = {*(ROOT / "suites").rglob("test_*.py"), *(ROOT / "hardware" / "throughput").rglob("test_*.py")}
    assert sorted(files_of_parts) == sorted(path for path in default_files if path.relative_to(ROOT).parts[1] != "meta")


def test_quiet_command_reports_that_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    assert commands.call(["sleep", "0.5"], progress_period_s=0.05) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "> sleep 0.5"
    assert len(lines) > 2
    assert lines[1].startswith("  sleep is running (")
