"""The result of an observation, as it is written to JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from gdrkit import serialization
from gdrkit.evidence import HeldDmabuf, RdmaQueuePair, RdmaRegion  # noqa: TC001 - types of fields are read at run time.
from gdrkit.host import GpuTraffic  # noqa: TC001 - see above.
from gdrkit.verdict import RouteOutcome  # noqa: TC001 - see above.

__all__ = ["SCHEMA_VERSION", "Observation", "ObservedLibrary", "ObservedProcess", "ObservedRoute", "PortTraffic"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ObservedLibrary:
    """A library that moves bytes or chooses their path.

    Attributes
    ----------
    name : str
        Short name, e.g. ``verbs``, ``cuda``, ``cufile``, ``nccl`` or ``ucx``.
    path : str
        The file that the process has mapped.
    build_id : str or None
        The GNU build id in hexadecimal digits.
    is_twin : bool
        Whether the file is a software twin, a drop-in library that emulates the hardware.
    """

    name: str
    path: str
    build_id: str | None
    is_twin: bool


@dataclass(frozen=True, slots=True)
class ObservedProcess:
    """The evidence about one process. Objects that existed only between two samples are missing.

    Attributes
    ----------
    process_id : int
        Process ID.
    program : str
        Name of the program, as in /proc/<pid>/stat.
    libraries : tuple of ObservedLibrary
        The libraries that the process had mapped.
    queue_pairs, regions : tuple
        RDMA objects that the kernel attributes to the process.
    dmabufs : tuple of HeldDmabuf
        The dma-bufs of which the process had a descriptor open.
    nodes : tuple of str
        Device nodes that the process had open, such as ``/dev/nvidia0``.
    read_bytes, written_bytes : int or None
        Bytes that read and write calls of the process moved, on files, pipes and terminals. None if /proc/<pid>/io was
        unreadable.
    storage_read_bytes : int or None
        Bytes that were fetched from a storage device for the process.
    mapped_file_bytes : int
        Total size of the mappings of data files that the process had.
    loopback_sent_bytes, remote_sent_bytes, loopback_received_bytes, remote_received_bytes : int
        Bytes of payload that TCP sockets of the process sent and received: ``loopback`` between processes of this
        machine, ``remote`` to and from other machines.
    twin_objects, twin_bytes : mapping
        Number of objects that the process created on the software twin of each API, and bytes that this twin moved for
        the process, by name of the API.
    """

    process_id: int
    program: str
    libraries: tuple[ObservedLibrary, ...]
    queue_pairs: tuple[RdmaQueuePair, ...]
    regions: tuple[RdmaRegion, ...]
    dmabufs: tuple[HeldDmabuf, ...]
    nodes: tuple[str, ...]
    read_bytes: int | None
    written_bytes: int | None
    storage_read_bytes: int | None
    mapped_file_bytes: int
    loopback_sent_bytes: int
    remote_sent_bytes: int
    loopback_received_bytes: int
    remote_received_bytes: int
    twin_objects: dict[str, int]
    twin_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class PortTraffic:
    """The increase of each counter of an RDMA port; None if the driver lacks the counter or the increase is unknown."""

    device: str
    port: int
    sent_bytes: int | None
    received_bytes: int | None
    sent_packets: int | None
    received_packets: int | None

    @property
    def has_grown(self) -> bool:
        """Whether any counter of the port grew."""
        return any((self.sent_bytes, self.received_bytes, self.sent_packets, self.received_packets))


@dataclass(frozen=True, slots=True)
class ObservedRoute:
    """The verdict about one route.

    Attributes
    ----------
    route : str
        ``rdma``, ``tcp``, ``nvlink``, ``p2p``, ``nvfs``, ``posix``, ``engine`` or ``unknown``.
    outcome : RouteOutcome
        PROVEN: the bytes took the route. FELL_BACK: the program can use the route, but its bytes took another one.
    moved_bytes : int or None
        Bytes that took the route, as the evidence counts them; None if nothing counts them.
    evidence : tuple of str
        One sentence for each observed fact.
    cause : str or None
        The reason why the outcome is not PROVEN.
    """

    route: str
    outcome: RouteOutcome
    moved_bytes: int | None
    evidence: tuple[str, ...]
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """The evidence about a process and its descendants, and the verdicts about their routes.

    Attributes
    ----------
    command : tuple of str
        The command that was run, or the program name and "pid <ID>" of a process that ran already.
    duration_s : float
        Duration of the observation.
    exit_code : int or None
        Exit code of the command, or the negative number of the signal that ended it; None for a process that ran
        already.
    processes : tuple of ObservedProcess
        The processes, in the order of their process IDs.
    ports : tuple of PortTraffic
        The RDMA ports of the machine. Their counters include all processes.
    gpus : tuple of GpuTraffic
        The GPUs of the machine. Their counters include all processes.
    nvidia_fs : mapping or None
        Increase of each nvidia-fs counter that grew, by name of the counter; None if nvidia-fs is not loaded.
    other_queue_pairs : tuple of RdmaQueuePair
        Queue pairs of other processes and of the kernel on this machine.
    log : tuple of str
        The transports that the logs of NCCL and UCX name, each with its number of lines.
    routes : tuple of ObservedRoute
        The verdicts.
    not_seen : tuple of str
        The facts that could not be observed, each with the reason.
    """

    schema_version: int
    command: tuple[str, ...]
    duration_s: float
    exit_code: int | None
    processes: tuple[ObservedProcess, ...]
    ports: tuple[PortTraffic, ...]
    gpus: tuple[GpuTraffic, ...]
    nvidia_fs: dict[str, int] | None
    other_queue_pairs: tuple[RdmaQueuePair, ...]
    log: tuple[str, ...]
    routes: tuple[ObservedRoute, ...]
    not_seen: tuple[str, ...]

    @property
    def tcp_bytes(self) -> int:
        """Payload that the processes moved over TCP. Bytes between two of the processes count once."""
        loopback_sent_bytes = sum(process.loopback_sent_bytes for process in self.processes)
        loopback_received_bytes = sum(process.loopback_received_bytes for process in self.processes)
        remote_bytes = sum(process.remote_sent_bytes + process.remote_received_bytes for process in self.processes)
        return max(loopback_sent_bytes, loopback_received_bytes) + remote_bytes

    def to_json(self) -> str:
        """Return the observation as indented JSON."""
        return json.dumps(serialization.to_json_data(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "observation") -> Self:
        """Parse the output of :meth:`to_json`. `where` names the text in errors.

        Raises
        ------
        UsageError
            ``MALFORMED``: the text is not JSON, has another schema version, or has an invalid field.
        """
        return serialization.parse_versioned(cls, text, version=SCHEMA_VERSION, where=where)

    def route(self, name: str) -> ObservedRoute | None:
        """Return the verdict about a route, or None if nothing shows that the program can use it."""
        return next((route for route in self.routes if route.route == name), None)
