"""The routes of `gdrkit observe`: for each path that bytes can take, whether the evidence proves that it was used.

A counter of a NIC, a GPU or nvidia-fs includes every process of the machine. So the counter proves a route of the
observed processes only if no other process could have moved the bytes. Otherwise the route is unproven, and its cause
names the other processes.

A process may run on software twins (libraries that emulate the hardware). The twins count the bytes of each process,
so their counts include no other process.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gdrkit.observe.observation import ObservedRoute
from gdrkit.text import format_count
from gdrkit.units import rounded_bytes
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.host import GpuTraffic
    from gdrkit.observe.observation import Observation

__all__ = ["derive_routes"]

# Queue pairs of these types are for the management of the fabric. Programs move no data with them.
_MANAGEMENT_TYPES = frozenset({"SMI", "GSI"})
# Libraries that use RDMA where it is possible, and otherwise TCP.
_CHOOSING_LIBRARIES = frozenset({"nccl", "ucx", "libfabric", "nixl"})
# Below this payload, TCP carried only the messages that set up connections, not the data of a program.
_TCP_BYTES_MIN = 64 << 10
# If the processes read or mapped at least this many bytes of files, the files are taken to be data for a GPU. Fewer
# bytes may be the code and the settings of a program.
_FILE_BYTES_MIN = 16 << 20
# The files reached the GPU if the bytes that it received over PCIe, divided by the bytes of the files, are within these
# limits. PCIe headers add about 8 % at 256 bytes per packet, and a program also moves other bytes.
_PCIE_RATIO_MIN, _PCIE_RATIO_MAX = 0.98, 1.25


def derive_routes(observation: Observation) -> Observation:
    """Return the observation with one verdict for each route that the processes used or could have used."""
    routes = tuple(
        route
        for decide_route in (_decide_rdma_route, _decide_nvlink_route, _decide_file_route, _decide_tcp_route)
        if (route := decide_route(observation)) is not None
    )
    if not routes:
        cause = "no queue pair, no TCP payload, no traffic of a GPU and no read file was seen"
        routes = (ObservedRoute("unknown", RouteOutcome.UNPROVEN, None, (), cause),)
    return dataclasses.replace(observation, routes=routes)


def _list_library_names(observation: Observation) -> set[str]:
    return {library.name for process in observation.processes for library in process.libraries}


def _decide_rdma_route(observation: Observation) -> ObservedRoute | None:
    # Only a queue pair shows that RDMA was set up. A dma-buf does not: for example, NCCL also uses dma-bufs to share
    # memory between GPUs.
    if _has_queue_pair(observation):
        return _decide_rdma_route_by_counters(observation, list(_describe_rdma_objects(observation)))
    library_names = _list_library_names(observation)
    choosing_libraries = library_names & _CHOOSING_LIBRARIES
    tcp_bytes = observation.tcp_bytes
    if not choosing_libraries and "verbs" not in library_names:
        return None
    reason = "no queue pair was created" if observation.ports else "the kernel has no RDMA device"
    if choosing_libraries and tcp_bytes >= _TCP_BYTES_MIN:
        cause = f"{reason}; {rounded_bytes(tcp_bytes)} went over TCP"
        evidence = [f"{', '.join(sorted(choosing_libraries))} would use RDMA where it is possible", *observation.log]
        return ObservedRoute("rdma", RouteOutcome.FELL_BACK, 0, tuple(evidence), cause)
    if not observation.ports and "verbs" in library_names:
        return ObservedRoute("rdma", RouteOutcome.NOT_POSSIBLE, 0, ("libibverbs is loaded",), reason)
    return None


def _has_queue_pair(observation: Observation) -> bool:
    return any(
        process.twin_objects.get("verbs", 0) or any(pair.type not in _MANAGEMENT_TYPES for pair in process.queue_pairs)
        for process in observation.processes
    )


def _describe_rdma_objects(observation: Observation) -> Iterator[str]:
    for process in observation.processes:
        count_by_device_and_type: dict[tuple[str, str], int] = {}
        for pair in process.queue_pairs:
            if pair.type not in _MANAGEMENT_TYPES:
                count_by_device_and_type[pair.device, pair.type] = (
                    count_by_device_and_type.get((pair.device, pair.type), 0) + 1
                )
        for (device, pair_type), count in count_by_device_and_type.items():
            pairs_text = format_count(count, "queue pair")
            yield f"{process.program} (pid {process.process_id}): {pairs_text} {pair_type} on {device}"
        twin_pair_count = process.twin_objects.get("verbs", 0)
        if twin_pair_count:
            moved_text = rounded_bytes(process.twin_bytes.get("verbs", 0))
            pairs_text = format_count(twin_pair_count, "queue pair")
            yield (
                f"{process.program} (pid {process.process_id}): {pairs_text} on the software twin, "
                f"which moved {moved_text}"
            )
    for process in observation.processes:
        if process.regions:
            total_text = rounded_bytes(sum(region.length_bytes for region in process.regions))
            regions_text = format_count(len(process.regions), "memory region")
            yield f"{process.program} (pid {process.process_id}): {regions_text}, {total_text}"
        for dmabuf in process.dmabufs:
            size_text = rounded_bytes(dmabuf.size_bytes)
            yield f"{process.program} (pid {process.process_id}): dma-buf of {dmabuf.exporter}, {size_text}"


def _decide_rdma_route_by_counters(observation: Observation, evidence: list[str]) -> ObservedRoute:
    twin_bytes = sum(process.twin_bytes.get("verbs", 0) for process in observation.processes)
    data_pairs = [
        pair for process in observation.processes for pair in process.queue_pairs if pair.type not in _MANAGEMENT_TYPES
    ]
    pair_devices = {pair.device for pair in data_pairs}
    # The kernel does not list the queue pairs of a software twin, so their devices are unknown. If there are no other
    # queue pairs, all ports are included.
    ports = [port for port in observation.ports if port.device in pair_devices or (twin_bytes and not pair_devices)]
    for port in ports:
        if port.has_grown:
            counter_texts = [f"{port.sent_packets} packets sent, {port.received_packets} received"]
            if port.sent_bytes is not None and port.received_bytes is not None:
                counter_texts.insert(
                    0, f"{rounded_bytes(port.sent_bytes)} sent, {rounded_bytes(port.received_bytes)} received"
                )
            evidence.append(f"{port.device} port {port.port}: {'; '.join(counter_texts)}")
    byte_counts = [
        byte_count for port in ports for byte_count in (port.sent_bytes, port.received_bytes) if byte_count is not None
    ]
    # Several counters may count the same bytes, as sent and as received, so the largest count is taken, not the sum.
    moved_bytes = twin_bytes or (max(byte_counts) if byte_counts else None)
    evidence += observation.log
    own_pair_keys = {(pair.device, pair.number) for pair in data_pairs}
    other_process_texts = sorted(
        {
            "the kernel" if pair.process_id is None else f"pid {pair.process_id}"
            for pair in observation.other_queue_pairs
            if pair.device in pair_devices
            and pair.type not in _MANAGEMENT_TYPES
            # A queue pair whose remote end is an observed queue pair moves only bytes of the observed processes.
            and (pair.device, pair.remote_number) not in own_pair_keys
        }
    )
    cause = None
    if not twin_bytes and not any(port.has_grown for port in ports):
        cause = "the counters of the ports stood still"
        choosing_libraries = _list_library_names(observation) & _CHOOSING_LIBRARIES
        if choosing_libraries and observation.tcp_bytes >= _TCP_BYTES_MIN:
            evidence.append(f"{', '.join(sorted(choosing_libraries))} would use RDMA where it is possible")
            cause = f"{cause}; {rounded_bytes(observation.tcp_bytes)} went over TCP"
            return ObservedRoute("rdma", RouteOutcome.FELL_BACK, 0, tuple(evidence), cause)
    elif not twin_bytes and not any(pair.state in {"RTS", "SQD"} for pair in data_pairs):
        cause = "no queue pair was seen in a state in which it can send"
    elif other_process_texts:
        cause = f"the counters of the ports also include {', '.join(other_process_texts)}"
    outcome = RouteOutcome.PROVEN if cause is None else RouteOutcome.UNPROVEN
    return ObservedRoute("rdma", outcome, moved_bytes, tuple(evidence), cause)


def _decide_tcp_route(observation: Observation) -> ObservedRoute | None:
    tcp_bytes = observation.tcp_bytes
    if tcp_bytes < _TCP_BYTES_MIN:
        return None
    evidence = []
    for process in observation.processes:
        for peer in ("loopback", "remote"):
            sent_bytes, received_bytes = (
                getattr(process, f"{peer}_{direction}_bytes") for direction in ("sent", "received")
            )
            if sent_bytes or received_bytes:
                peer_text = "this machine" if peer == "loopback" else "other machines"
                evidence.append(
                    f"{process.program} (pid {process.process_id}): {rounded_bytes(sent_bytes)} sent to {peer_text} "
                    f"and {rounded_bytes(received_bytes)} received, by the sockets that were open at a sample"
                )
    return ObservedRoute("tcp", RouteOutcome.PROVEN, tcp_bytes, tuple(evidence))


def _find_used_gpus(observation: Observation) -> list[GpuTraffic]:
    nodes = {node for process in observation.processes for node in process.nodes}
    return [gpu for gpu in observation.gpus if f"/dev/nvidia{gpu.minor}" in nodes]


def _describe_other_gpu_processes(observation: Observation, gpus: list[GpuTraffic]) -> list[str]:
    own_process_ids = {process.process_id for process in observation.processes}
    # In a container, NVML may list the process IDs of the host. If it lists none of the observed processes, its IDs
    # cannot be compared with theirs, and the result is empty.
    gpu_process_ids = {process_id for gpu in gpus for process_id in gpu.process_ids}
    return (
        [f"pid {process_id}" for process_id in sorted(gpu_process_ids - own_process_ids)]
        if gpu_process_ids & own_process_ids
        else []
    )


def _decide_nvlink_route(observation: Observation) -> ObservedRoute | None:
    gpus = [gpu for gpu in _find_used_gpus(observation) if gpu.nvlink_sent_bytes or gpu.nvlink_received_bytes]
    if not gpus:
        return None
    evidence = [
        f"GPU {gpu.minor} ({gpu.pci_bus_id}): {rounded_bytes(gpu.nvlink_sent_bytes or 0)} sent and "
        f"{rounded_bytes(gpu.nvlink_received_bytes or 0)} received over NVLink"
        for gpu in gpus
    ]
    evidence += observation.log
    other_process_texts = _describe_other_gpu_processes(observation, gpus)
    cause = f"the counters of the GPUs also include {', '.join(other_process_texts)}" if other_process_texts else None
    outcome = RouteOutcome.UNPROVEN if cause else RouteOutcome.PROVEN
    moved_bytes = sum(gpu.nvlink_sent_bytes or 0 for gpu in gpus)
    return ObservedRoute("nvlink", outcome, moved_bytes, tuple(evidence), cause)


@dataclasses.dataclass(frozen=True, slots=True)
class _FileByteCounts:
    """Bytes of files that the processes read or mapped, and bytes that their GPUs received over PCIe."""

    read_bytes: int
    storage_bytes: int
    mapped_bytes: int
    nvidia_fs_bytes: int
    pcie_bytes: int | None

    @property
    def counted_bytes(self) -> int:
        """The bytes of files that read calls or nvidia-fs counted."""
        return max(self.read_bytes, self.nvidia_fs_bytes)


def _decide_file_route(observation: Observation) -> ObservedRoute | None:
    """Return the verdict about the files that the processes read into GPU memory; None if they read no large files."""
    gpus = _find_used_gpus(observation)
    processes = observation.processes
    pcie_counts = [gpu.pcie_received_bytes for gpu in gpus if gpu.pcie_received_bytes is not None]
    # The kernel adds the counts of an ended child to its parent, so a sum over the processes would count them twice.
    byte_counts = _FileByteCounts(
        read_bytes=max((process.read_bytes or 0 for process in processes), default=0),
        storage_bytes=max((process.storage_read_bytes or 0 for process in processes), default=0),
        mapped_bytes=max((process.mapped_file_bytes for process in processes), default=0),
        nvidia_fs_bytes=(observation.nvidia_fs or {}).get("Reads.readMiB", 0) << 20,
        pcie_bytes=sum(pcie_counts) if pcie_counts else None,
    )
    if not gpus or max(byte_counts.counted_bytes, byte_counts.mapped_bytes) < _FILE_BYTES_MIN:
        return None
    read_text, storage_text, mapped_text = map(
        rounded_bytes, (byte_counts.read_bytes, byte_counts.storage_bytes, byte_counts.mapped_bytes)
    )
    evidence = [
        f"{read_text} by read calls, {storage_text} of them from a storage device; {mapped_text} of data files mapped"
    ]
    for gpu in gpus:
        received_text = rounded_bytes(gpu.pcie_received_bytes or 0)
        evidence.append(f"GPU {gpu.minor} ({gpu.pci_bus_id}): {received_text} received over PCIe, with headers")
    if byte_counts.nvidia_fs_bytes:
        evidence.append(f"nvidia-fs read {rounded_bytes(byte_counts.nvidia_fs_bytes)} directly into GPU memory")
    library_names = _list_library_names(observation)
    route, cause = _decide_host_route(library_names), None
    if byte_counts.nvidia_fs_bytes and byte_counts.nvidia_fs_bytes >= byte_counts.counted_bytes / 2:
        route = "nvfs"
    elif "cufile" in library_names and byte_counts.storage_bytes >= max(byte_counts.read_bytes / 2, 1):
        # Most bytes came from the storage device, not from the page cache, so cuFile may have read them peer to peer.
        route, cause = "unknown", "cuFile may have read peer to peer, which only its own statistics show"
    other_process_texts = _describe_other_gpu_processes(observation, gpus)
    cause = cause or _explain_unproven_pcie(byte_counts, has_late_reads=any(gpu.late_count for gpu in gpus))
    cause = cause or (
        f"the counters of the GPUs also include {', '.join(other_process_texts)}" if other_process_texts else None
    )
    outcome = RouteOutcome.PROVEN if cause is None else RouteOutcome.UNPROVEN
    return ObservedRoute(route, outcome, byte_counts.counted_bytes, tuple(evidence), cause)


def _explain_unproven_pcie(byte_counts: _FileByteCounts, *, has_late_reads: bool) -> str | None:
    """Return why the PCIe counters do not show that the GPUs received the files, or None if they show it."""
    if byte_counts.pcie_bytes is None:
        return "the GPU has no counter of its PCIe traffic"
    if has_late_reads:
        return "the PCIe counters were read too late, and may have wrapped more than once"
    if byte_counts.counted_bytes < _FILE_BYTES_MIN:
        return (
            f"the files were mapped, and nothing counts how many of the {rounded_bytes(byte_counts.mapped_bytes)} "
            "were used"
        )
    ratio = byte_counts.pcie_bytes / byte_counts.counted_bytes
    if not _PCIE_RATIO_MIN <= ratio <= _PCIE_RATIO_MAX:
        limits_text = f"{_PCIE_RATIO_MIN} to {_PCIE_RATIO_MAX}"
        return f"the GPUs received {ratio:.2f} times the bytes of the files over PCIe, not {limits_text} times"
    return None


def _decide_host_route(library_names: set[str]) -> str:
    """Return the name of the route through host memory: by the copy engine of gdrkit, or by read calls."""
    return "engine" if "gdrkit.gds" in library_names and "kvikio" not in library_names else "posix"
