"""Detection of whether the owner process of a handle runs or waits for a CPU, with synthetic and real processes."""

from __future__ import annotations

import subprocess
import sys
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from gdrkit.host import HostTree, ProcessIdentity, is_running, processor_wait_s, this_process

if TYPE_CHECKING:
    from pathlib import Path

BOOT_ID = uuid.UUID("11111111-2222-3333-4444-555555555555")
OWNER = ProcessIdentity(boot_id=BOOT_ID.bytes, process_id=77, pid_namespace=4026531836, started_ticks=1234)
# The program name contains parentheses and spaces. A parser that splits the line at spaces would misread it.
STAT_TEMPLATE = "77 (a) b (c) {state} 1 77 77 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 {start_ticks} 1000 10"


def write_proc(
    root: Path, *, boot_id: str = str(BOOT_ID), pid_namespace: int = 4026531836, stat_line: str | None = None
) -> HostTree:
    (root / "proc/sys/kernel/random").mkdir(parents=True)
    (root / "proc/sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(f"pid:[{pid_namespace}]")
    if stat_line is not None:
        (root / "proc/77").mkdir()
        (root / "proc/77/stat").write_text(stat_line)
    return HostTree(root)


@pytest.mark.parametrize(
    ("state", "start_ticks", "is_owner_running"),
    [("S", 1234, True), ("R", 1234, True), ("Z", 1234, False), ("S", 1235, False)],
)
def test_process_is_identified_by_id_and_start_time(
    tmp_path: Path,
    state: str,
    start_ticks: int,
    is_owner_running: bool,  # noqa: FBT001
) -> None:
    assert (
        is_running(OWNER, write_proc(tmp_path, stat_line=STAT_TEMPLATE.format(state=state, start_ticks=start_ticks)))
        is is_owner_running
    )


def test_process_of_an_earlier_boot_is_not_running(tmp_path: Path) -> None:
    tree_after_reboot = write_proc(
        tmp_path, boot_id=str(uuid.UUID(int=1)), stat_line=STAT_TEMPLATE.format(state="S", start_ticks=1234)
    )
    assert is_running(OWNER, tree_after_reboot) is False


def test_process_in_another_container_is_unknown(tmp_path: Path) -> None:
    tree_of_container = write_proc(tmp_path, pid_namespace=4026531999)
    assert is_running(OWNER, tree_of_container) is None
    # 0 means that the owner could not read the number of its PID namespace.
    assert is_running(replace(OWNER, pid_namespace=0), tree_of_container) is None


def test_real_process_is_running_until_it_ends() -> None:
    assert is_running(this_process()) is True
    program = (
        "from gdrkit.host import this_process; process = this_process();"
        "print(process.boot_id.hex(), process.process_id, process.pid_namespace, process.started_ticks, flush=True)\n"
        "input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        boot_id_hex, *numbers = child.stdout.readline().split()
        process_id, pid_namespace, start_ticks = map(int, numbers)
        owner = ProcessIdentity(
            boot_id=bytes.fromhex(boot_id_hex),
            process_id=process_id,
            pid_namespace=pid_namespace,
            started_ticks=start_ticks,
        )
        assert is_running(owner) is True
        child.communicate("\n")
    assert is_running(owner) is False


def test_starvation_is_that_of_the_longest_waiting_thread(tmp_path: Path) -> None:
    # The second number in schedstat is the time for which the thread waited for a CPU, in nanoseconds.
    for thread_id, schedstat in {
        "77": "5000 1500000000 9\n",
        "78": "0 2500000000 1\n",
        "79": "strange",
        "80": "",
    }.items():
        (tmp_path / "proc/77/task" / thread_id).mkdir(parents=True)
        (tmp_path / "proc/77/task" / thread_id / "schedstat").write_text(schedstat)
    assert processor_wait_s(77, HostTree(tmp_path)) == 2.5
    assert processor_wait_s(78, HostTree(tmp_path)) == 0
