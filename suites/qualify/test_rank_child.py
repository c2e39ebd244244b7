"""The child of a rank that measures: it has one deadline for everything, and does not outlive the rank."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from support.tracer import traced

from gdrkit.qualify.ranks.rank import Supervised

LONG_S = 60.0
# What the child runs before anything else (site.py).
SLOW = "import time; time.sleep(30)"
RUBBISH = "import os, sys\nif len(sys.orig_argv) > 3: os.write(int(sys.orig_argv[3]), b'rubbish\\n'); os.read(0, 1)"
RANK = """
import os, signal
from gdrkit.qualify.ranks.rank import Supervised
child = Supervised(os.environ)
assert "result" in child.ask({"do": "libraries", "with": {}}, limit_s=60)
print("it answers", flush=True)
signal.pause()
"""


def beginning_with(folder: Path, source: str) -> dict[str, str]:
    """An environment in which Python begins with this."""
    (folder / "sitecustomize.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(folder)}


def children() -> set[int]:
    """The children of this process that its main thread has started."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def ask(child: Supervised, *, limit_s: float) -> dict[str, object]:
    """A request that needs nothing of the machine."""
    try:
        return child.ask({"do": "libraries", "with": {}}, limit_s=limit_s)
    finally:
        child.close()


def test_the_start_of_a_child_is_a_part_of_the_step(tmp_path: Path) -> None:
    began = time.monotonic()
    answer = ask(Supervised(beginning_with(tmp_path, SLOW)), limit_s=1.0)
    assert time.monotonic() - began < 10
    assert answer == {"lost": "it did not answer within 1 s and was killed"}


def test_a_child_that_says_rubbish_costs_its_row(tmp_path: Path) -> None:
    answer = ask(Supervised(beginning_with(tmp_path, RUBBISH)), limit_s=LONG_S)
    assert str(answer["lost"]).startswith("it was killed, as it does not answer as it must: a message: not JSON")


def test_a_child_that_hangs_ends_with_its_rank() -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"it answers\n"
        (child,) = map(int, Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split())
        ends = os.pidfd_open(child)
        try:
            # It hears of nothing, as one in a driver does.
            signal.pidfd_send_signal(ends, signal.SIGSTOP)
            rank.kill()
            rank.wait()
            assert select.select([ends], [], [], 10)[0], "it has outlived its rank"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(ends, signal.SIGKILL)
            os.close(ends)


def test_child_that_outlives_sigkill_is_left_and_said(tmp_path: Path) -> None:
    """As one that hangs in a driver (state D): the rank goes on, and its answer says so."""
    before = children()
    child = Supervised(beginning_with(tmp_path, "import signal; signal.alarm(100)"))
    assert "result" in child.ask({"do": "libraries", "with": {}}, limit_s=LONG_S)
    (process_id,) = children() - before
    with traced(process_id):
        began = time.monotonic()
        os.kill(process_id, signal.SIGSTOP)
        answer = child.ask({"do": "libraries", "with": {}}, limit_s=0.5)
        child.close()
        assert time.monotonic() - began < LONG_S / 2
    assert "and was killed; process" in str(answer["lost"])
    assert "was left behind" in str(answer["lost"])
