"""`gdrkit run` forwards signals and input to its command, ends as the command ends, and reports which twins were used.

Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until

from gdrkit import launch
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

pytestmark = needs(software(Api.VERBS), software(Api.CUDA))

RUN_COMMAND = [sys.executable, "-m", "gdrkit", "run", "--software", "--isolated"]
# A program that opens a NIC of the verbs twin and connects a queue pair to itself.
CONNECT_QUEUE_PAIR_PROGRAM = """
import contextlib
from gdrkit.verbs import Nic
stack = contextlib.ExitStack()
nic = stack.enter_context(Nic.open("twin0"))
completion_queue = stack.enter_context(nic.completion_queue())
queue_pair = stack.enter_context(nic.queue_pair(completion_queue))
queue_pair.connect(queue_pair.endpoint())
"""
# A program that creates a queue pair and does not connect it. UCX does this on every device, even if it then uses TCP.
CREATE_QUEUE_PAIR_PROGRAM = CONNECT_QUEUE_PAIR_PROGRAM.replace("queue_pair.connect(queue_pair.endpoint())", "")
# A program that writes 1 MiB from one queue pair to another by RDMA, and prints four port counters before and after.
WRITE_AND_PRINT_COUNTERS_PROGRAM = """
import contextlib
from pathlib import Path
from gdrkit.verbs import Nic
LENGTH_BYTES = 1 << 20
COUNTERS_FOLDER = Path("/sys/class/infiniband/twin0/ports/1/counters")
def print_counters():
    names = ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")
    print(*((COUNTERS_FOLDER / name).read_text().strip() for name in names))
print_counters()
with contextlib.ExitStack() as stack:
    nic = stack.enter_context(Nic.open("twin0"))
    completion_queue = stack.enter_context(nic.completion_queue())
    first_pair, second_pair = (stack.enter_context(nic.queue_pair(completion_queue)) for _ in range(2))
    first_pair.connect(second_pair.endpoint())
    second_pair.connect(first_pair.endpoint())
    region = stack.enter_context(nic.register_host(bytearray(LENGTH_BYTES)))
    first_pair.post_write(region, region.remote(), work_id=1)
    completion_queue.wait(20_000)
print_counters()
"""


def run_on_twins(
    *command: str, options: tuple[str, ...] = (), input_text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN_COMMAND, *options, "--", *command],
        input=input_text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def start_on_twins(*command: str) -> subprocess.Popen[str]:
    # If the cases run in the background of a script, or under nohup, they inherit SIGINT or SIGHUP as ignored. The
    # command must start with the default actions.
    default_signals_command = ["env", "--default-signal=INT,HUP"]
    return subprocess.Popen(
        [*default_signals_command, *RUN_COMMAND, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_report_names_process_queue_pairs_and_unused_apis() -> None:
    process = run_on_twins(sys.executable, "-c", CONNECT_QUEUE_PAIR_PROGRAM)
    assert process.returncode == 0, process.stderr
    first_line, *other_lines = process.stderr.splitlines()
    assert re.fullmatch(r"gdrkit: verbs: twin opened by \S+ \(pid \d+\); 1 queue pair", first_line)
    assert other_lines == ["gdrkit: not used: cuda, cufile, hlthunk"]
    assert run_on_twins(sys.executable, "-c", CONNECT_QUEUE_PAIR_PROGRAM, options=("--quiet",)).stderr == ""


def test_report_file_has_the_bytes_and_the_exit_code(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    options = ("--quiet", f"--report={report_path}")
    process = run_on_twins(
        sys.executable, "-c", f"{WRITE_AND_PRINT_COUNTERS_PROGRAM}\nraise SystemExit(3)", options=options
    )
    assert process.returncode == 3, process.stderr
    report = json.loads(report_path.read_text())
    verbs_report = report["apis"]["verbs"]
    assert (report["exit_code"], report["real_libraries"]) == (3, [])
    assert (verbs_report["objects_count"], verbs_report["moved_bytes"]) == (2, 1 << 20)


def test_listing_devices_is_not_a_use() -> None:
    # gdrkit run ends with 125 if the command succeeded, but did not use a required API.
    command = (sys.executable, "-c", "from gdrkit.verbs import list_nics; assert list_nics()")
    process = run_on_twins(*command, options=("--require", "verbs"))
    assert process.returncode == 125
    assert "but not used: no queue pair reached the state RTR" in process.stderr


def test_queue_pair_that_is_not_connected_is_no_use() -> None:
    process = run_on_twins(sys.executable, "-c", CREATE_QUEUE_PAIR_PROGRAM, options=("--require", "verbs"))
    assert process.returncode == 125
    assert "but not used: no queue pair reached the state RTR" in process.stderr


def test_killed_grandchild_is_in_the_report() -> None:
    killed_program = f"{CONNECT_QUEUE_PAIR_PROGRAM}\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    process = run_on_twins(
        "sh", "-c", f'"{sys.executable}" -c "$1"; "{sys.executable}" -c "$1"; exit 0', "sh", killed_program
    )
    assert process.returncode == 0
    assert re.search(r"verbs: twin opened by \S+ \(pid \d+, \d+\); 2 queue pairs", process.stderr)


@pytest.mark.parametrize(("command_exit_code", "expected_exit_code"), [(0, 125), (9, 9)])
def test_unused_required_api_changes_only_success(command_exit_code: int, expected_exit_code: int) -> None:
    process = run_on_twins("sh", "-c", f"exit {command_exit_code}", options=("--require", "verbs,cuda", "--quiet"))
    assert process.returncode == expected_exit_code
    assert ("did not use cuda, verbs" in process.stderr) == (command_exit_code == 0)


def test_used_required_api_keeps_success() -> None:
    assert (
        run_on_twins(sys.executable, "-c", CONNECT_QUEUE_PAIR_PROGRAM, options=("--require", "verbs")).returncode == 0
    )


def test_required_api_without_a_twin_is_a_usage_error() -> None:
    process = run_on_twins("true", options=("--apis", "verbs", "--require", "cuda"))
    assert process.returncode == 2
    assert "must name APIs that run on twins (--apis), not cuda" in process.stderr


@pytest.mark.parametrize("signal_name", ["TERM", "INT", "HUP", "USR1"])
def test_signal_is_forwarded_to_the_command(signal_name: str) -> None:
    process = start_on_twins("sh", "-c", f"trap 'exit 7' {signal_name}; echo ready; while :; do sleep 0.05; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[f"SIG{signal_name}"])
    process.communicate(timeout=30)
    assert process.returncode == 7


def test_end_by_a_signal_is_passed_on() -> None:
    process = start_on_twins("sh", "-c", "echo ready; exec sleep 60")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_end_is_seen_although_a_thread_took_sigchld() -> None:
    # The thread starts before supervise() blocks the signals in the main thread, so the kernel gives SIGCHLD to the
    # thread. wait_for_end() waits until the thread has taken SIGCHLD. With WNOWAIT, supervise() can still read the
    # status of the child.
    program = """
