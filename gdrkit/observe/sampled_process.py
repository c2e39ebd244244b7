"""The evidence about one process, which grows with each sample."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import evidence, launch
from gdrkit.errors import errno_name
from gdrkit.observe import logs
from gdrkit.observe.observation import ObservedLibrary, ObservedProcess
from gdrkit.report.substrate import is_twin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gdrkit.evidence import HeldDmabuf, RdmaQueuePair, RdmaRegion, TcpSocket
    from gdrkit.host import HostTree

__all__ = ["SAMPLE_INTERVAL_S", "SampledProcess", "describe_errno"]

# Interval between two samples, in seconds.
SAMPLE_INTERVAL_S = 0.05
# The memory map of a process is long, and changes rarely after the start. So the intervals between two reads of it
# double up to this limit, in seconds.
_MAPS_INTERVAL_S_MAX = 2.0

# Names of libraries that move bytes or choose a route, by the beginning of the file name.
_LIBRARY_NAME_BY_PREFIX = {
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
# The native engines of gdrkit are extension modules of Python with equal file names, so the folder identifies them.
_ENGINE_NAME_BY_PATH_PART = {"/gdrkit/gds/_engine": "gdrkit.gds", "/gdrkit/storage/_engine": "gdrkit.storage"}
# The fields of a line of /proc/<pid>/maps: addresses, permissions, offset, device, inode, path (proc(5)). Only mappings
# of files have an inode.
_FILE_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ [1-9]\d*\s+(/.*)$", re.MULTILINE)
_DEVICE_NODE_PREFIXES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")
# The target of a link in /proc/<pid>/fd to a socket. The group is the inode of the socket.
_SOCKET_TARGET = re.compile(r"^socket:\[(\d+)\]$")
# A data file counts only if the process has mapped at least this many bytes of it.
_MAPPED_FILE_BYTES_MIN = 1 << 20
# Fields of /proc/<pid>/io (proc(5)): bytes of read calls, bytes of write calls, bytes fetched from a storage device.
_IO_FIELDS = ("rchar", "wchar", "read_bytes")


@dataclass(slots=True)
class SampledProcess:
    """The evidence of all samples of one process so far.

    Attributes
    ----------
    process_id : int
        Process ID.
    program : str
        Name of the program at the last sample.
    is_attached : bool
        Whether the process ran before the observation. Then its counts at the first sample are subtracted.
    libraries : dict
        Libraries that move bytes or choose a route, by the path of the mapped file.
    queue_pairs : dict
        The queue pairs of the process, by device and number. The observer adds them.
    regions : dict
        The memory regions of the process, by device, number and length. The observer adds them.
    dmabufs : dict
        The dma-bufs of which the process had a descriptor open, by inode, or by a hash if they have no inode.
    device_nodes : set of str
        Device nodes that the process had open.
    log_paths : set of Path
        The log files of NCCL and UCX that the environment of the process names.
    usage_file : Path or None
        The file in which the software twins of the process count their objects and bytes.
    """

    process_id: int
    program: str
    is_attached: bool
    libraries: dict[str, ObservedLibrary] = field(default_factory=dict)
    queue_pairs: dict[tuple[str, int], RdmaQueuePair] = field(default_factory=dict)
    regions: dict[tuple[str, int | None, int], RdmaRegion] = field(default_factory=dict)
    dmabufs: dict[int, HeldDmabuf] = field(default_factory=dict)
    device_nodes: set[str] = field(default_factory=set)
    log_paths: set[Path] = field(default_factory=set)
    usage_file: Path | None = None
    _sockets: dict[int, TcpSocket] = field(default_factory=dict, init=False)
    _baseline_sockets: dict[int, TcpSocket] = field(default_factory=dict, init=False)
    _io_counters: dict[str, int] = field(default_factory=dict, init=False)
    _baseline_io_counters: dict[str, int] = field(default_factory=dict, init=False)
    _mapped_bytes_by_path: dict[str, int] = field(default_factory=dict, init=False)
    _is_unsampled: bool = field(default=True, init=False)
    _next_maps_sample_s: float = field(default=0.0, init=False)
    _maps_interval_s: float = field(default=SAMPLE_INTERVAL_S, init=False)

    def sample(self, tree: HostTree, socket_by_inode: Mapping[int, TcpSocket], now_s: float) -> Iterator[str]:
        """Add the evidence that the process shows now. Yield a sentence for each kind of evidence that cannot be seen.

        Parameters
        ----------
        tree : HostTree
            The files of this machine.
        socket_by_inode : mapping
            The TCP sockets of this network namespace.
        now_s : float
            The time, as time.monotonic() returns it.
        """
        pid_text = str(self.process_id)
        # Only of an attached process, the first sample is a baseline: its counts are subtracted.
        is_baseline_sample, self._is_unsampled = self._is_unsampled and self.is_attached, False
        self._sample_io(tree, is_baseline_sample=is_baseline_sample)
        try:
            target_by_descriptor = evidence.descriptor_targets(pid_text)
        except FileNotFoundError:
            return  # The process has ended.
        except OSError as error:
            # The state follows the program name in parentheses. If the file cannot be read, the process has ended.
            if (tree.text(f"/proc/{pid_text}/stat") or "Z").rpartition(")")[2].split()[:1] == ["Z"]:
                return  # A zombie: the process has ended, and its parent has not waited for it yet.
            failure_text = f"pid {pid_text} ({self.program}): {describe_errno(error)}"
            yield f"libraries, descriptors and sockets of {failure_text}; CAP_SYS_PTRACE is needed to see them"
            return
        self.device_nodes |= {
            target for target in target_by_descriptor.values() if target.startswith(_DEVICE_NODE_PREFIXES)
        }
        for dmabuf in evidence.held_dmabufs(tree, pid_text, target_by_descriptor):
            # Without an inode, the other fields identify a dma-buf, so that the next sample does not add it again. Two
            # dma-bufs with equal fields then count once.
            self.dmabufs[dmabuf.inode or hash(dmabuf)] = dmabuf
        for target in target_by_descriptor.values():
            match = _SOCKET_TARGET.match(target)
            if match and (tcp_socket := socket_by_inode.get(int(match[1]))) is not None:
                self._sockets[tcp_socket.inode] = tcp_socket
                if is_baseline_sample:
                    self._baseline_sockets[tcp_socket.inode] = tcp_socket
        if now_s >= self._next_maps_sample_s:
            self._maps_interval_s = min(2 * self._maps_interval_s, _MAPS_INTERVAL_S_MAX)
            self._next_maps_sample_s = now_s + self._maps_interval_s
            self._sample_maps(tree)
            self._sample_environment(tree)
            own_network_namespace, network_namespace = (
                tree.link_name(f"/proc/{folder}/ns/net") for folder in ("self", pid_text)
            )
            if network_namespace is not None and network_namespace != own_network_namespace:
                yield f"TCP sockets of pid {pid_text} ({self.program}): the process has another network namespace"

    def describe(self, *, twin_objects: dict[str, int], twin_bytes: dict[str, int]) -> ObservedProcess:
        """Return the evidence of all samples, with the counts that the twins of the process recorded."""
        io_growth = {name: count - self._baseline_io_counters.get(name, 0) for name, count in self._io_counters.items()}
        return ObservedProcess(
            process_id=self.process_id,
            program=self.program,
            libraries=tuple(self.libraries.values()),
            queue_pairs=tuple(self.queue_pairs.values()),
            regions=tuple(self.regions.values()),
            dmabufs=tuple(self.dmabufs.values()),
            nodes=tuple(sorted(self.device_nodes)),
            read_bytes=io_growth.get("rchar"),
            written_bytes=io_growth.get("wchar"),
            storage_read_bytes=io_growth.get("read_bytes"),
            mapped_file_bytes=sum(self._mapped_bytes_by_path.values()),
            loopback_sent_bytes=self._sum_tcp_bytes(is_sent=True, is_loopback=True),
            remote_sent_bytes=self._sum_tcp_bytes(is_sent=True, is_loopback=False),
            loopback_received_bytes=self._sum_tcp_bytes(is_sent=False, is_loopback=True),
            remote_received_bytes=self._sum_tcp_bytes(is_sent=False, is_loopback=False),
            twin_objects=twin_objects,
            twin_bytes=twin_bytes,
        )

    def _sample_io(self, tree: HostTree, *, is_baseline_sample: bool) -> None:
        io_text = tree.text(f"/proc/{self.process_id}/io")
        io_fields = dict(line.split(": ") for line in (io_text or "").splitlines() if ": " in line)
        io_counters = {key: int(io_fields[key]) for key in _IO_FIELDS if io_fields.get(key, "").isdecimal()}
        if io_counters:
            self._io_counters = io_counters
            if is_baseline_sample:
                self._baseline_io_counters = io_counters

    def _sample_maps(self, tree: HostTree) -> None:
        """Add the libraries and the data files that the process has mapped."""
        current_bytes_by_path: dict[str, int] = {}
        for begin_hex, end_hex, permissions, path in _FILE_MAPPING.findall(
            tree.text(f"/proc/{self.process_id}/maps") or ""
        ):
            library_name = _find_library_name(path)
            if library_name is not None:
                if "x" in permissions and path not in self.libraries:
                    library = evidence.describe_library(path)
                    self.libraries[path] = ObservedLibrary(library_name, path, library.build_id, is_twin(library))
            elif ".so" not in path and not path.startswith(("/memfd:", "/dev/", "/usr/", "/SYSV")):
                mapping_bytes = int(end_hex, 16) - int(begin_hex, 16)
                current_bytes_by_path[path] = current_bytes_by_path.get(path, 0) + mapping_bytes
        for path, size_bytes in current_bytes_by_path.items():
            if size_bytes >= _MAPPED_FILE_BYTES_MIN:
                self._mapped_bytes_by_path[path] = max(size_bytes, self._mapped_bytes_by_path.get(path, 0))

    def _sample_environment(self, tree: HostTree) -> None:
        """Add the log files and the usage file of the twins, which the environment of the process names."""
        proc_folder = f"/proc/{self.process_id}"
        environ_text = (tree.data(f"{proc_folder}/environ") or b"").decode("utf-8", "backslashreplace")
        environment = dict(entry.partition("=")[::2] for entry in environ_text.split("\0") if "=" in entry)
        working_folder = "/".join(tree.link_parts(f"{proc_folder}/cwd")).replace("//", "/") or "/"
        self.log_paths.update(logs.find_log_files(environment, self.process_id, working_folder))
        if environment.get(launch.USAGE_VARIABLE):
            self.usage_file = Path(environment[launch.USAGE_VARIABLE])

    def _sum_tcp_bytes(self, *, is_sent: bool, is_loopback: bool) -> int:
        """Return the bytes of payload of the TCP sockets; for an attached process, only since the first sample."""

        def count_bytes(tcp_socket: TcpSocket) -> int:
            return tcp_socket.sent_bytes if is_sent else tcp_socket.received_bytes

        sockets = {
            inode: tcp_socket for inode, tcp_socket in self._sockets.items() if tcp_socket.is_loopback == is_loopback
        }
        baseline_bytes = sum(
            count_bytes(self._baseline_sockets[inode]) for inode in sockets.keys() & self._baseline_sockets
        )
        return sum(map(count_bytes, sockets.values())) - baseline_bytes


def describe_errno(error: OSError) -> str:
    """Return the meaning of an errno and its name, such as ``Permission denied (EACCES)``."""
    return f"{os.strerror(error.errno or 0)} ({errno_name(error.errno)})"


def _find_library_name(path: str) -> str | None:
    file_name = path.rpartition("/")[2]
    for prefix, name in _LIBRARY_NAME_BY_PREFIX.items():
        if file_name.startswith(prefix):
            return name
    return next((name for part, name in _ENGINE_NAME_BY_PATH_PART.items() if part in path), None)
