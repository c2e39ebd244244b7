"""`gdrkit observe` of real programs: on the verbs twin, over TCP, with dma-bufs of the kernel, and bad input.

A twin is a library that emulates the hardware below an API.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.kernel_exporters import DMA_HEAP, UDMABUF, VGEM
from support.other_user import folder_for_all_users, make_program_command, run_program
from support.processes import LineChildProcess

from gdrkit.errors import Api
from gdrkit.harness.needs import host, needs, software
from gdrkit.observe import Observation, Observer
from gdrkit.units import MIB
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

OBSERVE_COMMAND = [sys.executable, "-m", "gdrkit", "observe"]
TWIN_RUN_COMMAND = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated", "--quiet", "--"]
# The program writes 8 MiB from one queue pair to another, and then waits, so that `gdrkit observe` lists the queue
# pairs while they exist.
RDMA_WRITE_PROGRAM = """
import contextlib, time
from gdrkit.verbs import Nic
with contextlib.ExitStack() as stack:
    nic = stack.enter_context(Nic.open("twin0"))
    queue = stack.enter_context(nic.completion_queue())
    first_pair, second_pair = (stack.enter_context(nic.queue_pair(queue)) for _ in range(2))
    first_pair.connect(second_pair.endpoint())
    second_pair.connect(first_pair.endpoint())
    region = stack.enter_context(nic.register_host(bytearray(8 << 20)))
    first_pair.post_write(region, region.remote(), work_id=1)
    queue.wait(20_000)
    time.sleep(0.3)
"""
WRITTEN_BYTES = 4 * MIB
# The program writes 4 MiB. After a line on its standard input, it starts a child process, which also writes 4 MiB. Both
# processes then wait for the end of the standard input.
FORKING_PROGRAM = f"""
import os, sys
null_fd = os.open("/dev/null", os.O_WRONLY)
os.write(null_fd, bytes({WRITTEN_BYTES}))
os.write(1, b"written\\n")
os.read(0, 100)
if os.fork() == 0:
    os.write(null_fd, bytes({WRITTEN_BYTES}))
    os.write(1, b"written\\n")
while os.read(0, 100):
    pass
"""
# The program sends 4 MiB to itself over TCP, and then waits, so that `gdrkit observe` reads the counters of its sockets
# while they are open.
TCP_SEND_PROGRAM = """
import socket, threading, time
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
receiver, _ = listener.accept()
thread = threading.Thread(target=sender.sendall, args=(bytes(4 << 20),))
thread.start()
missing_bytes = 4 << 20
while missing_bytes:
    missing_bytes -= len(receiver.recv(65536))