import os, signal, threading
from gdrkit.twin_run import supervise
threading.Thread(target=threading.Event().wait, daemon=True).start()
def wait_for_end(child):
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    while signal.SIGCHLD in signal.sigpending():
        pass
print(supervise(["sleep", "0.2"], os.environ, wait_for_end))
"""
    python_command = [sys.executable, "-c", program]
    process = subprocess.run(python_command, capture_output=True, text=True, timeout=30, check=False)
    assert process.stdout == "0\n", process.stderr


def test_later_threads_do_not_take_signals(tmp_path: Path) -> None:
    # The command creates the file `ready` when its trap is set. The program then sends SIGTERM to itself.
    program = """
import os, signal, sys, threading
from gdrkit.twin_run import block_signals, supervise
mask = block_signals()
threading.Thread(target=threading.Event().wait, daemon=True).start()
terminate_when_ready = lambda child: os.path.exists(sys.argv[1]) and os.kill(os.getpid(), signal.SIGTERM)
command = ["sh", "-c", "trap 'exit 7' TERM; : >$0; while :; do sleep 0.05; done", sys.argv[1]]
print(os.waitstatus_to_exitcode(supervise(command, os.environ, terminate_when_ready, signal_mask=mask)))
"""
    python_command = [sys.executable, "-c", program, str(tmp_path / "ready")]
    process = subprocess.run(python_command, capture_output=True, text=True, timeout=30, check=False)
    assert process.stdout == "7\n", process.stderr


def test_kill_of_gdrkit_kills_the_command() -> None:
    process = start_on_twins("sh", "-c", "echo $$; exec sleep 60")
    assert process.stdout is not None
    command_process_id = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: read_process_state(command_process_id) in {"Z", ""}, "the end of the command")


def read_process_state(process_id: int) -> str:
    """Return the state letter of /proc/PID/stat (T is stopped, Z is a zombie), or "" if the process is gone."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_stopped_command_continues_without_gdrkit() -> None:
    """A fault plan can stop the command. gdrkit then waits until another process sends SIGCONT to the command."""
    process = start_on_twins("sh", "-c", "echo $$; kill -STOP $$; exit 6")
    assert process.stdout is not None
    command_process_id = int(process.stdout.readline())
    wait_until(lambda: read_process_state(command_process_id) == "T", "the stop of the command")
    os.kill(command_process_id, signal.SIGCONT)
    process.communicate(timeout=30)
    assert process.returncode == 6


