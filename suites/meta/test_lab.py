"""The lab (a virtual machine with the kernel's RDMA stack) reports in one sentence why it cannot run, with exit code 3.

Shell scripts replace the programs that the lab calls, e.g. QEMU. The last cases check the comparison of the
records of the twin with the records of the kernel. A twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.records import make_record

from gdrkit.inventory import load_profile
from gdrkit.report import CaseReason, Verdict, append_record
from hardware.lab.__main__ import LARGE_CASES
from hardware.lab.errors import LabError
from hardware.lab.kernel import MODULE_FOLDERS
from hardware.lab.machine import Limits, Machine, can_virtualize
from hardware.lab.pairs import Pair, compare, find_missing_refusals, format_table

if TYPE_CHECKING:
    from collections.abc import Callable

    RunLab = Callable[..., subprocess.CompletedProcess[str]]

PROJECT_ROOT = Path(__file__).resolve().parents[2]
# Programs that the lab calls.
LAB_PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "ip", "rdma", "vng")
CASE_FILE = "suites/contract/rdma/test_bounds.py"


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def lab_folder(tmp_path: Path) -> Path:
    """A folder `bin` in which every program of the lab does nothing and succeeds, and a kernel in `kernel`."""
    program_folder = tmp_path / "bin"
    program_folder.mkdir()
    for name in LAB_PROGRAMS:
        write_script(program_folder / name, "exit 0")
    for name in ("bash", "sh", "sleep", "env", "git", "dirname"):
        program_path = shutil.which(name)
        if program_path:
            (program_folder / name).symlink_to(program_path)
    (tmp_path / "kernel" / "boot").mkdir(parents=True)
    (tmp_path / "kernel" / "boot" / "vmlinuz-1").touch()
    (tmp_path / "kernel" / "ready").write_text("\n".join(MODULE_FOLDERS))
    return tmp_path


@pytest.fixture
def run_lab(lab_folder: Path) -> RunLab:
    """A function that runs the lab with the programs of `lab_folder` only."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "hardware.lab",
            f"--tools={lab_folder / 'bin'}",
            f"--cache={lab_folder / 'kernel'}",
        ]
        pythonpath = os.pathsep.join([str(PROJECT_ROOT), *sys.path])
        environ = {**os.environ, "PATH": str(lab_folder / "bin"), "PYTHONPATH": pythonpath}
        return subprocess.run(
            # A few quick cases are sufficient, because the errors in these tests occur before or after the cases.
            [*command, f"--output={lab_folder / 'run'}", *options, CASE_FILE, "-k", "first-byte"],
            cwd=PROJECT_ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


def get_sentence(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence that the lab printed."""
    assert result.returncode == 3, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    # The lab also prints whether its virtual machine uses KVM, and whether it starts the machine a second time.
    status_texts = ("virtual machine by", "it is started again")
    (line,) = [
        line
        for line in result.stdout.splitlines()
        if line.startswith("lab: ") and not any(text in line for text in status_texts)
    ]
    return line


def test_missing_qemu_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "bin" / "qemu-system-x86_64").unlink()
    assert "qemu-system-x86" in get_sentence(run_lab())


def test_missing_virtme_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "bin" / "vng").unlink()
    assert "virtme-ng" in get_sentence(run_lab())


def test_missing_kernel_without_apt_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "kernel" / "ready").unlink()
    assert "apt is missing" in get_sentence(run_lab())


def test_apt_without_kernel_package_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "kernel" / "ready").unlink()
    for name in ("apt-get", "apt-cache"):
        write_script(lab_folder / "bin" / name, "exit 1")
    assert "apt has no kernel package" in get_sentence(run_lab())


def test_failed_kernel_download_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "kernel" / "ready").unlink()
    write_script(lab_folder / "bin" / "apt-cache", 'echo "  Depends: linux-image-9.9-amd64"')
    write_script(lab_folder / "bin" / "apt-get", 'echo "E: Failed to fetch it" >&2; exit 100')
    assert "apt-get download failed: E: Failed to fetch it" in get_sentence(run_lab())


def test_broken_kvm_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    (lab_folder / "cpuinfo").write_text("flags\t\t: fpu vmx sse\n")
    (lab_folder / "kvm").touch()
    sentence = get_sentence(run_lab(f"--cpuinfo={lab_folder / 'cpuinfo'}", f"--kvm={lab_folder / 'kvm'}"))
    assert "KVM_GET_API_VERSION) failed: " in sentence
    assert "--tcg" in sentence


@pytest.mark.parametrize("flags", ["fpu sse", "fpu not_vmx vmxnet"])
def test_kvm_device_without_cpu_flags_is_not_used(tmp_path: Path, flags: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    (tmp_path / "kvm").touch()
    assert not can_virtualize(cpuinfo=tmp_path / "cpuinfo", device=tmp_path / "kvm")


def test_guest_that_does_not_boot_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    write_script(lab_folder / "bin" / "vng", "exec sleep 1000")
    start_s = time.monotonic()
    assert "did not boot within 1 s" in get_sentence(run_lab("--tcg", "--boot-limit-s=1", "--limit-s=1"))
    assert time.monotonic() - start_s < 60


def test_guest_is_started_again_if_its_boot_hangs(lab_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The first start hangs before the boot. After a boot, the guest creates `booted`, and it writes its exit code to
    # `code`.
    write_script(lab_folder / "bin" / "vng", "[ -e hung ] || { : >hung; exec sleep 1000; }; : >booted; echo 3 >code")
    machine = Machine(
        kernel_image=lab_folder / "kernel" / "boot" / "vmlinuz-1", tools_folder=lab_folder / "bin", use_kvm=False
    )
    assert machine.run(lab_folder / "no_script", output_folder=lab_folder, limits=Limits(boot_s=8, run_s=30)) == 3
    assert "did not boot within 8 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "guest_script",
    [
        # SIGTERM is ignored by a child of the guest, or by the guest itself.
        pytest.param('trap "" TERM; sleep 1000 & : >booted; wait', id="child"),
        pytest.param('trap "" TERM; : >booted; while :; do sleep 1; done', id="guest"),
    ],
)
def test_guest_that_hangs_is_killed_with_its_children(lab_folder: Path, guest_script: str) -> None:
    write_script(lab_folder / "bin" / "vng", guest_script)
    machine = Machine(
        kernel_image=lab_folder / "kernel" / "boot" / "vmlinuz-1", tools_folder=lab_folder / "bin", use_kvm=False
    )
    start_s = time.monotonic()
    with pytest.raises(LabError, match="did not end within 1 s"):
        machine.run(lab_folder / "no_script", output_folder=lab_folder, limits=Limits(boot_s=30, run_s=1))
    # run() returns only after every process that could write to the output has ended.
    assert time.monotonic() - start_s < 60


def test_guest_without_result_is_reported(lab_folder: Path, run_lab: RunLab) -> None:
    write_script(lab_folder / "bin" / "vng", "exit 7")
    assert "exit code of vng: 7" in get_sentence(run_lab("--tcg"))


@pytest.mark.parametrize("case", LARGE_CASES)
def test_large_cases_exist(case: str) -> None:
    command = [sys.executable, "-m", "pytest", "-c", "suites/pytest.ini", "-q", "--collect-only", f"--deselect={case}"]
    completed = subprocess.run(
        [*command, f"suites/{case.partition('[')[0]}"], cwd=PROJECT_ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout
    assert re.search(r"[1-9]\d* deselected", completed.stdout)


def test_pair_agrees_only_if_it_passes_on_both() -> None:
    # The arguments of Pair are a case, its outcome on the twin, and its outcome on the kernel.
    pairs = [
        Pair("a", "pass", "pass"),
        Pair("b", "pass", "fail"),
        Pair("c", "pass", "not_run"),
        Pair("d", "not_run", "not_run"),
        Pair("e", "pass", "absent"),
        Pair("f", "pass", "refused"),
        Pair("i", "unproven", "refused"),
        Pair("j", "unproven", "pass"),
        Pair("g", "fail", "refused"),
        Pair("h", "fail", "fail"),
    ]
    assert [pair.case for pair in pairs if pair.agrees] == ["a", "j"]
    assert [pair.case for pair in pairs if pair.refused] == ["f", "i"]
    assert [pair.case for pair in pairs if pair.differs] == ["b", "e", "g", "h"]
    marked_cases = [line.split()[0] for line in format_table(pairs).splitlines() if line.endswith("DIFFERS")]
    assert marked_cases == ["b", "e", "g", "h"]


def test_refusal_differs_from_a_case_that_did_not_run(tmp_path: Path) -> None:
    device_reason = CaseReason(text="no dma-buf regions on rxe0", need="verbs.dmabuf_region", foreseen=True)
    twin_reason = CaseReason(text="no twin", need="software(verbs)", foreseen=True)
    kernel_records = [
        make_record(Verdict.NOT_RUN, case="refused", reasons=(device_reason,), evidence={"refused": [{}]}),
        make_record(Verdict.NOT_RUN, case="not tried", reasons=(device_reason,)),
        make_record(Verdict.NOT_RUN, case="lacks more", reasons=(device_reason, twin_reason)),
        make_record(Verdict.FAIL, case="another error", reasons=(CaseReason(text="no"),), evidence={"refused": [{}]}),
        make_record(case="host"),
    ]
    for record in kernel_records:
        append_record(tmp_path / "kernel.jsonl", record)
        append_record(tmp_path / "twin.jsonl", make_record(case=record.case))
    pairs = {pair.case: pair for pair in compare(tmp_path / "twin.jsonl", tmp_path / "kernel.jsonl")}
    assert [name for name, pair in pairs.items() if pair.refused] == ["refused"]
    assert [name for name, pair in pairs.items() if pair.agrees] == ["host"]
    assert [name for name, pair in pairs.items() if pair.differs] == ["another error"]
    assert find_missing_refusals(kernel_records, load_profile("lab")) == (
        "not tried had to be refused but did not run",
    )
    assert find_missing_refusals(kernel_records, load_profile("bare")) == ()
