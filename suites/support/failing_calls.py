"""Error injection: a system call of a running process fails, because strace changes its result."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from typing import TYPE_CHECKING

from gdrkit.harness.needs import host

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gdrkit.harness.needs import Need

__all__ = ["STRACE", "fail_next_call"]

_TIMEOUT_S = 60.0
# Need of the cases that call `fail_next_call`: strace is installed, and this user may trace processes.
STRACE: Need = host.program("strace", "-qq", "-o", "/dev/null", "echo", "allowed")


@contextlib.contextmanager
def fail_next_call(process_id: int, call_name: str, error_name: str) -> Iterator[None]:
    """Make the next system call `call_name` of a process fail with `error_name`, such as ``EIO``.

    At its end, the block waits until such a call has failed.
    """
    options = ["-e", f"trace={call_name}", "-e", f"inject={call_name}:error={error_name}:when=1"]
    command = ["strace", "-f", *options, "-p", str(process_id)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        output = _StraceOutput(strace, f"Process {process_id} attached", f"{error_name} ")
        try:
            assert output.attached_event.wait(_TIMEOUT_S), f"strace did not attach: {output}"
            yield
            # A call that was in progress when strace attached does not fail. The next call fails.
            assert output.injected_event.wait(_TIMEOUT_S), f"no {call_name} failed: {output}"
        finally:
            strace.terminate()
            output.thread.join(_TIMEOUT_S)


class _StraceOutput:
    """The output of strace, which a thread reads."""

    def __init__(self, strace: subprocess.Popen[str], attached_text: str, error_text: str) -> None:
        self.attached_event, self.injected_event = threading.Event(), threading.Event()
        self._lines: list[str] = []
        self._awaited_texts = attached_text, error_text
        self.thread = threading.Thread(target=self._read, args=[strace.stderr])
        self.thread.start()

    def __str__(self) -> str:
        return "".join(self._lines)

    def _read(self, output: Iterable[str]) -> None:
        attached_text, error_text = self._awaited_texts
        for line in output:
            self._lines.append(line)
            # strace may print warnings about the limits of the machine before it reports the attachment.
            if attached_text in line:
                self.attached_event.set()
            if error_text in line and "(INJECTED)" in line:
                self.injected_event.set()