def test_standard_input_reaches_the_command() -> None:
    process = run_on_twins("cat", input_text="line\n", options=("--quiet",))
    assert (process.returncode, process.stdout, process.stderr) == (0, "line\n", "")


def test_interrupt_of_the_terminal_arrives_once() -> None:
    program = (
        "import signal, sys, time\n"
        "count = 0\n"
        "def count_interrupt(*_):\n    global count\n    count += 1\n"
        "signal.signal(signal.SIGINT, count_interrupt)\n"
        "print(sys.stdin.isatty(), flush=True)\n"
        "while not count:\n    time.sleep(0.01)\n"
        "time.sleep(0.5)\nprint('interrupts', count, flush=True)\n"
    )
    gdrkit_process_id, terminal_descriptor = pty.fork()
    if gdrkit_process_id == 0:
        os.execv(sys.executable, [*RUN_COMMAND, "--quiet", "--", sys.executable, "-c", program])  # noqa: S606 - no shell.
    terminal_output = read_terminal_until(terminal_descriptor, "True")
    # The terminal sends SIGINT for Ctrl-C to gdrkit and to the command. gdrkit must not forward its SIGINT.
    os.write(terminal_descriptor, b"\x03")
    terminal_output += read_terminal_until(terminal_descriptor, "interrupts")
    _, wait_status = os.waitpid(gdrkit_process_id, 0)
    os.close(terminal_descriptor)
    assert os.waitstatus_to_exitcode(wait_status) == 0, terminal_output
    assert "interrupts 1" in terminal_output


def read_terminal_until(terminal_descriptor: int, expected_text: str) -> str:
    terminal_output = ""
    while expected_text not in terminal_output or not terminal_output.endswith("\n"):
        try:
            terminal_output += os.read(terminal_descriptor, 4096).decode()
        except OSError:  # EIO: gdrkit and the command have ended.
            return terminal_output
    return terminal_output


def copy_twin(folder: Path, api: Api, file_name: str) -> Path:
    """Copy a twin to a path outside the folder of the twins. gdrkit takes the copy for a real library."""
    environment = launch.environment(launch.Launch(twin_apis=frozenset({api})), base={})
    twin_path = Path(environment["GDRKIT_TWINS_LIBRARIES"].split(":")[0])
    twin_copy_path = folder / file_name
    twin_copy_path.write_bytes(twin_path.read_bytes())
    return twin_copy_path


# A program that opens the library with the path in its first argument, and prints which files it has mapped.
PRINT_MAPS_PROGRAM = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"


@pytest.mark.parametrize(
    ("api", "file_name"),
    [
        (Api.VERBS, "libibverbs-0f9e8d7c.so.1.14.48.0"),
        (Api.CUDA, "libcuda.so.1"),
        (Api.CUFILE, "libcufile.so.0"),
        (Api.HLTHUNK, "libhl-thunk.so"),
    ],
)
def test_twin_replaces_a_library_that_is_opened_by_path(api: Api, file_name: str, tmp_path: Path) -> None:
    twin_copy_path = copy_twin(tmp_path, api, file_name)
    process = run_on_twins(sys.executable, "-c", PRINT_MAPS_PROGRAM, str(twin_copy_path))
    assert process.returncode == 0, process.stderr
    assert str(twin_copy_path) not in process.stdout
    assert "not the twin" not in process.stderr


# A program that calls cuGetExportTable as a statically linked CUDA runtime does: by the address from cuGetProcAddress.
# Each call must fail with CUDA_ERROR_NOT_SUPPORTED (801). 12000 is the version 12.0 of CUDA.
REQUEST_EXPORT_TABLE_PROGRAM = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
call_address, table, status = ctypes.c_void_p(), ctypes.c_void_p(1), ctypes.c_int()
assert driver.cuGetProcAddress_v2(b"cuGetExportTable", ctypes.byref(call_address), 12000, 0, ctypes.byref(status)) == 0
get_export_table = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(call_address.value)
for _ in range(2):
    assert get_export_table(ctypes.byref(table), bytes(16)) == 801
    assert table.value is None
