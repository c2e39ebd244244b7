"""A query in a child process ends in time. A child that hangs is killed, or reported if it cannot be killed."""

from __future__ import annotations

import os
import struct
import subprocess
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Reason
from gdrkit.harness.needs import host, needs
from gdrkit.inventory.child_query import ChildQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

# Maximum duration of a query with a timeout of 1 s. The kill of the child takes up to 5 s, and 9 s are a reserve for a
# busy machine.
DURATION_MAX_S = 15.0
# The reply to the first message of the kernel (FUSE_INIT): struct fuse_out_header (length, error, ID of the request)
# and struct fuse_init_out, which begins with the version of the protocol.
_INIT_REPLY = struct.Struct("=IiQ IIIIHHIIHHI28x")


def start_query(folder: Path, program: str, *arguments: str) -> ChildQuery:
    """Start a query whose child process runs this program."""
    (folder / "program.py").write_text(textwrap.dedent(program))
    return ChildQuery(["program", *arguments], {**os.environ, "PYTHONPATH": str(folder)})


def is_gone(process_id: int) -> bool:
    """Return whether the process has ended. An ended process has the state Z until its parent waits for it."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


# A program whose child process inherits standard output and writes nothing. ChildQuery appends an argument, the
# descriptor of the file for the result.
PROGRAM_WITH_GRANDCHILD = """
    import os, subprocess, sys, time
    grandchild = subprocess.Popen(["sleep", "25"])
    open(sys.argv[1], "w").write(str(grandchild.pid))
    {last_statement}
"""


@pytest.mark.parametrize(
    "last_statement", ["time.sleep(25)", """os.write(int(sys.argv[2]), b'{"facts": 5}')""", "sys.exit(3)"]
)
def test_grandchild_with_stdout_does_not_delay_the_result(tmp_path: Path, last_statement: str) -> None:
    query = start_query(tmp_path, PROGRAM_WITH_GRANDCHILD.format(last_statement=last_statement), str(tmp_path / "pid"))
    timeout_s = 1.0 if "sleep" in last_statement else 60.0
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        os.sched_yield()
    start_s = time.monotonic()
    facts, failure = query.result(timeout_s)
    assert time.monotonic() - start_s < DURATION_MAX_S
    if failure is None:
        assert facts == 5
    else:
        assert failure.reason is (Reason.TIMEOUT if "sleep" in last_statement else Reason.OTHER)
    grandchild_pid = int((tmp_path / "pid").read_text())
    while not is_gone(grandchild_pid):
        assert time.monotonic() - start_s < DURATION_MAX_S
        os.sched_yield()


def test_close_of_a_query_kills_its_grandchild(tmp_path: Path) -> None:
    query = start_query(
        tmp_path, PROGRAM_WITH_GRANDCHILD.format(last_statement="time.sleep(25)"), str(tmp_path / "pid")
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        os.sched_yield()
    start_s = time.monotonic()
    query.close()
    query.close()
    while not is_gone(int((tmp_path / "pid").read_text())):
        assert time.monotonic() - start_s < DURATION_MAX_S
        os.sched_yield()


@contextmanager
def mount_silent_file_system(folder: Path) -> Iterator[threading.Event]:
    """Mount a file system that never replies after its first message. A process that accesses it waits in state D.

    The yielded event is set when a process waits.
    """
    folder.mkdir()
    fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse_fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    command = ["mount", "-i", "-t", "fuse", "-o", options, "silent", str(folder)]
    subprocess.run(command, check=True, pass_fds=[fuse_fd])
    request_event = threading.Event()

    def serve() -> None:
        # A request begins with its length, its opcode and its ID.
        request_id = struct.unpack_from("=8xQ", os.read(fuse_fd, 1 << 17))[0]
        reply_length_bytes = _INIT_REPLY.size
        # The reply states protocol 7.31, writes of at most 4096 bytes and time stamps with a granularity of 1 ns.
        os.write(fuse_fd, _INIT_REPLY.pack(reply_length_bytes, 0, request_id, 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0))
        # The next request gets no reply. From now on, the process that made the request waits uninterruptibly.
        os.read(fuse_fd, 1 << 17)
        request_event.set()

    server_thread = threading.Thread(target=serve, daemon=True)
    server_thread.start()
    try:
        yield request_event
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        os.close(fuse_fd)  # The kernel then fails the waiting requests.


@needs(host.fuse, host.capability("CAP_SYS_ADMIN"))
def test_child_in_state_d_is_abandoned_and_reported(tmp_path: Path) -> None:
    with mount_silent_file_system(tmp_path / "mount") as request_event:
        program = "import os, sys\nos.write(1, b'started')\nos.stat(sys.argv[1])"
        query = start_query(tmp_path, program, str(tmp_path / "mount" / "file"))
        assert request_event.wait(60)
        start_s = time.monotonic()
        facts, failure = query.result(1.0)
        duration_s = time.monotonic() - start_s
    assert facts is None
    assert failure is not None
    assert failure.reason is Reason.TIMEOUT
    assert "(state D) and was left behind" in failure.message
    assert duration_s < DURATION_MAX_S


# A program that adds the experiment "planted" to the experiments of gdrkit, and runs the experiment that its argument
# names.
EXPERIMENT_PROGRAM = """
    import os, sys
    from gdrkit.errors import UsageError
    from gdrkit.inventory import experiments
    def run():
        {statement}
        {ending}
    experiments.EXPERIMENTS["planted"] = run
    experiments.main(sys.argv[1:])
"""


@pytest.mark.parametrize("ending", ["return {'call': 'returned'}", "raise UsageError('the call failed')"])
@pytest.mark.parametrize(("statement", "expected_text"), [("os.close(0)", "was closed"), ("os.dup(0)", None)])
def test_experiment_that_closes_descriptor_0_is_seen(
    tmp_path: Path, statement: str, ending: str, expected_text: str | None
) -> None:
    query = start_query(tmp_path, EXPERIMENT_PROGRAM.format(statement=statement, ending=ending), "planted")
    observed, failure = query.result(60.0)
    assert (observed.get("descriptor 0"), failure is not None) == (expected_text, "raise" in ending)
