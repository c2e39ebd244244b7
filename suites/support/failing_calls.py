"""Error injection: strace makes a system call of a running process fail."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

from gdrkit.harness.needs import host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.needs import Need

__all__ = ["STRACE", "failing_call"]

_TIMEOUT_S = 60.0
# strace is installed, and this user may trace processes.
STRACE: Need = host.program("strace", "-qq", "-o", "/dev/null", "echo", "allowed")


@contextlib.contextmanager
def failing_call(process_id: int, call: str, error: str) -> Iterator[None]:
    """Make the next system call `call` of the process fail with `error`. Require at the end that the call failed."""
    options = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when=1"]
    command = ["strace", "-f", *options, "-p", str(process_id)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        try:
            # Warnings about the limits of the machine can precede this line.
            assert any(f"Process {process_id} attached" in line for line in strace.stderr), "strace did not attach"
            yield
        finally:
            strace.terminate()
            _, trace = strace.communicate(timeout=_TIMEOUT_S)
    assert f"{error} " in trace, trace
    assert "(INJECTED)" in trace, trace