"""


def test_static_cuda_runtime_is_refused_with_one_line() -> None:
    # The program makes the call twice, but only the first call prints the line.
    process = run_on_twins(sys.executable, "-c", REQUEST_EXPORT_TABLE_PROGRAM, options=("--quiet",))
    assert process.returncode == 0, process.stderr
    (error_line,) = process.stderr.splitlines()
    assert error_line.startswith("gdrkit: python")
    for expected_text in ("static library", "undocumented export tables", "cuGetExportTable", "run it on a GPU"):
        assert expected_text in error_line


def test_library_without_version_is_the_same_twin() -> None:
    program = (
        "import ctypes; versioned, unversioned = ctypes.CDLL('libcuda.so.1'), ctypes.CDLL('libcuda.so')\n"
        "assert versioned.cuInit(0) == 0\nassert ctypes.addressof(ctypes.c_char.in_dll(versioned, 'cuInit')) == "
        "ctypes.addressof(ctypes.c_char.in_dll(unversioned, 'cuInit'))"
    )
    process = run_on_twins(sys.executable, "-c", program)
    assert process.returncode == 0, process.stderr


def test_real_library_is_named(tmp_path: Path) -> None:
    twin_copy_path = copy_twin(tmp_path, Api.CUDA, "libcuda.so.1")
    # The program sleeps, because gdrkit reads at intervals which files the running processes have mapped.
    program = f"import ctypes, time; ctypes.CDLL({str(twin_copy_path)!r}); time.sleep(1)"
    unset_loader_variables_command = ("env", "-u", "LD_AUDIT", "-u", "LD_LIBRARY_PATH", "-u", "LD_PRELOAD")
    process = run_on_twins(*unset_loader_variables_command, sys.executable, "-c", program)
    assert process.returncode == 0, process.stderr
    assert re.search(
        rf"gdrkit: cuda: {re.escape(str(twin_copy_path))}, not the twin, was loaded by \S+ \(pid \d+\)", process.stderr
    )


def test_devices_in_sysfs_agree_with_verbs() -> None:
    program = (
        "import ipaddress\nfrom pathlib import Path\nfrom gdrkit.verbs import Nic, list_nics\n"
        "from gdrkit.host import HostTree, rdma_devices, pci_path\n"
        "tree = HostTree()\ndevices = rdma_devices(tree)\n"
        "assert [d.name for d in devices] == [n.name for n in list_nics()] == ['twin0', 'twin1']\n"
        "for device in devices:\n"
        "    assert device.pci_address and len(pci_path(tree, device.pci_address)) == 5, device\n"
        "    assert device.ports[0].state == 'ACTIVE' and device.ports[0].link_layer == 'Ethernet'\n"
        "    gid = tree.text(f'/sys/class/infiniband/{device.name}/ports/1/gids/0').replace(':', '')\n"
        "    with Nic.open(device.name, gid_index=0) as nic:\n"
        "        assert gid == ipaddress.ip_address(nic.gid).exploded.replace(':', ''), gid\n"
        "    assert Path(f'/dev/infiniband/uverbs{device.name[-1]}').is_char_device()\n"
    )
    process = run_on_twins(sys.executable, "-c", program)
    assert process.returncode == 0, process.stderr


def test_port_counters_grow_by_the_bytes_that_pass() -> None:
    process = run_on_twins(sys.executable, "-c", WRITE_AND_PRINT_COUNTERS_PROGRAM)
    assert process.returncode == 0, process.stderr
    counters_before, counters_after = (tuple(map(int, line.split())) for line in process.stdout.splitlines())
    packet_count = (1 << 20) // 4096  # A packet carries 4096 bytes of the write.
    # The data counters count words of 4 bytes. A packet has 78 bytes of headers; see port_counters.cpp.
    word_count = ((1 << 20) + 78 * packet_count) // 4
    assert counters_before == (0, 0, 0, 0)
    assert counters_after == (word_count, word_count, packet_count, packet_count)
    assert "2 queue pairs; 1.05 MB moved" in process.stderr


def test_real_devices_are_not_hidden_without_the_twin() -> None:
    # Without the verbs twin, sysfs shows the real devices, and none of them has the name twin0.
    process = run_on_twins("ls", "/sys/class/infiniband/twin0", options=("--apis", "cuda"))
    assert process.returncode != 0


def test_domain_leaves_no_state() -> None:
    # The twins of a run keep their state in the folder that GDRKIT_TWINS_STATE names.
    process = run_on_twins("sh", "-c", 'echo "$GDRKIT_TWINS_STATE"; ls "$GDRKIT_TWINS_STATE"')
    state_folder = Path(process.stdout.splitlines()[0])
    assert {"counters", "tree"} <= set(process.stdout.split())
    assert not state_folder.exists()
    # The next `gdrkit run` removes the state folder of a killed `gdrkit run`.
    killed_process = start_on_twins("sh", "-c", 'echo "$GDRKIT_TWINS_STATE"; exec sleep 60')
    assert killed_process.stdout is not None
    state_folder = Path(killed_process.stdout.readline().strip())
    assert state_folder.is_dir()
    killed_process.kill()
    killed_process.communicate(timeout=30)
    run_on_twins("true")
    assert not state_folder.exists()
