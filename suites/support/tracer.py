"""A tracer (ptrace(2)), for cases about child processes that outlive SIGKILL.

While a child process is traced, its parent cannot wait for the child's end, even after SIGKILL. So the child behaves
like a process in uninterruptible sleep (state D).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["trace_process"]

# 0x4206 is PTRACE_SEIZE, which does not stop the process. The tracer ends at the end of its input or after two minutes.
_TRACER_PROGRAM = """
import ctypes, os, signal, sys
signal.alarm(120)
failed = ctypes.CDLL(None, use_errno=True).ptrace(0x4206, int(sys.argv[1]), None, None)
print(ctypes.get_errno() if failed else "traced", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def trace_process(process_id: int) -> Iterator[None]:
    """Trace a child process of this process. This process cannot wait for the child's end before the block ends."""
    command = [sys.executable, "-c", _TRACER_PROGRAM, str(process_id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdin is not None
        try:
            assert tracer.stdout.readline() == "traced\n"
            yield
        finally:
            tracer.stdin.close()
            tracer.wait(30)