thread.join()
time.sleep(0.3)
"""


def observe(
    report_path: Path, command: Sequence[str], *, outer_command: Sequence[str] = (), options: Sequence[str] = ()
) -> Observation:
    """Run a command, which must succeed, by `gdrkit observe`, and return the observation.

    `outer_command` is put before `gdrkit observe` on the command line, for example ``gdrkit run --``.
    """
    full_command = [*outer_command, *OBSERVE_COMMAND, "--report", str(report_path), *options, "--", *command]
    completed = subprocess.run(full_command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stderr
    return Observation.from_json(report_path.read_text())


@needs(software(Api.VERBS))
def test_write_on_the_twin_is_rdma(tmp_path: Path) -> None:
    observation = observe(
        tmp_path / "report", [sys.executable, "-c", RDMA_WRITE_PROGRAM], outer_command=TWIN_RUN_COMMAND
    )
    route = observation.route("rdma")
    assert route is not None
    assert (route.outcome, route.moved_bytes) == (RouteOutcome.PROVEN, 8 * MIB)
    assert "2 queue pairs on the software twin, which moved 8.39 MB" in route.evidence[0]
    (port,) = [port for port in observation.ports if port.has_grown]
    # Each packet has at most 4096 bytes of data, and the counters include the headers of the packets.
    assert 8 * MIB <= (port.sent_bytes or 0) <= 8 * MIB * 1.02
    assert any(
        library.name == "verbs" and library.is_twin
        for process in observation.processes
        for library in process.libraries
    )


@needs(software(Api.VERBS))
def test_run_on_twins_can_be_observed_from_outside(tmp_path: Path) -> None:
    observation = observe(tmp_path / "report", [*TWIN_RUN_COMMAND, sys.executable, "-c", RDMA_WRITE_PROGRAM])
    route = observation.route("rdma")
    assert route is not None
    assert (route.outcome, route.moved_bytes) == (RouteOutcome.PROVEN, 8 * MIB)


def test_payload_over_tcp_is_counted_once(tmp_path: Path) -> None:
    observation = observe(tmp_path / "report", [sys.executable, "-c", TCP_SEND_PROGRAM])
    route = observation.route("tcp")
    assert route is not None
    # The kernel counts the connection request as one byte.
    assert (route.outcome, route.moved_bytes) == (RouteOutcome.PROVEN, 4 * MIB + 1)


@needs(host.program("ucx_perftest"))
def test_ucx_over_tcp_fell_back_from_rdma(tmp_path: Path) -> None:
    # The client starts when the kernel lists a listener on the port: 14447 is 386F in hexadecimal, 0A is TCP_LISTEN.
    listener_check = "cat /proc/net/tcp /proc/net/tcp6 | grep -q ':386F 0*:0000 0A '"
    server_command = f"ucx_perftest -p 14447 >/dev/null & until {listener_check}; do sleep 0.1; done;"
    client_command = "ucx_perftest 127.0.0.1 -p 14447 -t tag_bw -s 1000000 -n 300 >/dev/null; wait"
    command = ["env", "UCX_TLS=tcp,self", "sh", "-c", f"{server_command} {client_command}"]
    observation = observe(tmp_path / "report", command, options=["--logs"])
    rdma_route, tcp_route = observation.route("rdma"), observation.route("tcp")
    assert rdma_route is not None
    assert tcp_route is not None
    assert (rdma_route.outcome, tcp_route.outcome) == (RouteOutcome.FELL_BACK, RouteOutcome.PROVEN)
    assert (tcp_route.moved_bytes or 0) >= 100_000_000
    assert any(re.match(r"UCX: tag\(tcp/", line) for line in observation.log)


@pytest.mark.parametrize(
    "device", [pytest.param(path, marks=needs(host.device_file(path)), id=path) for path in (UDMABUF, DMA_HEAP, VGEM)]
)
def test_dmabuf_of_another_process_is_seen(device: str) -> None:
    with LineChildProcess("observe.dmabuf_holder", device, MIB) as child:
        child.expect_line("ready")
        full_command = [*OBSERVE_COMMAND, "--pid", str(child.process.pid), "--seconds", "0.2", "--json"]
        completed = subprocess.run(full_command, capture_output=True, check=True, timeout=60)
    (process,) = Observation.from_json(completed.stdout).processes
    (dmabuf,) = process.dmabufs
    assert (dmabuf.size_bytes, bool(dmabuf.exporter)) == (MIB, True)


def test_running_process_is_observed_from_now_on() -> None:
    with subprocess.Popen([sys.executable, "-c", TCP_SEND_PROGRAM.replace("sleep(0.3)", "sleep(30)")]) as child:
        # The child sends its bytes during this wait of 1 s.
        signal.sigtimedwait([signal.SIGCHLD], 1.0)
        full_command = [*OBSERVE_COMMAND, "--pid", str(child.pid), "--seconds", "0.2"]
        completed = subprocess.run(full_command, capture_output=True, text=True, check=False, timeout=60)
        child.kill()
    # The bytes that the process sent before the observation do not count.
    assert (completed.returncode, completed.stdout.splitlines()[0]) == (0, "unknown: unproven"), completed.stderr


def test_child_that_starts_after_the_attach_counts_in_full() -> None:
    """An older version subtracted the counters that the child had at its first sample."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", FORKING_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        ) as parent,
        Observer(is_attached=True) as observer,
    ):
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdout.readline()
        observer.sample(parent.pid)
        parent.stdin.write(b"fork\n")
        parent.stdout.readline()
        observer.sample(parent.pid)
        observation = observer.finish([], None)
        parent.communicate(timeout=60)
    written_bytes_by_process = {process.process_id: process.written_bytes or 0 for process in observation.processes}
    assert written_bytes_by_process.pop(parent.pid) < WRITTEN_BYTES
    (child_bytes,) = written_bytes_by_process.values()
    assert child_bytes >= WRITTEN_BYTES


def test_page_has_the_verdict_and_escapes_the_command(tmp_path: Path) -> None:
    page_path = tmp_path / "page.html"
    observe(
        tmp_path / "report", [sys.executable, "-c", TCP_SEND_PROGRAM, "<script>"], options=["--html", str(page_path)]
    )
    page_html = page_path.read_text()
    assert "tcp: proven, 4.19 MB" in page_html
    assert "&lt;script&gt;" in page_html
    assert "<script>" not in page_html


