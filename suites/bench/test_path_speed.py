"""Rate of usrbio reads (ring, agent, storage server, NIC), compared with kernel reads of the same cached file.

In test_reads_beside_the_kernel, the agent sends all reads to the server (--no-local-reads). On two idle cores, its
goals are: 4 KiB reads at depth 64 have at least a quarter of the rate of io_uring, and 1 MiB reads have at least half
of the rate of `pread` in one thread. The record also has the rate of a bare copy: two threads of a program make the
same memory copies as the path, and nothing else. The bare copy is not an upper bound, because in some runs it was
slower than the path.

The test runs with two placements of the threads of the client, the agent and the server. With `by the system`, the
kernel places them on the two cores. With `session apart`, the server's session thread has one core for itself, because
it has as much work as all other threads together.

In test_reads_beside_io_uring, the agent may execute reads itself. Its goals are in IO_URING_GOALS.

No goal is asserted, because the machine may be busy. The record also has the processor time of an operation, which
depends less on the load of the machine. All processes share two cores, even if the machine has more. `nox -s bench`
builds the measuring program, ``usrbio_path_bench``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.application import Application
from support.raw_usrbio import AgentProcess

from gdrkit import pattern, usrbio
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence

FILE_BYTES = 64 * MIB
ROUNDS_COUNT, DURATION_MS = 9, 300
# Settings of the verbs twin (a library that emulates NICs). By default, the twin delays completions at random, which
# limits the rate. It also has two NICs, and their threads would need more than two cores. Real libraries ignore these
# variables.
TWIN_ENVIRONMENT = {"GDRKIT_TWINS_LATE_US": "0", "GDRKIT_TWINS_NICS": "1"}
# For each size: the names of the measurements of usrbio, the kernel and the bare copy, and the goal. The goal is the
# rate of usrbio on idle cores, as a share of the rate of the kernel.
MEASUREMENTS = {
    "4 KiB": ("path_small", "io_uring", "bare_small", 0.25),
    "1 MiB": ("path_large", "pread", "bare_large", 0.5),
}
# The goals of reads by usrbio on two idle cores, as a share of the rate of io_uring, by the size of a read
# in bytes and the number of reads in flight.
IO_URING_GOALS = {
    (4 * KIB, 1): 0.3,
    (4 * KIB, 8): 0.45,
    (4 * KIB, 32): 0.9,
    (4 * KIB, 64): 1.0,
    (4 * KIB, 256): 1.0,
    (MIB, 1): 0.9,
    (MIB, 4): 1.0,
    (MIB, 16): 1.0,
}
MEMORY_KINDS = [
    pytest.param("host", marks=needs(verbs.nic())),
    pytest.param("device", marks=needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)),
]
pytestmark = pytest.mark.timeout(180)


def create_file(mount: Path, seed: int) -> Path:
    """Create a file through the agent, so that its chunks have checksums and every read verifies them."""
    path = mount / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        usrbio.register_fd(fd)
        with Application(mount, memory_kind="host", length_bytes=MIB) as application:
            for offset in range(0, FILE_BYTES, MIB):
                application.write_memory(0, pattern.payload(MIB, seed=seed, offset_bytes=offset))
                assert application.write((fd, 0, offset, MIB)) == [MIB]
        usrbio.deregister_fd(fd)
    finally:
        os.close(fd)
    return path


@contextlib.contextmanager
def restrict_to_two_cores() -> Iterator[list[int]]:
    """Restrict this thread, and the processes that it starts, to two cores. Yield the numbers of the cores."""
    cores_before = os.sched_getaffinity(0)
    cores = sorted(cores_before)[:2]
    os.sched_setaffinity(0, cores)
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, cores_before)


def isolate_session(agent: AgentProcess, cores: list[int]) -> None:
    """Restrict the session thread of the server to the last core, and all other threads to the first core."""
    # This thread starts the client process, which inherits the affinity. restrict_to_two_cores() restores the
    # affinity at its end.
    os.sched_setaffinity(0, {cores[0]})
    for process_id in (agent.process.pid, agent.find_server_process_id()):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            # A thread may end after iterdir() has listed it.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                os.sched_setaffinity(int(task.name), {cores[-1] if name == "gdrkit-session" else cores[0]})


def measure(agent: AgentProcess, path: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Run the measuring program. Return the measurements of all rounds, by the name of the measurement.

    Each line of its output is a measurement. ``turn`` is the name, and ``passed_s`` the duration in seconds.
    """
    program = Path(os.environ["GDRKIT_BENCH_PROGRAMS"]) / "usrbio_path_bench"
    command = [str(program), str(agent.mount), str(path), *options]
    command += ["--pid", f"agent={agent.process.pid}", "--pid", f"server={agent.find_server_process_id()}"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    measurements: dict[str, list[dict[str, Any]]] = {}
    for line in completed.stdout.splitlines():
        measurement = json.loads(line)
        measurements.setdefault(measurement["turn"], []).append(measurement)
    return measurements


def compute_operations_per_s(measurement: dict[str, Any]) -> float:
    """Return the rate of a measurement, in operations per second."""
    return float(measurement["operations"] / measurement["passed_s"])


def compute_median_share(measurements: list[dict[str, Any]], baseline_measurements: list[dict[str, Any]]) -> float:
    """Return the median of the ratios of all rounds. The two rates of a ratio were measured in the same round."""
    return statistics.median(
        compute_operations_per_s(measurement) / compute_operations_per_s(baseline)
        for measurement, baseline in zip(measurements, baseline_measurements, strict=True)
    )


@pytest.mark.parametrize("thread_placement", ["by the system", "session apart"])
@pytest.mark.parametrize("memory_kind", MEMORY_KINDS)
def test_reads_beside_the_kernel(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory_kind: str,
    thread_placement: str,
    seed: int,
    evidence: Evidence,
    summary: list[str],
) -> None:
    for name, value in TWIN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    evidence["environment"] = TWIN_ENVIRONMENT
    load_before = os.getloadavg()[0]
    with restrict_to_two_cores() as cores, AgentProcess(tmp_path, "--no-local-reads") as agent:
        evidence["cores"] = len(cores)
        file = create_file(tmp_path, seed)
        if thread_placement == "session apart":
            isolate_session(agent, cores)
        options = ["--kind", memory_kind, "--rounds", str(ROUNDS_COUNT), "--ms", str(DURATION_MS)]
        if len(cores) > 1:
            # These are the cores of the bare copies only.
            options += ["--cores", f"{cores[0]},{cores[-1]}"]
        measurements = measure(agent, file, *options)
    assert agent.statistics["failed"] == 0
    evidence["load_1min"] = [load_before, os.getloadavg()[0]]
    for size, (usrbio_name, kernel_name, bare_copy_name, goal) in MEASUREMENTS.items():
        if kernel_name not in measurements:
            summary.append(f"{memory_kind:6} {size}, {thread_placement}: {kernel_name} is not allowed on this system")
            continue
        share = compute_median_share(measurements[usrbio_name], measurements[kernel_name])
        evidence.number(f"{usrbio_name}_share_of_{kernel_name}_ratio_median", share)
        for name in (usrbio_name, kernel_name):
            evidence.number(
                f"{name}_per_s_median", statistics.median(map(compute_operations_per_s, measurements[name]))
            )
            for process in measurements[name][0]["cpu_s"]:
                cpu_us = statistics.median(
                    measurement["cpu_s"][process] / measurement["operations"] * 1e6
                    for measurement in measurements[name]
                )
                evidence.number(f"{name}_{process}_cpu_us_median", cpu_us)
        bare_copy_text = ""
        if bare_copy_name in measurements:
            bare_copy_share = compute_median_share(measurements[bare_copy_name], measurements[kernel_name])
            evidence.number(f"{bare_copy_name}_share_of_{kernel_name}_ratio_median", bare_copy_share)
            evidence.number(
                f"{usrbio_name}_share_of_{bare_copy_name}_ratio_median",
                compute_median_share(measurements[usrbio_name], measurements[bare_copy_name]),
            )
            bare_copy_text = f"; bare copy by two threads: {bare_copy_share:.2f} x {kernel_name}"
        usrbio_cpu_us = sum(
            evidence.numbers[f"{usrbio_name}_{process}_cpu_us_median"] for process in ("client", "agent", "server")
        )
        kernel_cpu_us = evidence.numbers[f"{kernel_name}_client_cpu_us_median"]
        summary.append(
            f"{memory_kind:6} {size} reads, {thread_placement}: {share:.2f} x {kernel_name} "
            f"(goal on idle cores: {goal}){bare_copy_text}; "
            f"processor time {usrbio_cpu_us / kernel_cpu_us:.1f} x {kernel_name}; load {load_before:.1f}"
        )


def format_size(length_bytes: int) -> str:
    """Return the text for a size in the names of recorded numbers, such as 4k or 1m."""
    return f"{length_bytes // MIB}m" if length_bytes >= MIB else f"{length_bytes // KIB}k"


def compute_cpu_us(measurements: list[dict[str, Any]], process: str) -> float:
    """Return the processor time of an operation in one process, in microseconds."""
    return float(
        statistics.median(
            measurement["cpu_s"][process] / measurement["operations"] * 1e6 for measurement in measurements
        )
    )


@needs(verbs.nic())
@pytest.mark.parametrize("file_kind", ["plain", "checksums", "fuse"])
def test_reads_beside_io_uring(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_kind: str,
    seed: int,
    evidence: Evidence,
    summary: list[str],
) -> None:
    """Measure usrbio and io_uring in turn. Both keep equally many reads in flight, and wait for half of them at a time.

    A file of the kind "plain" has no checksums. With "fuse", the client opens such a file on a FUSE mount of the agent.
    """
    for name, value in TWIN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    evidence["environment"] = TWIN_ENVIRONMENT
    evidence["load_1min_before"] = os.getloadavg()[0]
    store, mount = tmp_path / "store", tmp_path / "mount"
    store.mkdir()
    mount.mkdir()
    if file_kind != "checksums":
        (store / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    agent_options = ("--fuse", "--store", str(store)) if file_kind == "fuse" else ()
    with restrict_to_two_cores() as cores, AgentProcess(mount if agent_options else store, *agent_options) as agent:
        evidence["cores"] = len(cores)
        if file_kind == "checksums":
            create_file(store, seed)
        points = ",".join(f"{length_bytes}:{depth}" for length_bytes, depth in IO_URING_GOALS)
        io_uring_file_option = ("--peer-file", str(store / "file"))
        cores_option = ("--cores", f"{cores[0]},{cores[-1]}") if len(cores) > 1 else ()
        program_options = (*cores_option, *io_uring_file_option, "--rounds", "5", "--ms", "400")
        measurements = measure(agent, agent.mount / "file", "--points", points, *program_options)
    assert agent.statistics["failed"] == 0
    if round_trips_ns := [
        1e9 / compute_operations_per_s(measurement) for measurement in measurements.get("round_trip", [])
    ]:
        evidence.number("processor_round_trip_ns_min", min(round_trips_ns))
        evidence.number("processor_round_trip_ns_max", max(round_trips_ns))
        summary.append(
            f"{file_kind}: a cache line goes to the other core and back in {min(round_trips_ns):.0f} to "
            f"{max(round_trips_ns):.0f} ns; the ratios are lower if the two cores share no cache"
        )
    for (length_bytes, depth), goal in IO_URING_GOALS.items():
        point = f"{length_bytes}_{depth}"
        if f"io_uring_{point}" not in measurements:
            summary.append(f"{file_kind} {point}: io_uring is not allowed on this system")
            continue
        usrbio_measurements, io_uring_measurements = measurements[f"usrbio_{point}"], measurements[f"io_uring_{point}"]
        ratios = [
            compute_operations_per_s(usrbio_measurement) / compute_operations_per_s(io_uring_measurement)
            for usrbio_measurement, io_uring_measurement in zip(usrbio_measurements, io_uring_measurements, strict=True)
        ]
        name = f"read_{format_size(length_bytes)}_d{depth}"
        evidence.number(f"{name}_ratio", statistics.median(ratios))
        evidence.number(f"{name}_ratio_min", min(ratios))
        evidence.number(f"{name}_ratio_max", max(ratios))
        evidence.number(f"{name}_per_s_median", statistics.median(map(compute_operations_per_s, usrbio_measurements)))
        cpu_times_us = {
            process: compute_cpu_us(usrbio_measurements, process) for process in ("client", "agent", "server")
        }
        cpu_times_us["io_uring"] = compute_cpu_us(io_uring_measurements, "client")
        for process, time_us in cpu_times_us.items():
            evidence.number(f"{name}_{process}_cpu_us_median", time_us)
        summary.append(
            f"{file_kind} {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) x io_uring, "
            f"goal {goal}; processor time in us: "
            + ", ".join(f"{process} {cpu_us:.2f}" for process, cpu_us in cpu_times_us.items())
        )
