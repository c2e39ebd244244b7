"""A lab that cannot run prints one sentence and ends with 3, in time. Small scripts replace the broken programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.records import record_of

from gdrkit.inventory import load_profile
from gdrkit.report import CaseReason, Verdict, append_record
from hardware.lab.errors import LabError
from hardware.lab.machine import Limits, Machine, can_virtualize
from hardware.lab.pairs import Pair, compared, table, unrefused

if TYPE_CHECKING:
    from collections.abc import Callable

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "ip", "rdma", "vng")
NO_CASE = "suites/contract/rdma/test_bounds.py"


def write(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """A folder `bin` with a do-nothing version of every program that the lab uses, and a kernel in `kernel`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        write(programs / name, "exit 0")
    for name in ("bash", "sh", "sleep", "env", "git", "dirname"):
        found = shutil.which(name)
        if found:
            (programs / name).symlink_to(found)
    (tmp_path / "kernel" / "boot").mkdir(parents=True)
    (tmp_path / "kernel" / "boot" / "vmlinuz-1").touch()
    (tmp_path / "kernel" / "ready").touch()
    return tmp_path


@pytest.fixture
def lab(bench: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs the lab with those programs and none of the system."""

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hardware.lab", f"--tools={bench / 'bin'}", f"--cache={bench / 'kernel'}"]
        pythonpath = os.pathsep.join([str(PROJECT_ROOT), *sys.path])
        environ = {**os.environ, "PATH": str(bench / "bin"), "PYTHONPATH": pythonpath}
        return subprocess.run(
            # A quick part of the cases is sufficient, because the checks here are about the time before or after them.
            [*command, f"--output={bench / 'run'}", *options, NO_CASE, "-k", "first-byte"],
            cwd=PROJECT_ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    return run


def said(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one sentence that the lab printed."""
    assert result.returncode == 3, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    (line,) = [
        line for line in result.stdout.splitlines() if line.startswith("lab: ") and "virtual machine by" not in line
    ]
    return line


def test_without_qemu(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (bench / "bin" / "qemu-system-x86_64").unlink()
    assert "qemu-system-x86" in said(lab())


def test_without_virtme(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (bench / "bin" / "vng").unlink()
    assert "virtme-ng" in said(lab())


def test_without_a_kernel_and_without_apt(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (bench / "kernel" / "ready").unlink()
    assert "no apt here" in said(lab())


def test_with_an_apt_that_knows_no_kernel(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (bench / "kernel" / "ready").unlink()
    for name in ("apt-get", "apt-cache"):
        write(bench / "bin" / name, "exit 1")
    assert "apt knows no kernel package" in said(lab())


def test_with_a_kernel_package_that_cannot_be_downloaded(
    bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (bench / "kernel" / "ready").unlink()
    write(bench / "bin" / "apt-cache", 'echo "  Depends: linux-image-9.9-amd64"')
    write(bench / "bin" / "apt-get", 'echo "E: Failed to fetch it" >&2; exit 100')
    assert "E: Failed to fetch it" in said(lab())


def test_with_a_broken_kvm(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    (bench / "cpuinfo").write_text("flags\t\t: fpu vmx sse\n")
    (bench / "kvm").touch()
    sentence = said(lab(f"--cpuinfo={bench / 'cpuinfo'}", f"--kvm={bench / 'kvm'}"))
    assert "broken" in sentence
    assert "--tcg" in sentence


@pytest.mark.parametrize("flags", ["fpu sse", "fpu not_vmx vmxnet"])
def test_a_kvm_device_alone_is_not_believed(tmp_path: Path, flags: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    (tmp_path / "kvm").touch()
    assert not can_virtualize(cpuinfo=tmp_path / "cpuinfo", device=tmp_path / "kvm")


def test_with_a_guest_that_hangs(bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    write(bench / "bin" / "vng", "exec sleep 1000")
    started = time.monotonic()
    assert "did not come up within 1 s" in said(lab("--tcg", "--boot-limit-s=1", "--limit-s=1"))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    "guest",
    [
        # A child ignores SIGTERM, or the guest itself does.
        pytest.param('trap "" TERM; sleep 1000 & : >booted; wait', id="child"),
        pytest.param('trap "" TERM; : >booted; while :; do sleep 1; done', id="deaf"),
    ],
)
def test_a_guest_that_came_up_and_hangs_is_ended_with_all_that_it_started(bench: Path, guest: str) -> None:
    write(bench / "bin" / "vng", guest)
    machine = Machine(image=bench / "kernel" / "boot" / "vmlinuz-1", tools=bench / "bin", kvm=False)
    started = time.monotonic()
    with pytest.raises(LabError, match="did not end within 1 s"):
        machine.run(bench / "no_script", output=bench, limits=Limits(boot_s=30, run_s=1))
    # The output ends only when every process that could write to it has ended.
    assert time.monotonic() - started < 60


def test_with_a_guest_that_ends_without_a_result(
    bench: Path, lab: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    write(bench / "bin" / "vng", "exit 7")
    assert "vng ended with 7" in said(lab("--tcg"))


def test_only_what_passes_on_both_agrees_and_a_refusal_is_counted_apart() -> None:
    pairs = [
        Pair("a", "pass", "pass"),
        Pair("b", "pass", "fail"),
        Pair("c", "pass", "not_run"),
        Pair("d", "not_run", "not_run"),
        Pair("e", "pass", "absent"),
        Pair("f", "pass", "refused"),
        Pair("g", "fail", "refused"),
        Pair("h", "fail", "fail"),
    ]
    assert [pair.case for pair in pairs if pair.agrees] == ["a"]
    assert [pair.case for pair in pairs if pair.refused] == ["f"]
    assert [pair.case for pair in pairs if pair.differs] == ["b", "e", "g", "h"]
    marked = [line.split()[0] for line in table(pairs).splitlines() if line.endswith("DIFFERS")]
    assert marked == ["b", "e", "g", "h"]


def test_a_refusal_is_told_from_what_did_not_run(tmp_path: Path) -> None:
    device = CaseReason(text="no dma-buf regions on rxe0", need="verbs.dmabuf_region", foreseen=True)
    twin = CaseReason(text="no twin", need="software(verbs)", foreseen=True)
    kernel = [
        record_of(Verdict.NOT_RUN, case="refused", reasons=(device,), evidence={"refused": [{}]}),
        record_of(Verdict.NOT_RUN, case="not tried", reasons=(device,)),
        record_of(Verdict.NOT_RUN, case="lacks more", reasons=(device, twin)),
        record_of(Verdict.FAIL, case="another error", reasons=(CaseReason(text="no"),), evidence={"refused": [{}]}),
        record_of(case="host"),
    ]
    for record in kernel:
        append_record(tmp_path / "kernel.jsonl", record)
        append_record(tmp_path / "twin.jsonl", record_of(case=record.case))
    pairs = {pair.case: pair for pair in compared(tmp_path / "twin.jsonl", tmp_path / "kernel.jsonl")}
    assert [name for name, pair in pairs.items() if pair.refused] == ["refused"]
    assert [name for name, pair in pairs.items() if pair.agrees] == ["host"]
    assert [name for name, pair in pairs.items() if pair.differs] == ["another error"]
    assert unrefused(kernel, load_profile("lab")) == ("not tried was to be refused and did not run",)
    assert unrefused(kernel, load_profile("bare")) == ()
