"""A debugger that holds a process: after SIGKILL its parent cannot collect it, as if it were in state D."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["traced"]

# PTRACE_SEIZE, without a stop. The tracer ends with its standard input, at the latest after two minutes.
_TRACER = """
import ctypes, os, signal, sys
signal.alarm(120)
failed = ctypes.CDLL(None, use_errno=True).ptrace(0x4206, int(sys.argv[1]), None, None)
print(ctypes.get_errno() if failed else "holds", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def traced(process_id: int) -> Iterator[None]:
    """Hold that child of this process, so that it does not end before the block does."""
    command = [sys.executable, "-c", _TRACER, str(process_id)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        assert tracer.stdin is not None
        try:
            assert tracer.stdout.readline() == "holds\n"
            yield
        finally:
            tracer.stdin.close()
            tracer.wait(30)
