"""The rank processes of an NCCL job: their devices, their output, and their end at a deadline or after a failure."""

from __future__ import annotations

import os
import re
import select
import sys
from typing import TYPE_CHECKING

import pytest
from support.nccl_rank import order_visible_devices
from support.rank_processes import RankError, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60.0


def make_rank_command(program: str) -> list[str]:
    """Return the command of a rank that runs `program`. When SIGABRT ends the rank, it prints its stack."""
    return [sys.executable, "-X", "faulthandler", "-c", program]


def test_rank_sees_all_devices_with_its_own_first() -> None:
    assert [order_visible_devices({}, rank=rank, rank_count=3) for rank in range(3)] == [
        list("012"),
        list("120"),
        list("201"),
    ]
    assert order_visible_devices({"CUDA_VISIBLE_DEVICES": "5,GPU-7"}, rank=1, rank_count=2) == ["GPU-7", "5"]


def test_first_line_of_rank_0_is_passed_to_the_others(tmp_path: Path) -> None:
    rank_0_command = make_rank_command("print('an id'); print('done')")
    other_command = make_rank_command("import sys; print(sys.stdin.readline().strip().upper())")
    output = run_ranks(
        [rank_0_command, other_command, other_command], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S
    )
    assert output == [["an id", "done"], ["AN ID"], ["AN ID"]]


def test_deadlocked_ranks_end_at_the_deadline(tmp_path: Path) -> None:
    waiting_command = make_rank_command("import sys; sys.stdin.read()")
    with pytest.raises(RankError, match=r"did not end within 1 s\n--- rank 0: was killed") as error_info:
        run_ranks([waiting_command, waiting_command], folder=tmp_path, environ=os.environ, deadline_s=1.0)
    assert "--- rank 1: was killed" in str(error_info.value)


def test_failed_rank_ends_the_others_with_their_stacks(tmp_path: Path) -> None:
    waiting_command = make_rank_command("import os, sys; print(os.getpid(), flush=True); sys.stdin.read()")
    failing_command = make_rank_command("import sys; sys.exit(f'no device for {sys.stdin.readline()}')")
    with pytest.raises(RankError, match=r"^rank 1 ended with exit code 1\n") as error_info:
        run_ranks([waiting_command, failing_command], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
    message = str(error_info.value)
    assert "--- rank 1: exit 1\nno device for " in message
    # The stack of rank 0 names the line that rank 0 was executing.
    assert re.search(r'--- rank 0: was killed\nFatal Python error: Aborted[\s\S]*<string>", line 1', message)
    # Rank 0 printed its process ID. Rank 1 received this line, and added it to its error.
    pid_match = re.search(r"no device for (\d+)", message)
    assert pid_match is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_match[1]), 0)


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    """The child of rank 0 ignores SIGABRT and holds a FIFO open. End of file on the FIFO shows the end of the child."""
    os.mkfifo(tmp_path / "alive")
    alive_fd = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child_program = "import os, signal, sys; signal.signal(signal.SIGABRT, signal.SIG_IGN)"
    child_program += (
        f"; fifo_fd = os.open({str(tmp_path / 'alive')!r}, os.O_WRONLY); print('it lives', flush=True); signal.pause()"
    )
    command_with_child = make_rank_command(
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"{child_program!r}], stdout=subprocess.PIPE); print(child.stdout.readline(), flush=True); sys.stdin.read()"
    )
    failing_command = make_rank_command("import sys; sys.exit(sys.stdin.readline())")
    try:
        with pytest.raises(RankError, match=r"--- rank 1: exit 1\nb.it lives"):
            run_ranks([command_with_child, failing_command], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
        assert select.select([alive_fd], [], [], 10.0)[0], "the child of rank 0 still runs"
        assert os.read(alive_fd, 1) == b""
    finally:
        os.close(alive_fd)


def test_nccl_output_is_part_of_the_failure(tmp_path: Path) -> None:
    failing_command = make_rank_command(
        "import os, sys; open(os.environ['NCCL_DEBUG_FILE'], 'w').write('NCCL WARN why'); sys.exit(3)"
    )
    with pytest.raises(RankError, match=r"rank 0 ended with exit code 3\n--- rank 0: exit 3\nNCCL WARN why"):
        run_ranks([failing_command], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
