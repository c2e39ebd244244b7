"""The child process in which an MPI rank measures. One timeout covers its start and reply. It ends with its rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.tracer import trace_process

from gdrkit.qualify.ranks.rank import MeasuringChild

TIMEOUT_S = 60.0
# The child runs this program at its start, as its sitecustomize module, so its first reply is late.
SLOW_START_PROGRAM = "import time; time.sleep(30)"
# The command of the child is `python -m gdrkit.qualify.ranks.measure DESCRIPTOR PARENT`. DESCRIPTOR is the socket to
# the rank. The program finds DESCRIPTOR in sys.orig_argv, and writes an invalid reply to this socket.
INVALID_REPLY_PROGRAM = (
    "import os, sys\nif len(sys.orig_argv) > 3: os.write(int(sys.orig_argv[3]), b'not JSON\\n'); os.read(0, 1)"
)
# A program that plays a rank: it starts a measuring child, and then waits for a signal.
RANK_PROGRAM = """
import os, signal
from gdrkit.qualify.ranks.rank import MeasuringChild
child = MeasuringChild(os.environ)
assert "result" in child.request({"do": "libraries", "with": {}}, timeout_s=60)
print("ready", flush=True)
signal.pause()
"""


def make_environment(folder: Path, start_program: str) -> dict[str, str]:
    """Return an environment in which Python runs `start_program` at its start."""
    (folder / "sitecustomize.py").write_text(start_program)
    return {**os.environ, "PYTHONPATH": str(folder)}


def list_child_ids() -> set[int]:
    """Return the process ids of the children that the main thread has started."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def request_once(child: MeasuringChild, *, timeout_s: float) -> dict[str, object]:
    """Send a request that uses no device, close the child, and return the reply."""
    try:
        return child.request({"do": "libraries", "with": {}}, timeout_s=timeout_s)
    finally:
        child.close()


def test_timeout_of_a_step_includes_the_start_of_the_child(tmp_path: Path) -> None:
    start_s = time.monotonic()
    reply = request_once(MeasuringChild(make_environment(tmp_path, SLOW_START_PROGRAM)), timeout_s=1.0)
    assert time.monotonic() - start_s < 10
    assert reply == {"lost": "it did not reply within 1 s and was killed"}


def test_child_with_an_invalid_reply_is_killed(tmp_path: Path) -> None:
    reply = request_once(MeasuringChild(make_environment(tmp_path, INVALID_REPLY_PROGRAM)), timeout_s=TIMEOUT_S)
    assert str(reply["lost"]).startswith("it sent an invalid reply and was killed: a message: not JSON")


def test_child_that_hangs_ends_with_its_rank() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK_PROGRAM], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as rank_process:
        assert rank_process.stdout is not None
        assert rank_process.stdout.readline() == b"ready\n"
        (child_process_id,) = map(
            int, Path(f"/proc/{rank_process.pid}/task/{rank_process.pid}/children").read_text().split()
        )
        pidfd = os.pidfd_open(child_process_id)
        try:
            # Like a process that hangs in a driver, a stopped process cannot notice the end of its parent.
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
            rank_process.kill()
            rank_process.wait()
            assert select.select([pidfd], [], [], 10)[0], "the child has outlived its rank"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_child_that_outlives_sigkill_is_abandoned(tmp_path: Path) -> None:
    """A traced child stays after SIGKILL, like a child that hangs in a driver. The rank reports this and continues."""
    earlier_child_ids = list_child_ids()
    # The alarm ends the child if this case fails.
    child = MeasuringChild(make_environment(tmp_path, "import signal; signal.alarm(100)"))
    assert "result" in child.request({"do": "libraries", "with": {}}, timeout_s=TIMEOUT_S)
    (child_process_id,) = list_child_ids() - earlier_child_ids
    with trace_process(child_process_id):
        start_s = time.monotonic()
        os.kill(child_process_id, signal.SIGSTOP)
        reply = child.request({"do": "libraries", "with": {}}, timeout_s=0.5)
        child.close()
        assert time.monotonic() - start_s < TIMEOUT_S / 2
    assert "and was killed; process" in str(reply["lost"])
    assert "was left behind" in str(reply["lost"])
