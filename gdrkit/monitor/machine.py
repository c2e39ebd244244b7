"""Metrics of the machine: RDMA objects and dma-bufs of every process, BAR1, counters of NICs and of nvidia-fs.

The values are read when Prometheus asks for them. If a value cannot be read, the metric has no value (it is not zero),
and ``gdrkit_not_read`` counts the failure. The first failure of each source and cause is also logged.

A process may run on software twins (libraries that emulate the hardware). Its objects are then in the record of the
twins, because the kernel does not know them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import evidence, host, launch
from gdrkit.cufile import read_nvidia_fs
from gdrkit.errors import Api, GdrkitError
from gdrkit.host import HostTree
from gdrkit.monitor.metrics import Metric
from gdrkit.twin_run import read_usage, twin_dmabufs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.evidence import RdmaQueuePair, RdmaRegion
    from gdrkit.twin_run import ProcessUse

__all__ = ["MachineReader", "machine_metrics"]

# Prefixes of the paths of device nodes. A process that has such a node open is listed with its number of descriptors.
_DEVICE_NODE_PREFIXES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")
_KIB = 1024
_log = logging.getLogger(__name__)
# The labels of gdrkit_not_read (source and cause) that were already logged.
_logged_failures: set[tuple[tuple[str, str], ...]] = set()
# Value of the labels for the device and for the type of an object that exists only in a software twin.
_TWIN_LABEL = "twin"


class MachineReader:
    """A reader of the metrics of this machine for any number of threads. It limits how often the machine is read.

    Parameters
    ----------
    interval_s : float
        Seconds for which :meth:`read` returns the same values again. With 0, each call reads the machine.
    """

    def __init__(self, *, interval_s: float) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._metrics: tuple[Metric, ...] = ()
        self._expiry_s = 0.0

    def read(self) -> tuple[Metric, ...]:
        """Return the metrics, at most `interval_s` old. One thread at a time reads the machine."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._expiry_s:
                self._metrics = machine_metrics()
                self._expiry_s = now_s + self._interval_s
            return self._metrics


def machine_metrics(tree: HostTree | None = None) -> tuple[Metric, ...]:
    """Read and return the metrics of this machine.

    Parameters
    ----------
    tree : HostTree or None
        The files of the machine; None means this machine. Queue pairs, regions and BAR1 are always read from this
        machine.
    """
    tree = HostTree() if tree is None else tree
    not_read_metric = Metric(
        "gdrkit_not_read", "Sources that could not be read, by source and cause; see docs/monitor.md."
    )
    twin_uses = _read_twin_uses(tree, not_read_metric)
    metrics = (
        *_make_rdma_metrics(tree, twin_uses, not_read_metric),
        *_make_process_metrics(tree, twin_uses, not_read_metric),
        *_make_bar1_metrics(not_read_metric),
        *_make_port_metrics(tree, not_read_metric),
        *_make_nvidia_fs_metrics(tree, not_read_metric),
        *_make_twin_metrics(twin_uses),
        not_read_metric,
    )
    for labels in not_read_metric.values:
        if labels not in _logged_failures:
            _logged_failures.add(labels)
            _log.warning("not read: %s", ", ".join(text for _, text in labels))
    return metrics


def _make_owner_labels(tree: HostTree, process_id: int | None) -> dict[str, object]:
    if process_id is None:
        return {"pid": "", "program": "kernel"}
    return {"pid": process_id, "program": (tree.text(f"/proc/{process_id}/comm") or "").strip()}


def _make_rdma_metrics(
    tree: HostTree, twin_uses: dict[int, list[ProcessUse]], not_read_metric: Metric
) -> tuple[Metric, ...]:
    queue_pairs_metric = Metric(
        "gdrkit_rdma_queue_pairs", "Queue pairs, from RDMA netlink, or from the record of a software twin."
    )
    regions_metric = Metric(
        "gdrkit_rdma_regions", "Registered memory regions, from RDMA netlink, or from the record of a software twin."
    )
    region_bytes_metric = Metric(
        "gdrkit_rdma_region_bytes",
        "Bytes of the memory regions, from RDMA netlink, or from the record of a software twin.",
    )
    # A machine without an RDMA device has no such objects, and then the kernel may lack RDMA netlink.
    if not tree.names("/sys/class/infiniband"):
        not_read_metric.add({"source": "rdma_netlink", "cause": "there is no RDMA device"}, 1)
    else:
        try:
            queue_pairs: Iterable[RdmaQueuePair] = evidence.rdma_queue_pairs()
            kernel_regions: Iterable[RdmaRegion] = evidence.rdma_regions()
        except OSError as error:
            not_read_metric.add({"source": "rdma_netlink", "cause": error.strerror}, 1)
        else:
            for queue_pair in queue_pairs:
                queue_pairs_metric.add(
                    {
                        "device": queue_pair.device,
                        "type": queue_pair.type,
                        **_make_owner_labels(tree, queue_pair.process_id),
                    },
                    1,
                )
            for region in kernel_regions:
                labels = {"device": region.device, **_make_owner_labels(tree, region.process_id)}
                regions_metric.add(labels, 1)
                region_bytes_metric.add(labels, region.length_bytes)
    _add_twin_objects(twin_uses, queue_pairs_metric, regions_metric, region_bytes_metric)
    return (queue_pairs_metric, regions_metric, region_bytes_metric)