@pytest.mark.parametrize("exit_code", [0, 7])
def test_exit_code_is_that_of_the_command(exit_code: int) -> None:
    full_command = [*OBSERVE_COMMAND, "--", "sh", "-c", f"exit {exit_code}"]
    assert subprocess.run(full_command, capture_output=True, check=False, timeout=60).returncode == exit_code


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected_text"),
    [
        ([], 2, "needs either --pid PID or a command"),
        (["--pid", "1", "--", "true"], 2, "needs either --pid PID or a command"),
        (["--seconds", "1", "--", "true"], 2, "--seconds needs --pid"),
        # The largest process ID that Linux allows is 4194303.
        (["--pid", "4194304"], 1, r"observe\(pid=4194304\) failed: No such process \(ESRCH\)"),
        (["--", "/nonexistent"], 127, r"execvp\(command='/nonexistent'\) failed: No such file"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], exit_code: int, expected_text: str) -> None:
    completed = subprocess.run([*OBSERVE_COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == exit_code
    (line,) = completed.stderr.splitlines()
    assert re.search(expected_text, line)


@needs(host.capability("CAP_SETUID"))
def test_process_of_another_user_is_refused() -> None:
    # All modules are imported as root, because the other user may not be able to read them.
    program = f"""
import sys
import gdrkit.cli, gdrkit.observe, importlib.metadata
from support.other_user import become_unprivileged
become_unprivileged()
sys.argv = ["gdrkit", "observe", "--pid", "{os.getpid()}"]
gdrkit.cli.main()
"""
    completed = run_program(program)
    assert completed.returncode == 1
    (line,) = completed.stderr.splitlines()
    assert re.search(r"failed: Permission denied \(EACCES\)\. To do: run gdrkit observe with CAP_SYS_PTRACE", line)


@needs(host.capability("CAP_SETUID"), host.capability("CAP_SYS_PTRACE"))
def test_process_of_another_user_is_seen_by_root() -> None:
    # 65534 is a user without capabilities.
    program = "import os, sys; os.setuid(65534); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        full_command = [*OBSERVE_COMMAND, "--pid", str(child.pid), "--seconds", "0.2", "--json"]
        completed = subprocess.run(full_command, capture_output=True, check=True, timeout=60)
        child.communicate(timeout=60)
    observation = Observation.from_json(completed.stdout)
    (process,) = observation.processes
    # The kernel shows the byte counters and the descriptors only to a reader that may trace the process.
    assert (process.process_id, process.read_bytes is None) == (child.pid, False)
    assert not any("CAP_SYS_PTRACE" in sentence for sentence in observation.not_seen)


@contextlib.contextmanager
def open_receiving_socket() -> Iterator[socket.socket]:
    """Yield a TCP socket with 64 KiB of received bytes, which the program has not read yet."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        sender = stack.enter_context(socket.create_connection(listener.getsockname()))
        receiver = stack.enter_context(listener.accept()[0])
        sender.sendall(bytes(64 << 10))
        assert receiver.recv(64 << 10, socket.MSG_PEEK | socket.MSG_WAITALL)
        yield receiver


@needs(host.capability("CAP_SETUID"), host.capability("CAP_SYS_PTRACE"), host.package_for_all_users)
@pytest.mark.parametrize("is_privileged", [False, True])
def test_process_that_hides_is_named_or_seen_by_root(is_privileged: bool) -> None:  # noqa: FBT001 - a parameter.
    """A user who may execute but not read a program needs CAP_SYS_PTRACE to see the descriptors of its process.

    The process has received 64 KiB over its standard input, which is a TCP socket.
    """
    with folder_for_all_users() as folder, open_receiving_socket() as receiver:
        shutil.copy(shutil.which("sleep") or "", folder / "sleep")
        (folder / "sleep").chmod(0o111)
        program = f"""
import sys
import gdrkit.cli, gdrkit.cli_observe, gdrkit.observe, gdrkit.observe.describe, importlib.metadata
from support.other_user import become_unprivileged
{"" if is_privileged else "become_unprivileged()"}
sys.argv = ["gdrkit", "observe", "--json", "--", "{folder}/sleep", "0.5"]
gdrkit.cli.main()
"""
        command, environ = make_program_command(program, os.environ)
        completed = subprocess.run(
            command,
            env=environ,
            cwd="/",
            stdin=receiver.fileno(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert completed.returncode == 0, completed.stderr
    observation = Observation.from_json(completed.stdout)
    (process,) = [process for process in observation.processes if process.program == "sleep"]
    sentence_beginning = (
        f"libraries, descriptors and sockets of pid {process.process_id} (sleep): Permission denied (EACCES)"
    )
    sentences_about_hidden_parts = [
        sentence for sentence in observation.not_seen if sentence.startswith(sentence_beginning)
    ]
    observed_bytes = process.loopback_received_bytes
    assert (observed_bytes, bool(sentences_about_hidden_parts)) == ((64 << 10, False) if is_privileged else (0, True))
    assert all(sentence.endswith("CAP_SYS_PTRACE is needed to see them") for sentence in sentences_about_hidden_parts)
