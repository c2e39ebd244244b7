"""Start a stock program, wait for its end, and decide whether it passed.

A program passes if it and its server end with the expected exit code, its output and its copied file are right, and the
twins moved enough bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit.host import die_with_parent
from gdrkit.twin_run.command import EXIT_NOT_USED
from hardware.peers.twin_report import read_moved_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hardware.peers.programs import StockProgram

__all__ = ["DeviceUnderTest", "ProgramOutcome", "run_program"]

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
# A program that has not ended after this time is killed.
TIMEOUT_S = 60.0
# A client starts when its server listens on the port, or after this time, because some servers listen on another port
# or on no port.
_LISTEN_TIMEOUT_S = 2.0
# If a client fails while its server runs, it is started again for up to this time, because the server may not listen
# yet.
_RETRY_S = 15.0
_POLL_PAUSE_S = 0.1
# Time in which a server must end after its client, and a process after a signal.
_END_TIMEOUT_S = 10.0
# Each line that `gdrkit run` prints starts with this text.
_LAUNCHER_PREFIX = "gdrkit: "
# State of a listener (TCP_LISTEN) in /proc/net/tcp.
_LISTEN_STATE = "0A"


@dataclass(frozen=True, slots=True)
class DeviceUnderTest:
    """The RDMA device on which programs run.

    Attributes
    ----------
    device : str
        Name of the RDMA device.
    address : str
        IP address that reaches the device, for librdmacm.
    gid_index : int
        Index of the RoCE GID that the programs use.
    launcher : tuple of str
        First words of each command, such as ``gdrkit run --software``. ``--report=FILE --`` follows them. Empty: no
        twins.
    timeout_s : float
        Time limit of a program, unless the program has a longer limit.
    """

    device: str
    address: str
    gid_index: int
    launcher: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S

    @property
    def counts_bytes(self) -> bool:
        """Whether the number of bytes that a program moved is known. Only the report of the launcher contains it."""
        return bool(self.launcher)


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The result of one run of a program.

    Attributes
    ----------
    failure : str
        One sentence that says what is wrong, or an empty string.
    moved_bytes : int or None
        Number of bytes that the twins of all processes moved. None without twins, because only twins count them.
    duration_s : float
        Time from the start of the first process to the end of the last.
    command : str
        The command line of the client.
    outputs : mapping
        The last lines that each process printed, or an empty mapping if the run passed. The key is ``first`` for the
        server and ``last`` for the client, or ``first`` for a program that runs alone.
    client_output : str
        All that the client printed.
    """

    failure: str
    moved_bytes: int | None
    duration_s: float
    command: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    client_output: str = ""


class _Process:
    """A process of a run, in a session of its own, with its output in a file.

    If this Python program is killed, the kernel kills the process of the run. If that process is `gdrkit run`, the
    kernel kills its program in the same way.
    """

    def __init__(self, role: str, command: Sequence[str], device_under_test: DeviceUnderTest, folder: Path) -> None:
        self.report_file = folder / f"{role}.json"
        self._log_file = folder / f"{role}.log"
        launcher = (
            (*device_under_test.launcher, f"--report={self.report_file}", "--") if device_under_test.launcher else ()
        )
        # If a client is started again, the log file keeps the output of the first start.
        with self._log_file.open("a") as log:
            self.popen = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - there are no threads.
            )

    @property
    def output(self) -> str:
        return self._log_file.read_text(errors="replace")

    def describe_end(self) -> str:
        """Return a text with the exit code of the ended process, and the last line of text that the program printed."""
        program_lines = [line.strip() for line in self.output.splitlines() if not line.startswith(_LAUNCHER_PREFIX)]
        # Some programs end their output with a line of hyphens.
        text_lines = [line for line in program_lines if line.strip("-")]
        return ": ".join([f"ended with exit code {self.popen.returncode}", *text_lines[-1:]])

    def is_running(self) -> bool:
        return self.popen.poll() is None

    def wait_until(self, deadline_s: float) -> bool:
        """Return whether the process ended before the deadline, a value of time.monotonic()."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(max(0.0, deadline_s - time.monotonic()))
        return not self.is_running()

    def terminate(self) -> None:
        """Send SIGTERM to the process and its children, wait for the process, and kill what still runs of them."""
        for signal_number, timeout_s in ((signal.SIGTERM, _END_TIMEOUT_S), (signal.SIGKILL, _END_TIMEOUT_S)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(timeout_s)


def run_program(program: StockProgram, device_under_test: DeviceUnderTest) -> ProgramOutcome:
    """Run a program on a device and return the outcome. Every process has ended when the function returns."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-peers-") as folder_name:
        folder = Path(folder_name)
        placeholders = {
            "device": device_under_test.device,
            "gid": str(device_under_test.gid_index),
            "address": device_under_test.address,
            "port": str(_find_free_port()),
            "folder": folder_name,
        }
        source_content = _write_source_file(folder, program.sent_file_bytes)
        begin_s = time.monotonic()
        processes, failure = _run_processes(program, device_under_test, folder, placeholders)
        duration_s = time.monotonic() - begin_s
        client = processes[-1]
        moved_bytes = (
            sum(read_moved_bytes(process.report_file, program.apis[0]) for process in processes)
            if device_under_test.counts_bytes
            else None
        )
        output_pattern = (
            program.output_pattern.format_map(placeholders) if "{" in program.output_pattern else program.output_pattern
        )
        if not failure and output_pattern and not re.search(output_pattern, client.output, re.MULTILINE):
            failure = f"the output does not contain {output_pattern!r}"
        if not failure and program.sent_file_bytes and _read_if_present(folder / "copy") != source_content:
            failure = "the copied file differs from its source"
        if not failure and moved_bytes is not None and moved_bytes < program.moved_bytes_min:
            failure = f"{moved_bytes} bytes moved over the twin, at least {program.moved_bytes_min} were expected"
        # The record must not contain folders of this machine, so words replace them.
        record_placeholders = {**placeholders, "folder": "FOLDER"}
        command = shlex.join(_remove_root_path(word.format_map(record_placeholders)) for word in program.client)
        outputs = {
            position: _get_last_lines(process.output)
            for position, process in zip(("first", "last"), processes, strict=False)
        }
        return ProgramOutcome(failure, moved_bytes, duration_s, command, outputs if failure else {}, client.output)


