"""Collector of the evidence about a process and its descendants while they run."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from gdrkit import evidence, host
from gdrkit.cufile import read_nvidia_fs
from gdrkit.errors import Api, ApiError, Reason, UsageError, errno_name
from gdrkit.observe import logs
from gdrkit.observe.observation import SCHEMA_VERSION, Observation, ObservedProcess, PortTraffic
from gdrkit.observe.routes import derive_routes
from gdrkit.observe.sampled_process import SAMPLE_INTERVAL_S, SampledProcess, describe_errno
from gdrkit.text import format_count
from gdrkit.twin_run import block_signals, read_usage, supervise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from gdrkit.cufile import NvidiaFs
    from gdrkit.evidence import RdmaQueuePair, RdmaRegion
    from gdrkit.host import PortCounters

_Object = TypeVar("_Object")

__all__ = ["Observer", "observe_process", "port_traffic", "run_observed"]

# Interval between two searches for the marker (see Observer) in the environments of all processes, in seconds.
_MARKER_SCAN_INTERVAL_S = 0.5
_SATURATED_COUNT = 0xFFFF_FFFF  # A port counter of 32 bits stops at this value and does not wrap.


class Observer:
    """Observer of one process and its descendants.

    The counters of the machine are read when the context opens. Then :meth:`sample` must be called repeatedly, and
    :meth:`finish` returns the evidence of all samples and the increase of the counters.

    Parameters
    ----------
    marker : bytes or None
        An entry "NAME=value" of the environment of the observed command. A process that has this entry counts as a
        descendant, even if its parent has ended.
    is_attached : bool
        Whether the process ran before the observation. The counts that it and its descendants have at the first sample
        are then subtracted. The counts of descendants that start later are complete.
    """

    def __init__(self, *, marker: bytes | None = None, is_attached: bool = False) -> None:
        self._marker = marker
        # Whether the processes of the next sample ran before the observation.
        self._is_attaching = is_attached
        self._tree = host.HostTree()
        self._processes: dict[int, SampledProcess] = {}
        self._other_queue_pairs: dict[tuple[str, int], RdmaQueuePair] = {}
        # Numbers of objects and of moved bytes, by path of the usage file, process ID and API.
        self._twin_counts_at_start: dict[tuple[Path, int, str], tuple[int, int]] = {}
        self._twin_counts: dict[tuple[Path, int, str], tuple[int, int]] = {}
        self._not_seen: dict[str, None] = {}
        self._gpu_counter = host.GpuTrafficCounter()
        self._start_s = time.monotonic()
        self._next_marker_scan_s = 0.0
        self._ports_at_start: tuple[PortCounters, ...] = ()
        self._nvidia_fs_at_start: NvidiaFs | None = None

    def __enter__(self) -> Self:
        self._gpu_counter.__enter__()
        self._ports_at_start = host.port_counters(self._tree)
        self._nvidia_fs_at_start = read_nvidia_fs(self._tree)
        self._start_s = time.monotonic()
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gpu_counter.__exit__(error_class, error, traceback)

    def sample(self, process_id: int) -> None:
        """Add the evidence that the process and its descendants show at this moment."""
        now_s = time.monotonic()
        marker = None
        # The search for the marker reads the environment of every process of the machine. It takes long, so not every
        # sample includes it.
        if self._marker is not None and now_s >= self._next_marker_scan_s:
            marker, self._next_marker_scan_s = self._marker, now_s + _MARKER_SCAN_INTERVAL_S
        # The counter starts its thread at the first sample, because supervise() forks before it.
        self._gpu_counter.start()
        program_by_process_id = host.descendants(self._tree, process_id, marker=marker)
        for sampled_process_id, program in program_by_process_id.items():
            new_process = SampledProcess(sampled_process_id, program, is_attached=self._is_attaching)
            self._processes.setdefault(sampled_process_id, new_process).program = program
        sockets = self._query_netlink("TCP sockets", evidence.tcp_sockets)
        socket_by_inode = {tcp_socket.inode: tcp_socket for tcp_socket in sockets}
        for sampled_process_id in program_by_process_id:
            for sentence in self._processes[sampled_process_id].sample(self._tree, socket_by_inode, now_s):
                self._add_not_seen(sentence)
        self._sample_rdma()
        self._sample_twins()
        self._gpu_counter.read_processes()
        self._is_attaching = False

    def finish(self, command: Sequence[str], exit_code: int | None) -> Observation:
        """Return the observation: the evidence of all samples, the growth of the counters, and a verdict per route."""
        duration_s = time.monotonic() - self._start_s
        gpus = self._gpu_counter.traffic()
        ports = tuple(self._compute_port_traffic())
        nvidia_fs = self._compute_nvidia_fs_growth()
        processes = tuple(self._describe_process(self._processes[process_id]) for process_id in sorted(self._processes))
        self._add_unobservable_facts(processes)
        log = self._describe_logged_transports()
        observation = Observation(
            schema_version=SCHEMA_VERSION,
            command=tuple(command),
            duration_s=duration_s,
            exit_code=exit_code,
            processes=processes,
            ports=ports,
            gpus=gpus,
            nvidia_fs=nvidia_fs,
            other_queue_pairs=tuple(self._other_queue_pairs.values()),
            log=log,
            routes=(),
            not_seen=tuple(self._not_seen),
        )
        return derive_routes(observation)

    def _query_netlink(self, subject: str, query: Callable[[], tuple[_Object, ...]]) -> tuple[_Object, ...]:
        try:
            return query()
        except OSError as error:
            cause_text = (
                "; the RDMA subsystem of the kernel is not loaded" if error.errno == errno.EPROTONOSUPPORT else ""
            )
            self._add_not_seen(f"{subject}: netlink: {describe_errno(error)}{cause_text}")
            return ()

    def _add_not_seen(self, sentence: str) -> None:
        # A dict keeps the order, and the same sentence of many samples is listed once.
        self._not_seen[sentence] = None

    def _sample_rdma(self) -> None:
        queue_pairs: Iterable[RdmaQueuePair] = self._query_netlink(
            "RDMA queue pairs and regions", evidence.rdma_queue_pairs
        )
        for pair in queue_pairs:
            pair_key = (pair.device, pair.number)
            process = self._processes.get(pair.process_id or 0)
            if process is None:
                self._other_queue_pairs[pair_key] = pair
            # Keep the state RTS (connected) if a pair was ever seen in it: a pair enters the error state at its end.
            elif (
                pair_key not in process.queue_pairs
                or pair.state == "RTS"
                or process.queue_pairs[pair_key].state != "RTS"
            ):
                process.queue_pairs[pair_key] = pair
        if not self._processes or not self._ports_at_start:
            return
        regions: Iterable[RdmaRegion] = self._query_netlink("RDMA queue pairs and regions", evidence.rdma_regions)
        for region in regions:
            process = self._processes.get(region.process_id or 0)
            if process is not None:
                process.regions[region.device, region.number, region.length_bytes] = region

    def _sample_twins(self) -> None:
        for path in {process.usage_file for process in self._processes.values() if process.usage_file is not None}:
            with contextlib.suppress(OSError):
                for use in read_usage(path):
                    if use.process_id in self._processes:
                        counts_key = (path, use.process_id, use.api.value)
                        self._twin_counts[counts_key] = (use.objects_count, use.moved_bytes)
                        if self._is_attaching:
                            self._twin_counts_at_start.setdefault(counts_key, self._twin_counts[counts_key])

    def _describe_process(self, process: SampledProcess) -> ObservedProcess:
        twin_objects: dict[str, int] = {}
        twin_bytes: dict[str, int] = {}
        for counts_key, (objects_count, moved_bytes) in self._twin_counts.items():
            _path, process_id, api = counts_key
            if process_id == process.process_id:
                bytes_at_start = self._twin_counts_at_start.get(counts_key, (0, 0))[1]
                # The process may still use the objects that it created before the observation, so they count.
                twin_objects[api] = twin_objects.get(api, 0) + objects_count
                twin_bytes[api] = twin_bytes.get(api, 0) + moved_bytes - bytes_at_start
        return process.describe(twin_objects=twin_objects, twin_bytes=twin_bytes)

    def _compute_port_traffic(self) -> Iterable[PortTraffic]:
        for before in self._ports_at_start:
            traffic, not_seen_sentences = port_traffic(
                before, host.read_port_counters(self._tree, before.device, before.port)
            )
            for sentence in not_seen_sentences:
                self._add_not_seen(sentence)
            yield traffic

    def _compute_nvidia_fs_growth(self) -> dict[str, int] | None:
        nvidia_fs = read_nvidia_fs(self._tree)
        if nvidia_fs is None or self._nvidia_fs_at_start is None:
            return None
        if not nvidia_fs.counting:
            self._add_not_seen(
                "bytes of nvidia-fs: it does not count them; echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
            )
        increase_by_counter = {name: nvidia_fs.increase(self._nvidia_fs_at_start, name) for name in nvidia_fs.counters}
        return {name: increase for name, increase in increase_by_counter.items() if increase > 0}

    def _describe_logged_transports(self) -> tuple[str, ...]:
        line_count_by_transport: dict[str, int] = {}
        for path in sorted({path for process in self._processes.values() for path in process.log_paths}):
            for transport_text, count in logs.count_transport_lines(path).items():
                line_count_by_transport[transport_text] = line_count_by_transport.get(transport_text, 0) + count
        return tuple(
            f"{transport_text} ({format_count(count, 'line')})"
            for transport_text, count in sorted(line_count_by_transport.items())
        )

    def _add_unobservable_facts(self, processes: tuple[ObservedProcess, ...]) -> None:
        """Add the facts that another process cannot observe, each only if it concerns one of `processes`."""
        library_names = {library.name for process in processes for library in process.libraries}
        has_log_files = any(process.log_paths for process in self._processes.values())
        if self._gpu_counter.failure is not None and any(
            "/dev/nvidia" in node for process in processes for node in process.nodes
        ):
            self._add_not_seen(f"traffic of GPUs: {self._gpu_counter.failure}")
        if any(process.regions for process in processes):
            self._add_not_seen(
                "whether a memory region is of a dma-buf or of an address: the kernel does not report it; the dma-bufs "
                "that the process holds are listed"
            )
        if "cufile" in library_names:
            self._add_not_seen(
                "statistics of cuFile: they are in the process; gds_stats shows them if cufile.json has cufile_stats"
            )
        for name, library_title in (("nccl", "NCCL"), ("ucx", "UCX")):
            if name in library_names and not has_log_files:
                self._add_not_seen(f"log of {library_title}: it is not written to a file; --logs switches it on")
        if not processes:
            self._add_not_seen("any process: the command ended before the first sample, 20 ms after its start")


def observe_process(process_id: int, *, duration_s: float | None = None) -> Observation:
    """Observe a running process until it ends, until `duration_s` has passed, or until SIGINT.

    Raises
    ------
    ApiError
        ESRCH: there is no such process. EACCES: the process belongs to another user.
    UsageError
        `process_id` is the calling process.
    """
    if process_id == os.getpid():
        message = f"--pid {process_id} is gdrkit itself"
        raise UsageError(message)
    tree = host.HostTree()
    identity = host.process_identity(process_id, tree)
    if identity is None:
        raise _make_process_error(process_id, errno.ESRCH, Reason.BAD_ARGUMENT, "check the process ID")
    try:
        # This call only checks the access: it fails if this user may not examine the process.
        evidence.descriptor_targets(str(process_id))
    except FileNotFoundError as error:
        raise _make_process_error(process_id, errno.ESRCH, Reason.BAD_ARGUMENT, "check the process ID") from error
    except PermissionError as error:
        what_to_do = "run gdrkit observe with CAP_SYS_PTRACE or as the user of the process"
        raise _make_process_error(process_id, errno.EACCES, Reason.NO_PERMISSION, what_to_do) from error
    program = (tree.text(f"/proc/{process_id}/comm") or "").strip()
    end_s = None if duration_s is None else time.monotonic() + duration_s
    with Observer(is_attached=True) as observer:
        with contextlib.suppress(KeyboardInterrupt):
            while host.is_running(identity, tree) is not False and (end_s is None or time.monotonic() < end_s):
                observer.sample(process_id)
                time.sleep(SAMPLE_INTERVAL_S)
        return observer.finish((program, f"pid {process_id}"), None)


def run_observed(command: Sequence[str], *, with_logs: bool = False) -> tuple[Observation, int]:
    """Run a command, observe it, and return the observation and the wait status of the command.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    with_logs : bool
        Whether NCCL and UCX write logs that name their transports, in place of the logs that the environment requests.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) or another errno of execvp.
    """
    marker = f"GDRKIT_OBSERVATION={os.getpid()}.{secrets.token_hex(8)}"
    marker_name, _, marker_value = marker.partition("=")
    # Block the signals before the observer starts NVML, so that the thread which NVML starts inherits the mask.
    command_mask = block_signals()
    with tempfile.TemporaryDirectory(prefix="gdrkit-observe-") as folder, Observer(marker=marker.encode()) as observer:
        environment = {
            **os.environ,
            marker_name: marker_value,
            **(logs.make_log_environment(Path(folder)) if with_logs else {}),
        }
        wait_status = supervise(
            command, environment, observer.sample, signal_mask=command_mask, interval_s_max=SAMPLE_INTERVAL_S
        )
        return observer.finish(command, os.waitstatus_to_exitcode(wait_status)), wait_status


def port_traffic(before: PortCounters, after: PortCounters) -> tuple[PortTraffic, tuple[str, ...]]:
    """Return the growth of each counter of a port, and one sentence for each counter whose growth is unknown."""
    port_text, not_seen_sentences = f"{before.device} port {before.port}", []
    growth_by_counter: dict[str, int | None] = {}
    for name in ("sent_bytes", "received_bytes", "sent_packets", "received_packets"):
        first_count, last_count = getattr(before, name), getattr(after, name)
        growth_by_counter[name] = None
        if first_count is None or last_count is None:
            continue
        counter_text = f"{name.replace('_', ' ')} of {port_text}"
        if last_count < first_count:
            not_seen_sentences.append(
                f"{counter_text}: the counter went back from {first_count} to {last_count}, so it wrapped or was reset"
            )
        # The hardware counts the data in words of four bytes.
        elif first_count == last_count and last_count // (4 if name.endswith("bytes") else 1) == _SATURATED_COUNT:
            not_seen_sentences.append(
                f"{counter_text}: the counter stands still at its largest value; reset it with perfquery -R"
            )
        else:
            growth_by_counter[name] = last_count - first_count
    if before.sent_bytes is None and before.sent_packets is None:
        not_seen_sentences.append(f"traffic of {port_text}: its driver has no counters in sysfs")
    return PortTraffic(before.device, before.port, **growth_by_counter), tuple(not_seen_sentences)


def _make_process_error(process_id: int, error_number: int, reason: Reason, what_to_do: str) -> ApiError:
    return ApiError(
        api=Api.KERNEL,
        operation="observe",
        status=error_number,
        status_name=errno_name(error_number),
        errno=error_number,
        arguments={"pid": process_id},
        reason=reason,
        what_to_do=what_to_do,
    )
