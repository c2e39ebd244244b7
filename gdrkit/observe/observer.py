"""Collector of the evidence about a process and its descendants while they run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from gdrkit import evidence, host, launch
from gdrkit.cufile import read_nvidia_fs
from gdrkit.errors import Api, ApiError, Reason, UsageError, errno_name
from gdrkit.observe import logs
from gdrkit.observe.observation import (
    SCHEMA_VERSION,
    Observation,
    ObservedLibrary,
    ObservedProcess,
    PortTraffic,
)
from gdrkit.observe.routes import derive_routes
from gdrkit.report.substrate import is_twin
from gdrkit.text import format_count
from gdrkit.twin_run import block_signals, read_usage, supervise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from gdrkit.cufile import NvidiaFs
    from gdrkit.evidence import HeldDmabuf, RdmaQueuePair, RdmaRegion
    from gdrkit.host import PortCounters

_Answer = TypeVar("_Answer")

__all__ = ["Observer", "observe_process", "port_traffic", "run_observed"]

# Names of libraries that move bytes or choose a path, by the beginning of the file name.
_LIBRARY_NAMES = {
    "libibverbs": "verbs",
    "librdmacm": "rdmacm",
    "libcuda.so": "cuda",
    "libcuda-": "cuda",
    "libcudart": "cudart",
    "libcufile.so": "cufile",
    "libcufile-": "cufile",
    "libhl-thunk": "hlthunk",
    "libnccl": "nccl",
    "libucp": "ucx",
    "libfabric": "libfabric",
    "libnixl": "nixl",
    "libkvikio": "kvikio",
    "libtorch_cuda": "torch",
}
# The native engines of gdrkit are modules of Python, so their names say little without the folder.
_ENGINES = {"/gdrkit/gds/_engine": "gdrkit.gds", "/gdrkit/storage/_engine": "gdrkit.storage"}
# The fields of a line of /proc/<pid>/maps: addresses, permissions, offset, device, inode, path (proc(5)).
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ [1-9]\d*\s+(/.*)$", re.MULTILINE)
_NODES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")
_SOCKET = re.compile(r"^socket:\[(\d+)\]$")
_MAPPED_FILE_BYTES_MIN = 1 << 20
_SAMPLE_S = 0.05
# Memory maps are long, and change rarely after the start. They are read at intervals that double up to this limit.
_MAPS_LATEST_S = 2.0
_IO_FIELDS = ("rchar", "wchar", "read_bytes")
_SATURATED = 0xFFFF_FFFF


@dataclass(slots=True)
class _Process:
    """What was seen of one process so far."""

    process_id: int
    program: str
    libraries: dict[str, ObservedLibrary] = field(default_factory=dict)
    queue_pairs: dict[tuple[str, int], RdmaQueuePair] = field(default_factory=dict)
    regions: dict[tuple[str, int | None, int], RdmaRegion] = field(default_factory=dict)
    dmabufs: dict[int, HeldDmabuf] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    sockets: dict[int, evidence.TcpSocket] = field(default_factory=dict)
    first_sockets: dict[int, evidence.TcpSocket] = field(default_factory=dict)
    first_io: dict[str, int] = field(default_factory=dict)
    last_io: dict[str, int] = field(default_factory=dict)
    mapped_files: dict[str, int] = field(default_factory=dict)
    log_paths: set[Path] = field(default_factory=set)
    usage_file: Path | None = None
    is_new: bool = True
    next_maps_s: float = 0.0
    maps_interval_s: float = _SAMPLE_S


class Observer:
    """Observer of one process and its descendants.

    The counters of the machine are read when the context opens, and :meth:`finish` returns how much they grew.

    Parameters
    ----------
    marker : bytes or None
        An entry of the environment by which a process counts as a descendant, although its parent has ended.
    is_attached : bool
        Whether the process ran before the observation, so that what it did earlier is subtracted.
    """

    def __init__(self, *, marker: bytes | None = None, is_attached: bool = False) -> None:
        self._marker = marker
        self._is_attached = is_attached
        self._tree = host.HostTree()
        self._processes: dict[int, _Process] = {}
        self._other_queue_pairs: dict[tuple[str, int], RdmaQueuePair] = {}
        self._first_twin_use: dict[tuple[Path, int, str], tuple[int, int]] = {}
        self._twin_use: dict[tuple[Path, int, str], tuple[int, int]] = {}
        self._not_seen: dict[str, None] = {}
        self._gpu_counter = host.GpuTrafficCounter()
        self._start_s = time.monotonic()
        self._next_markers_s = 0.0
        self._ports: tuple[PortCounters, ...] = ()
        self._nvidia_fs: NvidiaFs | None = None

    def __enter__(self) -> Self:
        self._gpu_counter.__enter__()
        self._ports = host.port_counters(self._tree)
        self._nvidia_fs = read_nvidia_fs(self._tree)
        self._start_s = time.monotonic()
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._gpu_counter.__exit__(error_class, error, traceback)

    def sample(self, process_id: int) -> None:
        """Add what the process and its descendants have at this moment."""
        now_s = time.monotonic()
        marker = None
        # The environment of every process of the machine is read, so this is not done in every sample.
        if self._marker is not None and now_s >= self._next_markers_s:
            marker, self._next_markers_s = self._marker, now_s + _MAPS_LATEST_S / 4
        self._gpu_counter.start()
        members = host.descendants(self._tree, process_id, marker=marker)
        for member, program in members.items():
            self._processes.setdefault(member, _Process(member, program)).program = program
        sockets = self._query("TCP sockets", evidence.tcp_sockets)
        sockets_of_inode = {tcp_socket.inode: tcp_socket for tcp_socket in sockets}
        for member in members:
            self._sample_process(self._processes[member], sockets_of_inode, now_s)
        self._sample_rdma()
        self._sample_twins()
        self._gpu_counter.read_processes()

    def finish(self, command: Sequence[str], exit_code: int | None) -> Observation:
        """Return the result, with a verdict for each route."""
        duration_s = time.monotonic() - self._start_s
        gpus = self._gpu_counter.traffic()
        ports = tuple(self._compute_port_traffic())
        nvidia_fs = self._compute_nvidia_fs_growth()
        processes = tuple(self._finish_process(self._processes[number]) for number in sorted(self._processes))
        self._add_gaps(processes)
        log = self._find_transports()
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

    def _query(self, name: str, query: Callable[[], tuple[_Answer, ...]]) -> tuple[_Answer, ...]:
        try:
            return query()
        except OSError as error:
            advice = "; the RDMA subsystem of the kernel is not loaded" if error.errno == errno.EPROTONOSUPPORT else ""
            self._add_gap(f"{name}: netlink: {_describe_errno(error)}{advice}")
            return ()

    def _add_gap(self, sentence: str) -> None:
        # A dict keeps the order, and the same gap of many samples is listed once.
        self._not_seen[sentence] = None

    def _sample_process(self, process: _Process, sockets: dict[int, evidence.TcpSocket], now_s: float) -> None:
        name = str(process.process_id)
        is_first, process.is_new = process.is_new and self._is_attached, False
        self._sample_io(process, name, is_first=is_first)
        try:
            targets = evidence.descriptors(name)
        except FileNotFoundError:
            return  # The process has ended.
        except OSError as error:
            if (self._tree.text(f"/proc/{name}/stat") or "Z").rpartition(")")[2].split()[:1] == ["Z"]:
                return  # The process has ended, and its parent does not know that yet.
            text = f"pid {name} ({process.program}): {_describe_errno(error)}"
            self._add_gap(f"libraries, descriptors and sockets of {text}; CAP_SYS_PTRACE is needed to see them")
            return
        process.nodes |= {target for target in targets.values() if target.startswith(_NODES)}
        for dmabuf in evidence.held_dmabufs(self._tree, name, targets):
            process.dmabufs[dmabuf.inode or id(dmabuf)] = dmabuf
        for target in targets.values():
            match = _SOCKET.match(target)
            if match and (tcp_socket := sockets.get(int(match[1]))) is not None:
                process.sockets[tcp_socket.inode] = tcp_socket
                if is_first:
                    process.first_sockets[tcp_socket.inode] = tcp_socket
        if now_s >= process.next_maps_s:
            process.maps_interval_s = min(2 * process.maps_interval_s, _MAPS_LATEST_S)
            process.next_maps_s = now_s + process.maps_interval_s
            self._sample_maps(process, name)

    def _sample_io(self, process: _Process, name: str, *, is_first: bool) -> None:
        text = self._tree.text(f"/proc/{name}/io")
        values = dict(line.split(": ") for line in (text or "").splitlines() if ": " in line)
        io = {key: int(values[key]) for key in _IO_FIELDS if values.get(key, "").isdecimal()}
        if io:
            process.last_io = io
            if is_first:
                process.first_io = io

    def _sample_maps(self, process: _Process, name: str) -> None:
        mapped_files: dict[str, int] = {}
        for begin, end, permissions, path in _MAPPING.findall(self._tree.text(f"/proc/{name}/maps") or ""):
            library_name = _find_library_name(path)
            if library_name is not None:
                if "x" in permissions and path not in process.libraries:
                    library = evidence.describe_library(path)
                    process.libraries[path] = ObservedLibrary(library_name, path, library.build_id, is_twin(library))
            elif ".so" not in path and not path.startswith(("/memfd:", "/dev/", "/usr/", "/SYSV")):
                mapped_files[path] = mapped_files.get(path, 0) + int(end, 16) - int(begin, 16)
        for path, size_bytes in mapped_files.items():
            if size_bytes >= _MAPPED_FILE_BYTES_MIN:
                process.mapped_files[path] = max(size_bytes, process.mapped_files.get(path, 0))
        environ_data = (self._tree.data(f"/proc/{name}/environ") or b"").decode("utf-8", "backslashreplace")
        environ = dict(entry.partition("=")[::2] for entry in environ_data.split("\0") if "=" in entry)
        working_folder = "/".join(self._tree.link_parts(f"/proc/{name}/cwd")).replace("//", "/") or "/"
        process.log_paths.update(logs.log_files(environ, process.process_id, working_folder))
        if environ.get(launch.USAGE_VARIABLE):
            process.usage_file = Path(environ[launch.USAGE_VARIABLE])
        own_network, network = (self._tree.link_name(f"/proc/{folder}/ns/net") for folder in ("self", name))
        if network is not None and network != own_network:
            self._add_gap(f"TCP sockets of pid {name} ({process.program}): it has another network namespace")

    def _sample_rdma(self) -> None:
        queue_pairs: Iterable[RdmaQueuePair] = self._query("RDMA queue pairs and regions", evidence.rdma_queue_pairs)
        for pair in queue_pairs:
            key = (pair.device, pair.number)
            process = self._processes.get(pair.process_id or 0)
            if process is None:
                self._other_queue_pairs[key] = pair
            # A connected state is kept, because queue pairs enter the error state at the end.
            elif key not in process.queue_pairs or pair.state == "RTS" or process.queue_pairs[key].state != "RTS":
                process.queue_pairs[key] = pair
        if not self._processes or not self._ports:
            return
        regions: Iterable[RdmaRegion] = self._query("RDMA queue pairs and regions", evidence.rdma_regions)
        for region in regions:
            process = self._processes.get(region.process_id or 0)
            if process is not None:
                process.regions[region.device, region.number, region.length_bytes] = region

    def _sample_twins(self) -> None:
        for path in {process.usage_file for process in self._processes.values() if process.usage_file is not None}:
            with contextlib.suppress(OSError):
                for use in read_usage(path):
                    if use.process_id in self._processes:
                        key = (path, use.process_id, use.api.value)
                        self._twin_use[key] = (use.objects_count, use.moved_bytes)
                        if self._is_attached:
                            self._first_twin_use.setdefault(key, self._twin_use[key])

    def _finish_process(self, process: _Process) -> ObservedProcess:
        def total(*, is_sent: bool, is_loopback: bool) -> int:
            return sum(
                _read_tcp_bytes(tcp_socket, is_sent=is_sent)
                - (
                    _read_tcp_bytes(first_sockets, is_sent=is_sent)
                    if (first_sockets := process.first_sockets.get(inode))
                    else 0
                )
                for inode, tcp_socket in process.sockets.items()
                if tcp_socket.is_loopback == is_loopback
            )

        io = {key: value - process.first_io.get(key, 0) for key, value in process.last_io.items()}
        objects: dict[str, int] = {}
        moved_bytes_by_api: dict[str, int] = {}
        for key, (objects_count, moved_bytes) in self._twin_use.items():
            _path, process_id, api = key
            if process_id == process.process_id:
                objects[api] = objects.get(api, 0) + objects_count
                moved_bytes_by_api[api] = (
                    moved_bytes_by_api.get(api, 0) + moved_bytes - self._first_twin_use.get(key, (0, 0))[1]
                )
        return ObservedProcess(
            process_id=process.process_id,
            program=process.program,
            libraries=tuple(process.libraries.values()),
            queue_pairs=tuple(process.queue_pairs.values()),
            regions=tuple(process.regions.values()),
            dmabufs=tuple(process.dmabufs.values()),
            nodes=tuple(sorted(process.nodes)),
            read_bytes=io.get("rchar"),
            written_bytes=io.get("wchar"),
            storage_read_bytes=io.get("read_bytes"),
            mapped_file_bytes=sum(process.mapped_files.values()),
            loopback_sent_bytes=total(is_sent=True, is_loopback=True),
            remote_sent_bytes=total(is_sent=True, is_loopback=False),
            loopback_received_bytes=total(is_sent=False, is_loopback=True),
            remote_received_bytes=total(is_sent=False, is_loopback=False),
            twin_objects=objects,
            twin_bytes=moved_bytes_by_api,
        )

    def _compute_port_traffic(self) -> Iterable[PortTraffic]:
        for before in self._ports:
            traffic, gaps = port_traffic(before, host.read_port(self._tree, before.device, before.port))
            for gap in gaps:
                self._add_gap(gap)
            yield traffic

    def _compute_nvidia_fs_growth(self) -> dict[str, int] | None:
        after = read_nvidia_fs(self._tree)
        if after is None or self._nvidia_fs is None:
            return None
        if not after.counting:
            self._add_gap(
                "bytes of nvidia-fs: it does not count; echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
            )
        growth = {name: after.increase(self._nvidia_fs, name) for name in after.counters}
        return {name: value for name, value in growth.items() if value > 0}

    def _find_transports(self) -> tuple[str, ...]:
        counts: dict[str, int] = {}
        for path in sorted({path for process in self._processes.values() for path in process.log_paths}):
            for line, count in logs.transport_lines(path).items():
                counts[line] = counts.get(line, 0) + count
        return tuple(f"{line} ({format_count(count, 'line')})" for line, count in sorted(counts.items()))

    def _add_gaps(self, processes: tuple[ObservedProcess, ...]) -> None:
        """Add what no tool can see from outside, as far as it concerns these processes."""
        names = {library.name for process in processes for library in process.libraries}
        has_log = {path.name for process in self._processes.values() for path in process.log_paths}
        if self._gpu_counter.failure is not None and any(
            "/dev/nvidia" in node for process in processes for node in process.nodes
        ):
            self._add_gap(f"traffic of GPUs: {self._gpu_counter.failure}")
        if any(process.regions for process in processes):
            self._add_gap(
                "whether a memory region is of a dma-buf or of an address: the kernel does not report it; the dma-bufs "
                "that the process holds are listed"
            )
        if "cufile" in names:
            self._add_gap(
                "statistics of cuFile: they are in the process; gds_stats shows them if cufile.json has cufile_stats"
            )
        for name, title in (("nccl", "NCCL"), ("ucx", "UCX")):
            if name in names and not has_log:
                self._add_gap(f"log of {title}: it is not written to a file; --logs switches it on")
        if not processes:
            self._add_gap("every process: the command ended before the first sample, after 20 ms")


def observe_process(process_id: int, *, duration_s: float | None = None) -> Observation:
    """Observe a running process until it ends, until `duration_s` has passed, or until SIGINT.

    Raises
    ------
    ApiError
        ESRCH: there is no such process. EACCES: it belongs to another user.
    UsageError
        The process is this one.
    """
    if process_id == os.getpid():
        message = f"--pid {process_id} is gdrkit itself"
        raise UsageError(message)
    tree = host.HostTree()
    identity = host.process_identity(process_id, tree)
    if identity is None:
        raise _describe_process_error(process_id, errno.ESRCH, Reason.BAD_ARGUMENT, "check the process ID")
    try:
        evidence.descriptors(str(process_id))
    except FileNotFoundError as error:
        raise _describe_process_error(process_id, errno.ESRCH, Reason.BAD_ARGUMENT, "check the process ID") from error
    except PermissionError as error:
        what_to_do = "run gdrkit observe with CAP_SYS_PTRACE or as the user of the process"
        raise _describe_process_error(process_id, errno.EACCES, Reason.NO_PERMISSION, what_to_do) from error
    program = (tree.text(f"/proc/{process_id}/comm") or "").strip()
    end_s = None if duration_s is None else time.monotonic() + duration_s
    with Observer(is_attached=True) as observer:
        with contextlib.suppress(KeyboardInterrupt):
            while host.is_running(identity, tree) is not False and (end_s is None or time.monotonic() < end_s):
                observer.sample(process_id)
                time.sleep(_SAMPLE_S)
        return observer.finish((program, f"pid {process_id}"), None)


def run_observed(command: Sequence[str], *, with_logs: bool = False) -> tuple[Observation, int]:
    """Run a command, observe it, and return the observation and the wait status of the command.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    with_logs : bool
        Make NCCL and UCX write the lines that name their transports. They then write no other log.

    Raises
    ------
    ApiError
        The command cannot be started: ENOENT (not found), EACCES (not executable) or another errno of execvp.
    """
    marker = f"GDRKIT_OBSERVATION={os.getpid()}.{secrets.token_hex(8)}"
    name, _, value = marker.partition("=")
    # The observer starts NVML, and NVML starts a thread.
    command_mask = block_signals()
    with tempfile.TemporaryDirectory(prefix="gdrkit-observe-") as folder, Observer(marker=marker.encode()) as observer:
        environment = {**os.environ, name: value, **(logs.switched_on(Path(folder)) if with_logs else {})}
        status = supervise(command, environment, observer.sample, signal_mask=command_mask, interval_s_max=_SAMPLE_S)
        return observer.finish(command, os.waitstatus_to_exitcode(status)), status


def port_traffic(before: PortCounters, after: PortCounters) -> tuple[PortTraffic, tuple[str, ...]]:
    """Return the growth of each counter of a port, and one sentence for each counter whose growth is unknown."""
    port, gaps = f"{before.device} port {before.port}", []
    growths: dict[str, int | None] = {}
    for name in ("sent_bytes", "received_bytes", "sent_packets", "received_packets"):
        first_count, last_count = getattr(before, name), getattr(after, name)
        growths[name] = None
        if first_count is None or last_count is None:
            continue
        title = f"{name.replace('_', ' ')} of {port}"
        if last_count < first_count:
            gaps.append(
                f"{title}: the counter went back from {first_count} to {last_count}, so it wrapped or was reset"
            )
        elif first_count == last_count and last_count // (4 if name.endswith("bytes") else 1) == _SATURATED:
            gaps.append(f"{title}: the counter stands still at its largest value; reset it with perfquery -R")
        else:
            growths[name] = last_count - first_count
    if before.sent_bytes is None and before.sent_packets is None:
        gaps.append(f"traffic of {port}: its driver has no counters in sysfs")
    return PortTraffic(before.device, before.port, **growths), tuple(gaps)


def _describe_process_error(process_id: int, error_number: int, reason: Reason, what_to_do: str) -> ApiError:
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


def _describe_errno(error: OSError) -> str:
    return f"{os.strerror(error.errno or 0)} ({errno_name(error.errno)})"


def _find_library_name(path: str) -> str | None:
    file_name = path.rpartition("/")[2]
    for prefix, name in _LIBRARY_NAMES.items():
        if file_name.startswith(prefix):
            return name
    return next((name for part, name in _ENGINES.items() if part in path), None)


def _read_tcp_bytes(tcp_socket: evidence.TcpSocket, *, is_sent: bool) -> int:
    return tcp_socket.sent_bytes if is_sent else tcp_socket.received_bytes
