"""The Slurm gate in deploy/ works on software twins, and the other files pass the checkers of their formats.

The gate is a script that slurmd runs on a node before and after each job. If it fails, Slurm drains the node.
The checkers are shellcheck, systemd-analyze and promtool. A case does not run if its checker is not installed. Software
twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gdrkit.harness.needs import host, needs

DEPLOY_FOLDER = Path(__file__).resolve().parents[2] / "deploy"
GATE_SCRIPT = DEPLOY_FOLDER / "slurm" / "gate.sh"
# The systemd units, each with the file name that systemd-analyze gets. A template (@) needs an instance name: data.
CHECKED_NAME_BY_UNIT = {
    "gdrkit-agent@.service": "gdrkit-agent@data.service",
    "gdrkit-serve.service": "gdrkit-serve.service",
}


def run_gate(tmp_path: Path, *, gpus: str, options: str) -> subprocess.CompletedProcess[str]:
    """Run the gate as slurmd does, with the gdrkit of this environment."""
    gdrkit_script = tmp_path / "gdrkit"
    gdrkit_script.write_text(f'#!/bin/sh\nexec {sys.executable} -m gdrkit "$@"\n')
    gdrkit_script.chmod(0o755)
    environ = {**os.environ, "GDRKIT": str(gdrkit_script), "GDRKIT_OPTIONS": options, "SLURM_JOB_ID": "7"}
    environ |= {"SLURM_JOB_GPUS": gpus, "GDRKIT_BUDGET_S": "90"}
    return subprocess.run([str(GATE_SCRIPT)], env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_gate_admits_a_job_without_gpus_at_once(tmp_path: Path) -> None:
    completed = run_gate(tmp_path, gpus="", options="--profile no-such-profile")
    assert (completed.returncode, completed.stdout) == (0, "")


def test_gate_admits_a_node_that_passes(tmp_path: Path) -> None:
    completed = run_gate(tmp_path, gpus="0,1", options="--software")
    assert completed.returncode == 0, completed.stdout
    assert "software only" in completed.stdout


def test_gate_refuses_a_node_with_the_exit_code_of_check(tmp_path: Path) -> None:
    completed = run_gate(tmp_path, gpus="0,1", options="--software --profile no-such-profile")
    assert completed.returncode == 2
    assert "no-such-profile" in completed.stdout


@needs(host.program("shellcheck"))
def test_scripts_pass_shellcheck() -> None:
    subprocess.run(["shellcheck", *map(str, DEPLOY_FOLDER.rglob("*.sh"))], check=True, timeout=60)


@needs(host.program("systemd-analyze"))
@pytest.mark.parametrize("unit", CHECKED_NAME_BY_UNIT)
def test_unit_passes_systemd_analyze(unit: str, tmp_path: Path) -> None:
    # The command of the unit is not installed here, and systemd-analyze requires that it exists.
    unit_text = re.sub(r"/opt/gdrkit/bin/gdrkit", sys.executable, (DEPLOY_FOLDER / "systemd" / unit).read_text())
    unit_file = tmp_path / CHECKED_NAME_BY_UNIT[unit]
    unit_file.write_text(unit_text)
    command = ["systemd-analyze", "verify", "--man=no", str(unit_file)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (completed.returncode, completed.stdout + completed.stderr) == (0, "")


def test_agent_unit_leaves_its_mount_visible() -> None:
    """The unit has no option with which systemd would hide the FUSE mount of the agent from other processes."""
    unit_text = (DEPLOY_FOLDER / "systemd" / "gdrkit-agent@.service").read_text()
    assert not re.findall(r"^(?:Private|Protect|ReadOnly|Inaccessible|Root|Bind)\w*=", unit_text, re.MULTILINE)


@needs(host.program("promtool"))
def test_alerts_fire_for_the_hosts_that_they_are_about() -> None:
    command = ["promtool", "test", "rules", "gdrkit.tests.yml"]
    subprocess.run(command, cwd=DEPLOY_FOLDER / "prometheus", check=True, timeout=60)


def test_options_in_the_files_exist() -> None:
    """Every `gdrkit COMMAND` in deploy/ is a command, and gdrkit knows its options."""
    text_of_all_files = "\n".join(
        path.read_text() for path in DEPLOY_FOLDER.rglob("*") if path.is_file() and path.suffix != ".pyc"
    )
    commands = set(re.findall(r"gdrkit (agent|serve|check|qualify)\b", text_of_all_files))
    assert commands == {"agent", "serve", "check", "qualify"}
    for command, option in re.findall(r"gdrkit (agent|serve|check|qualify)\b[^`\n]*?(--[a-z-]+)", text_of_all_files):
        help_output = subprocess.run(
            [sys.executable, "-m", "gdrkit", command, "--help"], capture_output=True, text=True, check=True, timeout=60
        )
        assert option in help_output.stdout, (command, option)