def _make_process_metrics(
    tree: HostTree, twin_uses: dict[int, list[ProcessUse]], not_read_metric: Metric
) -> tuple[Metric, ...]:
    dmabufs_metric = Metric("gdrkit_dmabufs", "dma-bufs that a process holds, from /proc/PID/fdinfo.")
    dmabuf_bytes_metric = Metric(
        "gdrkit_dmabuf_bytes", "Bytes of the dma-bufs that a process holds, from /proc/PID/fdinfo."
    )
    descriptors_metric = Metric(
        "gdrkit_descriptors", "Open descriptors of a process that has a GPU, a NIC or a dma-buf open."
    )
    descriptor_limits_metric = Metric(
        "gdrkit_descriptors_limit", "Soft limit of open descriptors (RLIMIT_NOFILE) of a process in gdrkit_descriptors."
    )
    pinned_bytes_metric = Metric(
        "gdrkit_pinned_bytes", "Memory that RDMA and drivers pinned for a process in gdrkit_descriptors (VmPin)."
    )
    for pid in filter(str.isdecimal, tree.names("/proc")):
        try:
            target_by_descriptor = evidence.descriptor_targets(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            not_read_metric.add({"source": "descriptors_of_processes", "cause": error.strerror}, 1)
            continue
        held_dmabufs = evidence.held_dmabufs(tree, pid, target_by_descriptor)
        if int(pid) in twin_uses:
            held_dmabufs += twin_dmabufs(tree, pid, target_by_descriptor)
        if not held_dmabufs and not any(
            target.startswith(_DEVICE_NODE_PREFIXES) for target in target_by_descriptor.values()
        ):
            continue
        owner_labels = _make_owner_labels(tree, int(pid))
        for dmabuf in held_dmabufs:
            labels = {**owner_labels, "exporter": dmabuf.exporter}
            dmabufs_metric.add(labels, 1)
            dmabuf_bytes_metric.add(labels, dmabuf.size_bytes)
        descriptors_metric.add(owner_labels, len(target_by_descriptor))
        open_files_limit = _read_field(tree.text(f"/proc/{pid}/limits"), "Max open files", word_index=3)
        if open_files_limit is not None:
            descriptor_limits_metric.add(owner_labels, open_files_limit)
        pinned_kib = _read_field(tree.text(f"/proc/{pid}/status"), "VmPin:", word_index=1)
        if pinned_kib is not None:
            pinned_bytes_metric.add(owner_labels, pinned_kib * _KIB)
    return (dmabufs_metric, dmabuf_bytes_metric, descriptors_metric, descriptor_limits_metric, pinned_bytes_metric)


def _read_field(text: str | None, line_start: str, *, word_index: int) -> int | None:
    """Return the number that is the word `word_index` (from 0) of the line that begins with `line_start`, or None."""
    for line in (text or "").splitlines():
        words = line.split()
        if line.startswith(line_start) and len(words) > word_index and words[word_index].isdecimal():
            return int(words[word_index])
    return None


def _make_bar1_metrics(not_read_metric: Metric) -> tuple[Metric, ...]:
    size_metric = Metric("gdrkit_bar1_bytes", "Size of BAR1, through which NICs access GPU memory, from NVML.")
    used_metric = Metric("gdrkit_bar1_used_bytes", "Used part of BAR1, from NVML.")
    if not Path("/dev/nvidiactl").exists():
        not_read_metric.add({"source": "nvml", "cause": "the NVIDIA driver is not loaded"}, 1)
    else:
        try:
            gpus = host.nvml_facts().gpus
        except GdrkitError as error:
            not_read_metric.add({"source": "nvml", "cause": str(error)}, 1)
        else:
            for gpu in gpus:
                if gpu.bar1_bytes is not None and gpu.bar1_free_bytes is not None:
                    size_metric.add({"gpu": gpu.pci_bus_id}, gpu.bar1_bytes)
                    used_metric.add({"gpu": gpu.pci_bus_id}, gpu.bar1_bytes - gpu.bar1_free_bytes)
    return (size_metric, used_metric)


def _make_port_metrics(tree: HostTree, not_read_metric: Metric) -> tuple[Metric, ...]:
    metric_by_counter = {
        name: Metric(f"gdrkit_port_{name}", f"{text} by an RDMA port, from sysfs.", is_counter=True)
        for name, text in (
            ("sent_bytes", "Bytes sent"),
            ("received_bytes", "Bytes received"),
            ("sent_packets", "Packets sent"),
            ("received_packets", "Packets received"),
        )
    }
    for counters in host.port_counters(tree):
        for name, metric in metric_by_counter.items():
            value = getattr(counters, name)
            if value is not None:
                metric.add({"device": counters.device, "port": counters.port}, value)
            else:
                cause = f"the driver of {counters.device} does not count {name.replace('_', ' ')}"
                not_read_metric.add({"source": "port_counters", "cause": cause}, 1)
    return tuple(metric_by_counter.values())


def _make_nvidia_fs_metrics(tree: HostTree, not_read_metric: Metric) -> tuple[Metric, ...]:
    metric = Metric("gdrkit_nvidia_fs", "Counters of /proc/driver/nvidia-fs/stats, by line and name.", is_counter=True)
    nvidia_fs = read_nvidia_fs(tree)
    if nvidia_fs is None:
        not_read_metric.add({"source": "nvidia_fs", "cause": "nvidia-fs is not loaded"}, 1)
    elif not nvidia_fs.counting:
        cause = "nvidia-fs does not count bytes: echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled"
        not_read_metric.add({"source": "nvidia_fs", "cause": cause}, 1)
    for name, value in ({} if nvidia_fs is None else nvidia_fs.counters).items():
        metric.add({"counter": name}, value)
    return (metric,)


def _read_twin_uses(tree: HostTree, not_read_metric: Metric) -> dict[int, list[ProcessUse]]:
    """Return the use of software twins by each running process that `gdrkit run` has started directly or indirectly."""
    uses_by_process: dict[int, list[ProcessUse]] = {}
    uses_by_record_path: dict[str, list[ProcessUse]] = {}
    variable_prefix = f"{launch.USAGE_VARIABLE}=".encode()
    for pid in filter(str.isdecimal, tree.names("/proc")):
        environ_data = tree.data(f"/proc/{pid}/environ") or b""
        record_path = next(
            (
                os.fsdecode(entry[len(variable_prefix) :])
                for entry in environ_data.split(b"\0")
                if entry.startswith(variable_prefix)
            ),
            None,
        )
        if record_path is None:
            continue
        if record_path not in uses_by_record_path:
            try:
                uses_by_record_path[record_path] = read_usage(Path(record_path))
            except OSError as error:
                uses_by_record_path[record_path] = []
                not_read_metric.add({"source": "twins", "cause": error.strerror}, 1)
        # If several entries have the same process ID and API, the last one belongs to the program that runs now.
        last_use_by_api = {use.api: use for use in uses_by_record_path[record_path] if use.process_id == int(pid)}
        if last_use_by_api:
            uses_by_process[int(pid)] = list(last_use_by_api.values())
    return uses_by_process


def _add_twin_objects(
    uses_by_process: dict[int, list[ProcessUse]],
    queue_pairs_metric: Metric,
    regions_metric: Metric,
    region_bytes_metric: Metric,
) -> None:
    """Add the verbs objects of each process on a twin, also if there are 0. The twins do not record the RDMA device."""
    for process_id, uses_of_process in uses_by_process.items():
        for use in uses_of_process:
            if use.api is Api.VERBS:
                owner_labels = {"pid": process_id, "program": use.program}
                queue_pairs_metric.add(
                    {"device": _TWIN_LABEL, "type": _TWIN_LABEL, **owner_labels}, use.queue_pairs_count
                )
                regions_metric.add({"device": _TWIN_LABEL, **owner_labels}, use.regions_count)
                region_bytes_metric.add({"device": _TWIN_LABEL, **owner_labels}, use.region_bytes)


def _make_twin_metrics(uses_by_process: dict[int, list[ProcessUse]]) -> tuple[Metric, ...]:
    objects_metric = Metric(
        "gdrkit_twin_objects", "Objects that a process created on a software twin.", is_counter=True
    )
    moved_bytes_metric = Metric(
        "gdrkit_twin_moved_bytes", "Bytes that a software twin moved for a process.", is_counter=True
    )
    for process_id, uses_of_process in uses_by_process.items():
        for use in uses_of_process:
            labels = {"api": use.api.value, "pid": process_id, "program": use.program}
            objects_metric.add(labels, use.objects_count)
            moved_bytes_metric.add(labels, use.moved_bytes)
    return (objects_metric, moved_bytes_metric)