def _run_processes(
    program: StockProgram, device_under_test: DeviceUnderTest, folder: Path, placeholders: Mapping[str, str]
) -> tuple[list[_Process], str]:
    """Run the server and the client. Return the processes, the client last, and the failure or an empty string."""
    timeout_s = max(device_under_test.timeout_s, program.timeout_s)
    deadline_s = time.monotonic() + timeout_s
    expected_exit_code = 0
    if program.expected_unused_api and device_under_test.launcher:
        device_under_test = dataclasses.replace(
            device_under_test, launcher=(*device_under_test.launcher, f"--require={program.expected_unused_api}")
        )
        # The launcher ends with this exit code if no process used the required API, as is expected here.
        expected_exit_code = EXIT_NOT_USED
    server_command, client_command = (
        [word.format_map(placeholders) for word in command] for command in (program.server, program.client)
    )
    servers = [_Process("server", server_command, device_under_test, folder)] if program.server else []
    client: _Process | None = None
    try:
        if servers:
            _await_listener(servers[0], int(placeholders["port"]))
        retry_until_s = time.monotonic() + _RETRY_S
        while True:
            client = _Process("client", client_command, device_under_test, folder)
            if not client.wait_until(deadline_s):
                return [*servers, client], f"the client did not end within {timeout_s:g} s"
            is_server_running = bool(servers) and servers[0].is_running()
            if (
                client.popen.returncode == expected_exit_code
                or not is_server_running
                or time.monotonic() > retry_until_s
            ):
                break
            time.sleep(_POLL_PAUSE_S)
        if client.popen.returncode != expected_exit_code:
            return [*servers, client], f"the client {client.describe_end()}"
        if servers and not servers[0].wait_until(min(deadline_s, time.monotonic() + _END_TIMEOUT_S)):
            # Some servers, such as the servers of rcopy and rdma_xserver, serve further clients until a signal ends
            # them.
            servers[0].terminate()
        elif servers and servers[0].popen.returncode != expected_exit_code:
            return [*servers, client], f"the server {servers[0].describe_end()}"
        return [*servers, client], ""
    finally:
        for process in (*servers, *([client] if client is not None else [])):
            process.terminate()


def _await_listener(server: _Process, port: int) -> None:
    """Wait until a program listens on the port, at most _LISTEN_TIMEOUT_S."""
    deadline_s = time.monotonic() + _LISTEN_TIMEOUT_S
    while server.is_running() and time.monotonic() < deadline_s and not _is_listening(port):
        time.sleep(_POLL_PAUSE_S / 4)


def _is_listening(port: int) -> bool:
    """Return whether a program listens on the port.

    The function does not connect to the port, because the server would think that its client connects. Instead it
    reads the kernel's lists of TCP and Unix sockets. The twin of librdmacm listens on Unix sockets.
    """
    # Columns of /proc/net/tcp: row number, local address and port, remote address and port, state.
    for table_path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = [line.split() for line in table_path.read_text().splitlines()[1:]] if table_path.exists() else []
        if any(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN_STATE for row in rows):
            return True
    # The twin gives its Unix sockets names that end in: GID, a letter for the port space with the port in hex, hash of
    # the address.
    return re.search(rf"@gdrkit-twins/\S*/cm\.\S*\.[a-z]{port:04x}\.", Path("/proc/net/unix").read_text()) is not None


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _remove_root_path(word: str) -> str:
    return word.replace(f"{_PROJECT_ROOT}/", "").replace(str(_PROJECT_ROOT), ".")


def _write_source_file(folder: Path, length_bytes: int) -> bytes:
    content = os.urandom(length_bytes)
    if length_bytes:
        (folder / "source").write_bytes(content)
    return content


def _read_if_present(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _get_last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
