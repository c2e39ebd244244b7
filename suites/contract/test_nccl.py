"""NCCL as the throughput cases call it, and the processes of its ranks, which end at a deadline."""

from __future__ import annotations

import ctypes
import os
import re
import select
import sys
from typing import TYPE_CHECKING

import pytest
from support.nccl import FUNCTIONS, UniqueId, folder_of_nccl
from support.nccl_rank import visible_devices
from support.python_child import suites_environ
from support.rank_processes import RankError, run_ranks

from gdrkit.harness.needs import host, needs

if TYPE_CHECKING:
    from pathlib import Path

NEEDS_NCCL = needs(host.module("nvidia.nccl"))
# The sizes of the types of nccl.h that are not pointers, in bytes.
WIDTHS_BYTES = {
    "int": 4,
    "ncclDataType_t": 4,
    "ncclRedOp_t": 4,
    "size_t": 8,
    "ncclComm_t": 8,
    "cudaStream_t": 8,
    "ncclUniqueId": 128,
}
DEADLINE_S = 60.0


def rank_command(program: str) -> list[str]:
    """Return the command of a rank that runs `program` and prints its stack when it is terminated."""
    return [sys.executable, "-X", "faulthandler", "-c", program]


@NEEDS_NCCL
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nccl_argument_widths_match_the_header(name: str) -> None:
    folder = folder_of_nccl()
    assert folder is not None
    declaration = re.search(rf"ncclResult_t\s+{name}\(([^)]*)\)", (folder / "include" / "nccl.h").read_text())
    assert declaration is not None
    parameters = declaration[1].split(",")
    type_names = [re.sub(r"\bconst\b", "", parameter).rpartition(" ")[0].strip() for parameter in parameters]
    expected_bytes = [
        8 if "*" in parameter else WIDTHS_BYTES[type_name]
        for parameter, type_name in zip(parameters, type_names, strict=True)
    ]
    assert [ctypes.sizeof(argument_type) for argument_type in FUNCTIONS[name]] == expected_bytes


@NEEDS_NCCL
def test_communicator_ids_are_unique(tmp_path: Path) -> None:
    command = rank_command(
        "from support.nccl import *; n = Nccl(); print(n.version, n.unique_id().hex(), n.unique_id().hex())"
    )
    ((line,),) = run_ranks([command], folder=tmp_path, environ=suites_environ(), deadline_s=DEADLINE_S)
    version, first, second = line.split()
    assert int(version) > 22000
    assert first != second
    assert len(first) == len(second) == 2 * ctypes.sizeof(UniqueId)


@NEEDS_NCCL
def test_nccl_failure_is_an_error_with_call_and_message(tmp_path: Path) -> None:
    """Use rank 2 of 2, which does not exist. Without a device, NCCL reports the missing device first."""
    program = "n = Nccl(); Communicator(n, rank=2, ranks_count=2, unique_id=n.unique_id())"
    command = rank_command(f"from support.nccl import *; {program}")
    with pytest.raises(RankError, match=r"NcclError: ncclCommInitRank failed: [1-9]: \w+") as caught:
        run_ranks([command], folder=tmp_path, environ=suites_environ(), deadline_s=DEADLINE_S)
    assert "NCCL WARN" in str(caught.value)


def test_rank_sees_all_devices_with_its_own_first() -> None:
    assert [visible_devices({}, rank=rank, ranks=3) for rank in range(3)] == [list("012"), list("120"), list("201")]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "5,GPU-7"}, rank=1, ranks=2) == ["GPU-7", "5"]


def test_first_line_of_rank_0_is_passed_to_the_others(tmp_path: Path) -> None:
    first = rank_command("print('an id'); print('done')")
    other = rank_command("import sys; print(sys.stdin.readline().strip().upper())")
    output = run_ranks([first, other, other], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
    assert output == [["an id", "done"], ["AN ID"], ["AN ID"]]


def test_deadlocked_ranks_end_at_the_deadline(tmp_path: Path) -> None:
    waiting_rank = rank_command("import sys; sys.stdin.read()")
    with pytest.raises(RankError, match=r"did not end within 1 s\n--- rank 0: was killed") as caught:
        run_ranks([waiting_rank, waiting_rank], folder=tmp_path, environ=os.environ, deadline_s=1.0)
    assert "--- rank 1: was killed" in str(caught.value)


def test_failed_rank_ends_the_others_with_their_stacks(tmp_path: Path) -> None:
    waiting_rank = rank_command("import os, sys; print(os.getpid(), flush=True); sys.stdin.read()")
    failing_rank = rank_command("import sys; sys.exit(f'no device for {sys.stdin.readline()}')")
    with pytest.raises(RankError, match=r"^rank 1 ended with exit code 1\n") as caught:
        run_ranks([waiting_rank, failing_rank], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
    message = str(caught.value)
    assert "--- rank 1: exit 1\nno device for " in message
    # The stack of rank 0 shows the line that it was executing.
    assert re.search(r'--- rank 0: was killed\nFatal Python error: Aborted[\s\S]*<string>", line 1', message)
    number = re.search(r"no device for (\d+)", message)
    assert number is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(number[1]), 0)


def test_children_of_a_rank_end_with_it(tmp_path: Path) -> None:
    """The child of rank 0 ignores SIGABRT and holds a FIFO open. An end of file of the FIFO shows that it ended."""
    os.mkfifo(tmp_path / "alive")
    alive_fd = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    child_program = "import os, signal, sys; signal.signal(signal.SIGABRT, signal.SIG_IGN)"
    child_program += (
        f"; held = os.open({str(tmp_path / 'alive')!r}, os.O_WRONLY); print('it lives', flush=True); signal.pause()"
    )
    starting_rank = rank_command(
        "import subprocess, sys; started = subprocess.Popen([sys.executable, '-c', "
        f"{child_program!r}], stdout=subprocess.PIPE); print(started.stdout.readline(), flush=True); sys.stdin.read()"
    )
    failing_rank = rank_command("import sys; sys.exit(sys.stdin.readline())")
    try:
        with pytest.raises(RankError, match=r"--- rank 1: exit 1\nb.it lives"):
            run_ranks([starting_rank, failing_rank], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
        assert select.select([alive_fd], [], [], 10.0)[0], "the child of rank 0 still runs"
        assert os.read(alive_fd, 1) == b""
    finally:
        os.close(alive_fd)


def test_nccl_output_is_part_of_the_failure(tmp_path: Path) -> None:
    failing_rank = rank_command(
        "import os, sys; open(os.environ['NCCL_DEBUG_FILE'], 'w').write('NCCL WARN why'); sys.exit(3)"
    )
    with pytest.raises(RankError, match=r"rank 0 ended with exit code 3\n--- rank 0: exit 3\nNCCL WARN why"):
        run_ranks([failing_rank], folder=tmp_path, environ=os.environ, deadline_s=DEADLINE_S)
