"""`gdrkit monitor` exports metrics of the machine. A process, an agent and a server export their own metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from observe.metrics_client import GDRKIT_COMMAND, REGION_HOLDER_COMMAND, read_metrics_url, scrape, start_gdrkit
from observe.twin_holder import MEMORY_BYTES, REGION_BYTES
from support.initiators import connect_initiator
from support.other_user import run_program
from support.processes import LineChildProcess

from gdrkit import gds, monitor
from gdrkit.cuda import PinnedMemory
from gdrkit.errors import Api, ApiError, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs, software, verbs
from gdrkit.monitor.process import GAUGES
from gdrkit.registration import CacheStatistics, MemoryPoolStatistics, PoolStatistics, RegionCache
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

REGISTRATION_COUNT = 10_000
# Sources of metrics that a machine may lack, each with the prefix of its metrics.
METRIC_PREFIX_BY_SOURCE = {
    "rdma_netlink": "gdrkit_rdma_",
    "nvml": "gdrkit_bar1_",
    "nvidia_fs": "gdrkit_nvidia_fs_",
}
# A case measures the mean CPU time of READING_COUNT readings while PROCESS_COUNT idle processes exist. The monitor
# reads their descriptors too. Prometheus is expected to scrape every SCRAPE_INTERVAL_S.
PROCESS_COUNT, READING_COUNT, SCRAPE_INTERVAL_S = 300, 10, 15


def test_monitor_serves_the_machine_until_sigterm() -> None:
    with start_gdrkit("monitor", "--listen", "127.0.0.1:0") as monitor_process:
        url = read_metrics_url(monitor_process.stdout)
        with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310 - an address of this test.
            metrics_text = reply.read().decode()
    for name in ("gdrkit_rdma_regions", "gdrkit_dmabufs", "gdrkit_bar1_used_bytes", "gdrkit_port_sent_bytes_total"):
        assert f"# HELP {name} " in metrics_text


def test_missing_source_has_a_cause_and_no_value() -> None:
    with contextlib.ExitStack() as stack:
        monitor_process = stack.enter_context(start_gdrkit("monitor", "--listen", "127.0.0.1:0"))
        url = read_metrics_url(monitor_process.stdout)
        scrape(url)
        samples = scrape(url)  # The second reading must not log the causes again.
        monitor_process.send_signal(signal.SIGTERM)
        assert monitor_process.stderr is not None
        log = monitor_process.stderr.read()
    for source, prefix in METRIC_PREFIX_BY_SOURCE.items():
        cause_sample_names = [
            sample_name
            for sample_name in samples
            if sample_name.startswith("gdrkit_not_read{") and f'source="{source}"' in sample_name
        ]
        # Samples of twins do not come from these sources.
        value_sample_names = [
            sample_name
            for sample_name in samples
            if sample_name.startswith(prefix) and 'device="twin"' not in sample_name
        ]
        # On a machine with NICs and without an RDMA object, rdma_netlink has neither a value nor a cause.
        assert cause_sample_names or value_sample_names or source == "rdma_netlink", source
        assert log.count(f"not read: {source}, ") == len(cause_sample_names)


@needs(host.capability("CAP_SETUID"))
def test_processes_of_other_users_are_counted_as_not_read() -> None:
    # The first reading, as root, imports libraries that the other user may not be able to read.
    program = """
from gdrkit.monitor import machine_metrics
from support.other_user import become_unprivileged
machine_metrics()
become_unprivileged()
(not_read,) = [metric for metric in machine_metrics() if metric.name == "gdrkit_not_read"]
print(sum(value for labels, value in not_read.values.items() if labels[0][1] == "descriptors_of_processes"))
"""
    completed = run_program(program)
    assert completed.returncode == 0, completed.stderr
    assert int(completed.stdout) > 0
    assert completed.stderr.count("not read: descriptors_of_processes, Permission denied") == 1


@needs(software(Api.VERBS), software(Api.CUDA), host.capability("CAP_SETUID"), host.capability("CAP_SYS_PTRACE"))
def test_root_sees_the_process_that_another_user_does_not() -> None:
    program = """
