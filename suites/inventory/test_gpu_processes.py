"""Observation of the processes that have a GPU open, with and without privilege, and the rules about these processes.

The cases need no GPU: the observed processes open files in a temporary folder that have the names of device nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from inventory.healthy_machine import make_gpu_processes, make_machine
from inventory.rule_examples import JOB_VARIABLES, PTRACE_CAPABILITY_FILES
from support.other_user import folder_for_all_users, run_program

from gdrkit import serialization
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import host, needs
from gdrkit.inventory import Diagnosis, Observation, diagnose, rule_of
from gdrkit.inventory.gpu_processes import GPU_PROCESSES, NOT_READABLE, GpuProcess, observe_gpu_processes
from gdrkit.report.doctor import describe_diagnosis
from gdrkit.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NODE_NAMES = ("nvidiactl", "nvidia-uvm", "nvidia0")
OTHER_USER_ID = "65534"
# A program that holds files open until its standard input ends. Its arguments are the user ID to which it
# changes, and the paths of the files.
HOLD_FILES_PROGRAM = """
import os, sys
files = [open(name) for name in sys.argv[2:]]
os.setuid(int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
OBSERVE_AS_OTHER_USER_PROGRAM = """
import json, sys
from gdrkit import serialization
from gdrkit.inventory.gpu_processes import observe_gpu_processes
from support.other_user import become_unprivileged
become_unprivileged()
print(json.dumps(serialization.to_json_data(observe_gpu_processes(folder=sys.argv[1]))))
"""


@pytest.fixture
def node_folder() -> Iterator[Path]:
    """Yield a folder with files that have the names of device nodes."""
    with folder_for_all_users() as path:
        for name in NODE_NAMES:
            (path / name).touch()
        yield path


@contextlib.contextmanager
def hold_nodes(
    node_folder: Path,
    *options: str,
    user_id: str = "0",
    node_names: tuple[str, ...] = NODE_NAMES,
    program_text: str = HOLD_FILES_PROGRAM,
) -> Iterator[None]:
    """Run a process of a job that holds the nodes open until the block ends. `options` are options of unshare(1)."""
    prefix = ["unshare", *options] if options else []
    command = [*prefix, sys.executable, "-c", program_text, user_id, *(str(node_folder / name) for name in node_names)]
    environ = {**os.environ, "SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "0", "TOKEN": "of the job"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.communicate(timeout=60)


def parse_processes(observation: Observation) -> list[GpuProcess]:
    """Return the processes of an observation."""
    return [GpuProcess.parse(text) for title, text in observation.seen.items() if title != NOT_READABLE]


def count_refused_processes(observation: Observation) -> int:
    """Return the number of processes that could not be read."""
    match = re.match(r"whether (\d+) other processes use a GPU \(EACCES\): ", observation.seen.get(NOT_READABLE, ""))
    return int(match[1]) if match else 0


def test_process_has_its_user_limits_and_variables(node_folder: Path) -> None:
    with hold_nodes(node_folder, user_id=str(os.geteuid())):
        (process,) = parse_processes(observe_gpu_processes(folder=str(node_folder)))
    assert (process.user_id, process.gpus, process.has_contexts) == (os.geteuid(), ("nvidia0",), True)
    assert process.pid_namespace == os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - no Path is at hand.
    assert process.descriptors_count >= len(NODE_NAMES) + 3
    # The observation contains only the variables that the rules use, so not TOKEN.
    assert process.environment == {"CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "17"}


def test_process_without_contexts_is_a_monitor(node_folder: Path) -> None:
    with hold_nodes(node_folder, user_id=str(os.geteuid()), node_names=("nvidiactl", "nvidia0")):
        (process,) = parse_processes(observe_gpu_processes(folder=str(node_folder)))
    assert not process.has_contexts


@needs(host.capability("CAP_SYS_ADMIN"), host.capability("CAP_SETUID"), host.program("unshare"))
@pytest.mark.parametrize(
    ("options", "user_id", "verdict", "expected_text"),
    [
        ((), "0", Verdict.PASS, "no two of one job"),
        (("--pid", "--fork"), "0", Verdict.FAIL, "another PID namespace"),
        (("--ipc",), "0", Verdict.UNPROVEN, "another IPC namespace"),
        ((), OTHER_USER_ID, Verdict.UNPROVEN, "another user"),
    ],
)
def test_real_processes_cannot_share_by_cuda_ipc(
    node_folder: Path, tmp_path: Path, options: tuple[str, ...], user_id: str, verdict: Verdict, expected_text: str
) -> None:
    with hold_nodes(node_folder), hold_nodes(node_folder, *options, user_id=user_id):
        observation = observe_gpu_processes(folder=str(node_folder))
    assert len(parse_processes(observation)) == 2
    finding = rule_of("cuda-ipc-refused").apply(make_machine(tmp_path, observations={GPU_PROCESSES: observation}))
    assert (finding.verdict, expected_text in finding.text) == (verdict, True), finding.text


@needs(host.capability("CAP_SETUID"), host.capability("CAP_SYS_PTRACE"))
def test_unprivileged_reader_names_what_root_sees(node_folder: Path, tmp_path: Path) -> None:
    with hold_nodes(node_folder), hold_nodes(node_folder):
        completed = run_program(OBSERVE_AS_OTHER_USER_PROGRAM, str(node_folder))
        privileged_observation = observe_gpu_processes(folder=str(node_folder))
    assert completed.returncode == 0, completed.stderr
    unprivileged_observation = serialization.from_json_data(Observation, json.loads(completed.stdout))
    assert (len(parse_processes(privileged_observation)), len(parse_processes(unprivileged_observation))) == (2, 0)
    # A sandbox may protect some of its processes even from root.
    assert count_refused_processes(unprivileged_observation) >= count_refused_processes(privileged_observation) + 2
    for observation, verdict in ((privileged_observation, Verdict.PASS), (unprivileged_observation, Verdict.NOT_RUN)):
        diagnosis = diagnose(make_machine(tmp_path / verdict.value, observations={GPU_PROCESSES: observation}))
        (finding,) = [finding for finding in diagnosis.findings if finding.code == "cuda-ipc-refused"]
        assert finding.verdict is verdict
        unreadable_text = observation.seen.get(NOT_READABLE)
        assert unreadable_text is None or f"not seen: {unreadable_text}" in finding.text
        expected_lines = [] if unreadable_text is None else [f"{unreadable_text} (cuda-ipc-refused, descriptors-low)"]
        assert [line for line in diagnosis.privileges if "CAP_SYS_PTRACE" in line] == expected_lines


RENDEZVOUS_VARIABLES = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
OTHER_PID_NAMESPACE = {"pid_namespace": 4026532801}


@pytest.mark.parametrize(
    ("first_change", "second_change", "verdict"),
    [
        # No two processes belong to one job: they have no job ID, or different job IDs.
        ({"environment": {}}, {"environment": {}, "user_id": 1001}, Verdict.NOT_RUN),
        ({"environment": {}}, {"environment": {}, **OTHER_PID_NAMESPACE}, Verdict.NOT_RUN),
        (
            {"environment": JOB_VARIABLES},
            {"environment": JOB_VARIABLES | {"SLURM_JOB_ID": "18"}, **OTHER_PID_NAMESPACE},
            Verdict.NOT_RUN,
        ),
        # Two containers may both have the default address of torchrun, so an equal address does not show that they run
        # one job.
        (
            {"environment": RENDEZVOUS_VARIABLES},
            {"environment": RENDEZVOUS_VARIABLES, **OTHER_PID_NAMESPACE},
            Verdict.UNPROVEN,
        ),
        (
            {"environment": JOB_VARIABLES},
            {"environment": JOB_VARIABLES | {"PMIX_NAMESPACE": "x"}, **OTHER_PID_NAMESPACE},
            Verdict.UNPROVEN,
        ),
        ({}, {"ipc_namespace": 4026532802}, Verdict.UNPROVEN),
        ({}, {"user_id": 1001}, Verdict.UNPROVEN),
        ({}, {"environment": JOB_VARIABLES | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}, Verdict.UNPROVEN),
        ({}, {"environment": JOB_VARIABLES | {"CUDA_VISIBLE_DEVICES": "1,0"}}, Verdict.UNPROVEN),
        ({}, OTHER_PID_NAMESPACE, Verdict.FAIL),
    ],
)
def test_only_pid_namespaces_of_one_job_are_a_cause(
    tmp_path: Path, first_change: dict[str, Any], second_change: dict[str, Any], verdict: Verdict
) -> None:
    finding = rule_of("cuda-ipc-refused").apply(
        make_machine(tmp_path, observations=make_gpu_processes(first_change, second_change))
    )
    assert finding.verdict is verdict, finding.text
    assert "pid 4711 (python) and pid 4712 (python): " in finding.text


def test_imex_channel_leaves_pid_namespaces_undecided(tmp_path: Path) -> None:
    """If there is an IMEX channel, UCX and PyTorch use fabric handles instead of CUDA IPC (openucx/ucx #11514)."""
    files = {"/dev/nvidia-caps-imex-channels/channel0": ""}
    observed_machine = make_machine(tmp_path, files=files, observations=make_gpu_processes({}, OTHER_PID_NAMESPACE))
    assert rule_of("cuda-ipc-refused").apply(observed_machine).verdict is Verdict.UNPROVEN


@pytest.mark.parametrize("variable_name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("changes", "files", "verdict"),
    [
        (({}, {}), {}, Verdict.UNPROVEN),
        (({}, {}), PTRACE_CAPABILITY_FILES, Verdict.PASS),
        (({}, {}), PTRACE_CAPABILITY_FILES | {"/proc/sys/kernel/yama/ptrace_scope": "3\n"}, Verdict.UNPROVEN),
        (({},), {}, Verdict.NOT_RUN),
        ((), {}, Verdict.NOT_RUN),
    ],
)
def test_expandable_segments_need_ptrace_in_a_job(
    tmp_path: Path, variable_name: str, changes: tuple[dict[str, Any], ...], files: dict[str, str], verdict: Verdict
) -> None:
    environment = {variable_name: "expandable_segments:True"}
    observed_machine = make_machine(
        tmp_path, environment=environment, files=files, observations=make_gpu_processes(*changes)
    )
    finding = rule_of("cuda-ipc-refused").apply(observed_machine)
    assert (finding.verdict, "ptrace_scope" in finding.text) == (verdict, verdict is Verdict.UNPROVEN), finding.text


def test_capture_without_the_processes_stays_valid(tmp_path: Path) -> None:
    """Captures of earlier versions have no observation of the GPU processes."""
    machine_without_processes = replace(make_machine(tmp_path), observations={})
    findings = {
        rule_code: rule_of(rule_code).apply(machine_without_processes)
        for rule_code in ("cuda-ipc-refused", "descriptors-low")
    }
    assert findings["cuda-ipc-refused"].verdict is Verdict.NOT_RUN
    assert "were not read" in findings["cuda-ipc-refused"].text
    assert findings["descriptors-low"].text == "1048576 descriptors may be open"


def test_container_says_that_it_sees_no_process_outside(tmp_path: Path) -> None:
    links = {"/proc/self/ns/pid": "pid:[4026532801]"}
    finding = rule_of("cuda-ipc-refused").apply(
        make_machine(tmp_path, links=links, observations=make_gpu_processes({}))
    )
    assert (finding.verdict, "outside of this PID namespace" in finding.text) == (Verdict.NOT_RUN, True)


@pytest.mark.parametrize("program", ["\x1b]0;x\x07", "\x9b2J", "a\nb", "\u202ex"])
def test_name_of_a_process_cannot_control_a_terminal(tmp_path: Path, program: str) -> None:
    """Each user can choose the names of their processes (PR_SET_NAME), and root reads these names."""
    observations = make_gpu_processes({}, {"program": program, **OTHER_PID_NAMESPACE})
    # The other texts of a capture can contain such characters too.
    observations[GPU_PROCESSES].seen[NOT_READABLE] = program
    diagnosis = diagnose(make_machine(tmp_path, observations=observations))
    for text in (describe_diagnosis(diagnosis, verbose=True), diagnosis.to_json()):
        assert all(line.isprintable() for line in text.splitlines()), ascii(text)
    (finding,) = diagnosis.findings_with(Verdict.FAIL)
    assert finding.text.isprintable()
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


@needs(host.capability("CAP_SYS_PTRACE"))
def test_name_set_by_a_process_is_escaped(node_folder: Path) -> None:
    program_text = HOLD_FILES_PROGRAM.replace(
        "import os, sys", "import os, sys; open('/proc/self/comm', 'w').write('\\x1b[2Jx')"
    )
    with hold_nodes(node_folder, user_id=str(os.geteuid()), program_text=program_text):
        observation = observe_gpu_processes(folder=str(node_folder))
    (title,) = observation.seen.keys() - {NOT_READABLE}
    assert "(\\x1b[2Jx)" in title


def test_full_bar1_names_the_holders_of_dmabufs(tmp_path: Path) -> None:
    from inventory.rule_examples import FAILING_EXAMPLES

    changes = FAILING_EXAMPLES["bar1-small", "full"] | {
        "observations": make_gpu_processes({}, {"dmabufs_count": 900, "dmabuf_bytes": 3 << 30})
    }
    finding = rule_of("bar1-small").apply(make_machine(tmp_path, **changes))
    assert "pid 4712 (python) holds 900 dma-bufs with 3 GiB" in finding.text


@pytest.mark.parametrize("text", ["{", '{"process_id": "x"}', "[" * 100_000])
def test_malformed_observation_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as error_info:
        GpuProcess.parse(text)
    assert error_info.value.reason is Reason.MALFORMED
    observations = {GPU_PROCESSES: Observation(GPU_PROCESSES, seen={"pid 1 (x)": text})}
    finding = rule_of("cuda-ipc-refused").apply(make_machine(tmp_path, observations=observations))
    assert finding.verdict is Verdict.UNPROVEN