import json, sys
from gdrkit.monitor import machine_metrics
from support.other_user import become_unprivileged
machine_metrics()
become_unprivileged()
metrics = {metric.name: metric.values for metric in machine_metrics()}
sample_count = sum(("pid", sys.argv[1]) in labels for values in metrics.values() for labels in values)
cause = (("source", "descriptors_of_processes"), ("cause", "Permission denied"))
print(json.dumps([sample_count, metrics["gdrkit_not_read"].get(cause, 0)]))
"""
    with LineChildProcess(*REGION_HOLDER_COMMAND) as child:
        process_id = child.read_line()
        child.write_line("hold 5")
        child.expect_line("done")
        completed = run_program(program, process_id)
        samples_for_root = read_process_samples(process_id)
        child.end()
    assert completed.returncode == 0, completed.stderr
    sample_count, not_read_count = json.loads(completed.stdout)
    assert (sample_count, not_read_count > 0) == (0, True)
    assert (samples_for_root["gdrkit_rdma_regions twin"], samples_for_root[f"gdrkit_dmabufs {process_id}"]) == (5, 5)


def test_reading_costs_less_than_one_percent_of_a_core() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(PROCESS_COUNT):
            stack.callback(stack.enter_context(subprocess.Popen(["sleep", "600"])).kill)
        monitor_process = stack.enter_context(start_gdrkit("monitor", "--listen", "127.0.0.1:0", "--interval", "0"))
        url = read_metrics_url(monitor_process.stdout)
        scrape(url)  # The first reading imports libraries.
        cpu_time_before_s = read_cpu_time_s(monitor_process.pid)
        for _ in range(READING_COUNT):
            scrape(url)
        cpu_time_per_reading_s = (read_cpu_time_s(monitor_process.pid) - cpu_time_before_s) / READING_COUNT
    assert cpu_time_per_reading_s < 0.01 * SCRAPE_INTERVAL_S


def test_machine_is_read_once_in_the_interval() -> None:
    reader, uncached_reader = monitor.MachineReader(interval_s=600), monitor.MachineReader(interval_s=0)
    assert reader.read() is reader.read()
    assert uncached_reader.read() is not uncached_reader.read()


def test_thread_of_the_server_receives_no_signals() -> None:
    threads_before = {thread.native_id for thread in threading.enumerate()}
    signal_mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with monitor.serve_metrics("127.0.0.1", 0, metrics=tuple):
        (thread_id,) = {thread.native_id for thread in threading.enumerate()} - threads_before
        status_text = Path(f"/proc/self/task/{thread_id}/status").read_text()
    (blocked_signals_hex,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", status_text, re.MULTILINE)
    assert all(
        int(blocked_signals_hex, 16) >> (signal_number - 1) & 1
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == signal_mask_before


def read_cpu_time_s(process_id: int) -> float:
    """Return the CPU time that a process has used, in user mode and in the kernel."""
    # Fields 14 (utime) and 15 (stime) of proc(5). The list begins with field 3, because field 2 may contain spaces.
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@needs(verbs.nic())
def test_monitor_counts_the_bytes_that_a_nic_sends(nic: Nic) -> None:
    def read_sent_bytes() -> float:
        metrics = {metric.name: metric for metric in monitor.machine_metrics()}
        return sum(
            value
            for labels, value in metrics["gdrkit_port_sent_bytes"].values.items()
            if ("device", nic.name) in labels
        )

    bytes_before = read_sent_bytes()
    memory = bytearray(1 << 20)
    with nic.register_host(memory) as region, connect_initiator(nic, memory_bytes=1 << 20) as initiator:
        initiator.run(Direction.WRITE, region.remote(), length_bytes=1 << 20, operations=4, depth=2)
    assert read_sent_bytes() - bytes_before >= 4 << 20


def test_numbers_of_the_present_are_no_counters() -> None:
    """Each gauge is a field of a statistics class or `clients` of an agent. All other fields count events."""
    field_names = {
        field.name
        for statistics_class in (CacheStatistics, PoolStatistics, MemoryPoolStatistics)
        for field in dataclasses.fields(statistics_class)
    }
    assert field_names | {"clients"} >= GAUGES
    assert field_names - GAUGES == {
        *("hits", "misses", "registrations", "evictions", "invalidations"),
        *("allocations", "timeouts", "waits", "trimmed_blocks"),
    }


@needs(cuda_needs.device(), verbs.nic())
def test_registrations_that_ended_leave_zero(device: Device, nic: Nic) -> None:
    with (
        RegionCache([nic], regions_max=1) as cache,
        monitor.watch("cache", cache.statistics, name="test"),
        monitor.serve_metrics("127.0.0.1", 0) as server,
    ):
        with device.allocate(4096) as first_memory, device.allocate(4096) as second_memory:
            for index in range(REGISTRATION_COUNT):
                cache.lease((first_memory, second_memory)[index % 2]).close()
            samples_while_allocated = scrape(server.address)
        samples_after_free = scrape(server.address)
    assert samples_while_allocated['gdrkit_cache_registrations_total{name="test"}'] == REGISTRATION_COUNT
    assert samples_while_allocated['gdrkit_cache_regions{name="test"}'] == 1
    assert (
        samples_after_free['gdrkit_cache_regions{name="test"}']
        == samples_after_free['gdrkit_cache_registered_bytes{name="test"}']
        == 0
    )


def read_process_samples(process_id: str) -> dict[str, float]:
    """Return the RDMA and dma-buf samples of a process. A key is a metric and its first label: `gdrkit_dmabufs 12`."""
    return {
        f"{metric.name} {labels[0][1]}": value
        for metric in monitor.machine_metrics()
        for labels, value in metric.values.items()
        if ("pid", process_id) in labels and metric.name.startswith(("gdrkit_rdma", "gdrkit_dmabuf"))
    }


@needs(software(Api.VERBS), software(Api.CUDA))
def test_registrations_of_another_process_leave_zero() -> None:
    with LineChildProcess(*REGION_HOLDER_COMMAND) as child:
        process_id = child.read_line()
        for line in ("hold 5", f"cycle {REGISTRATION_COUNT}"):
            child.write_line(line)
            child.expect_line("done")
        assert read_process_samples(process_id) == {
            "gdrkit_rdma_queue_pairs twin": 0,
            "gdrkit_rdma_regions twin": 5,
            "gdrkit_rdma_region_bytes twin": 5 * REGION_BYTES,
            f"gdrkit_dmabufs {process_id}": 5,
            f"gdrkit_dmabuf_bytes {process_id}": 5 * MEMORY_BYTES,
        }
        child.write_line("release")
        child.expect_line("done")
        assert set(read_process_samples(process_id).values()) == {0}
        child.end()
    assert read_process_samples(process_id) == {}


def read_own_samples() -> dict[str, float]:
    """Return the samples of this process. A key is a metric and its first label: `gdrkit_open_objects verbs.region`."""
    return {
        f"{metric.name} {labels[0][1]}": value
        for metric in monitor.process_metrics()
        for labels, value in metric.values.items()
    }


def compute_changes(samples_before: dict[str, float]) -> dict[str, float]:
    """Return by how much each sample of this process differs from `samples_before`, without equal samples."""
    return {
        name: value - samples_before.get(name, 0)
        for name, value in read_own_samples().items()
        if value != samples_before.get(name, 0)
    }


@needs(cuda_needs.device(), verbs.nic())
def test_own_regions_dmabufs_and_pinned_memory_are_counted(device: Device, nic: Nic) -> None:
    samples_before = read_own_samples()
    with (
        device.allocate(8192) as memory,
        memory.export_dmabuf(),
        PinnedMemory(device, 4096),
        nic.register_host(bytearray(100)),
    ):
        changes = compute_changes(samples_before)
    # Other types are open too: the context and the memory of the device.
    object_types = ("verbs.region", "dmabuf_range", "cuda.pinned")
    assert {name: value for name, value in changes.items() if name.endswith(object_types)} == {
        "gdrkit_open_objects verbs.region": 1,
        "gdrkit_open_objects dmabuf_range": 1,
        "gdrkit_open_objects cuda.pinned": 1,
        "gdrkit_open_object_bytes verbs.region": 100,
        "gdrkit_open_object_bytes dmabuf_range": 8192,
        "gdrkit_open_object_bytes cuda.pinned": 4096,
    }
    assert (
        read_own_samples()["gdrkit_open_object_bytes verbs.region"]
        == samples_before["gdrkit_open_object_bytes verbs.region"]
    )


@pytest.mark.parametrize("length_bytes", [1 << 10, 1 << 20])
def test_short_and_long_transfers_are_counted(tmp_path: Path, length_bytes: int) -> None:
    (tmp_path / "data").write_bytes(bytes(length_bytes))
    samples_before = read_own_samples()
    with gds.File(tmp_path / "data", direct="never") as file:
        file.read_into(bytearray(length_bytes))
    gds.close_engines()
    assert compute_changes(samples_before) == {
        "gdrkit_transfers engine": 1,
        "gdrkit_transferred_bytes engine": length_bytes,
    }


@pytest.mark.parametrize("command", ["server", "agent"])
@needs(verbs.nic())
def test_agent_and_server_export_their_counters(tmp_path: Path, command: str) -> None:
    arguments = ["serve", "--store", str(tmp_path)] if command == "server" else ["agent", str(tmp_path)]
    if command == "agent":
        arguments += ["--store", str(tmp_path)]
    with start_gdrkit(*arguments, "--metrics", "127.0.0.1:0") as command_process:
        samples = scrape(read_metrics_url(command_process.stderr))
    assert any(name.startswith(f"gdrkit_{command}_") for name in samples)


# The last port contains the Arabic digit U+0663, which int() accepts.
@pytest.mark.parametrize(
    "address_text", ["", "localhost", ":80", "host:", "host:x", "host:65536", "host:-1", "host:8٣"]
)
def test_bad_address_is_a_usage_error(address_text: str) -> None:
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        monitor.parse_address(address_text)


@pytest.mark.parametrize(("address_text", "address"), [("a:0", ("a", 0)), ("[::1]:65535", ("::1", 65535))])
def test_address_is_parsed(address_text: str, address: tuple[str, int]) -> None:
    assert monitor.parse_address(address_text) == address


def test_used_port_is_an_error_with_the_address() -> None:
    with monitor.serve_metrics("127.0.0.1", 0, metrics=tuple) as server:
        port = int(server.address.split(":")[2].partition("/")[0])
        with pytest.raises(ApiError) as error_info:
            monitor.serve_metrics("127.0.0.1", port, metrics=tuple)
    assert error_info.value.errno == errno.EADDRINUSE
    assert error_info.value.arguments == {"host": "127.0.0.1", "port": port}


def test_missing_library_is_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('not here')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    completed = subprocess.run(
        [*GDRKIT_COMMAND, "monitor"], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert completed.returncode == 3
    # If the installed metadata of gdrkit has the extra `monitor`, the advice names the extra, else the package.
    assert re.search(r"To do: .*(prometheus.client|extra monitor)", completed.stderr)
