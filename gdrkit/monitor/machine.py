"""Metrics of the machine: RDMA objects and dma-bufs of every process, BAR1, counters of NICs and of nvidia-fs.

The values are read when Prometheus asks for them. What the kernel refuses is not zero: the metric has no value, and
``gdrkit_not_read`` counts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gdrkit import evidence, host, launch
from gdrkit.cufile import read_nvidia_fs
from gdrkit.errors import GdrkitError
from gdrkit.host import HostTree
from gdrkit.monitor.metrics import Metric
from gdrkit.twin_run import read_usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gdrkit.evidence import RdmaQueuePair, RdmaRegion

__all__ = ["machine_metrics"]

# The directories of device nodes whose openers are listed with the number of their descriptors.
_NODES = ("/dev/nvidia", "/dev/infiniband/", "/dev/accel/", "/dev/hl")
_KIB = 1024


def machine_metrics(tree: HostTree | None = None) -> tuple[Metric, ...]:
    """Read and return the metrics of this machine.

    Parameters
    ----------
    tree : HostTree or None
        The files of the machine; None for this one. Queue pairs, regions and BAR1 are always those of this machine.
    """
    tree = HostTree() if tree is None else tree
    not_read = Metric("gdrkit_not_read", "Sources that could not be read, by source and cause; see docs/monitor.md.")
    return (
        *_rdma_metrics(tree, not_read),
        *_process_metrics(tree, not_read),
        *_bar1_metrics(not_read),
        *_port_metrics(tree),
        *_nvidia_fs_metrics(tree),
        *_twin_metrics(),
        not_read,
    )


def _owner(tree: HostTree, process_id: int | None) -> dict[str, object]:
    if process_id is None:
        return {"pid": "", "program": "kernel"}
    return {"pid": process_id, "program": (tree.text(f"/proc/{process_id}/comm") or "").strip()}


def _rdma_metrics(tree: HostTree, not_read: Metric) -> tuple[Metric, ...]:
    pairs = Metric("gdrkit_rdma_queue_pairs", "Queue pairs, from RDMA netlink.")
    regions = Metric("gdrkit_rdma_regions", "Registered memory regions, from RDMA netlink.")
    region_bytes = Metric("gdrkit_rdma_region_bytes", "Bytes of the registered memory regions, from RDMA netlink.")
    # A machine without an RDMA device has no such objects, and then the kernel may lack RDMA netlink.
    if tree.names("/sys/class/infiniband"):
        try:
            found_pairs: Iterable[RdmaQueuePair] = evidence.rdma_queue_pairs()
            found_regions: Iterable[RdmaRegion] = evidence.rdma_regions()
        except OSError as error:
            not_read.add({"source": "rdma_netlink", "cause": error.strerror}, 1)
        else:
            for pair in found_pairs:
                pairs.add({"device": pair.device, "type": pair.type, **_owner(tree, pair.process_id)}, 1)
            for region in found_regions:
                labels = {"device": region.device, **_owner(tree, region.process_id)}
                regions.add(labels, 1)
                region_bytes.add(labels, region.length_bytes)
    return (pairs, regions, region_bytes)


def _process_metrics(tree: HostTree, not_read: Metric) -> tuple[Metric, ...]:
    dmabufs = Metric("gdrkit_dmabufs", "dma-bufs that a process holds, from /proc/PID/fdinfo.")
    dmabuf_bytes = Metric("gdrkit_dmabuf_bytes", "Bytes of the dma-bufs that a process holds, from /proc/PID/fdinfo.")
    descriptors = Metric("gdrkit_descriptors", "Open descriptors of a process that has a GPU, a NIC or a dma-buf open.")
    limits = Metric("gdrkit_descriptors_limit", "Soft limit of open descriptors (RLIMIT_NOFILE) of such a process.")
    pinned = Metric("gdrkit_pinned_bytes", "Memory that RDMA and drivers pinned for such a process (VmPin).")
    for name in filter(str.isdecimal, tree.names("/proc")):
        try:
            targets = evidence.descriptors(name)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:
            not_read.add({"source": "descriptors_of_processes", "cause": error.strerror}, 1)
            continue
        held = evidence.held_dmabufs(tree, name, targets)
        if not held and not any(target.startswith(_NODES) for target in targets.values()):
            continue
        owner = _owner(tree, int(name))
        for dmabuf in held:
            labels = {**owner, "exporter": dmabuf.exporter}
            dmabufs.add(labels, 1)
            dmabuf_bytes.add(labels, dmabuf.size_bytes)
        descriptors.add(owner, len(targets))
        limit = _field(tree.text(f"/proc/{name}/limits"), "Max open files", position=3)
        if limit is not None:
            limits.add(owner, limit)
        pinned_kib = _field(tree.text(f"/proc/{name}/status"), "VmPin:", position=1)
        if pinned_kib is not None:
            pinned.add(owner, pinned_kib * _KIB)
    return (dmabufs, dmabuf_bytes, descriptors, limits, pinned)


def _field(text: str | None, line_start: str, *, position: int) -> int | None:
    """Return the number at `position` of the words of the line that begins with `line_start`, or None."""
    for line in (text or "").splitlines():
        words = line.split()
        if line.startswith(line_start) and len(words) > position and words[position].isdecimal():
            return int(words[position])
    return None


def _bar1_metrics(not_read: Metric) -> tuple[Metric, ...]:
    size = Metric("gdrkit_bar1_bytes", "Size of BAR1, through which NICs access GPU memory, from NVML.")
    used = Metric("gdrkit_bar1_used_bytes", "Used part of BAR1, from NVML.")
    if Path("/dev/nvidiactl").exists():
        try:
            gpus = host.nvml_facts().gpus
        except GdrkitError as error:
            not_read.add({"source": "nvml", "cause": str(error)}, 1)
        else:
            for gpu in gpus:
                if gpu.bar1_bytes is not None and gpu.bar1_free_bytes is not None:
                    size.add({"gpu": gpu.pci_bus_id}, gpu.bar1_bytes)
                    used.add({"gpu": gpu.pci_bus_id}, gpu.bar1_bytes - gpu.bar1_free_bytes)
    return (size, used)


def _port_metrics(tree: HostTree) -> tuple[Metric, ...]:
    metrics = {
        name: Metric(f"gdrkit_port_{name}", f"{text} by an RDMA port, from sysfs.", is_counter=True)
        for name, text in (
            ("sent_bytes", "Bytes sent"),
            ("received_bytes", "Bytes received"),
            ("sent_packets", "Packets sent"),
            ("received_packets", "Packets received"),
        )
    }
    for counters in host.port_counters(tree):
        for name, metric in metrics.items():
            value = getattr(counters, name)
            if value is not None:
                metric.add({"device": counters.device, "port": counters.port}, value)
    return tuple(metrics.values())


def _nvidia_fs_metrics(tree: HostTree) -> tuple[Metric, ...]:
    metric = Metric("gdrkit_nvidia_fs", "Counters of /proc/driver/nvidia-fs/stats, by line and name.", is_counter=True)
    nvidia_fs = read_nvidia_fs(tree)
    for name, value in ({} if nvidia_fs is None else nvidia_fs.counters).items():
        metric.add({"counter": name}, value)
    return (metric,)


def _twin_metrics() -> tuple[Metric, ...]:
    """Return what the processes of the surrounding `gdrkit run` did on software twins (drop-in libraries)."""
    objects = Metric("gdrkit_twin_objects", "Objects that a process created on a software twin.", is_counter=True)
    moved = Metric("gdrkit_twin_moved_bytes", "Bytes that a software twin moved for a process.", is_counter=True)
    path = os.environ.get(launch.USAGE_VARIABLE)
    for use in read_usage(Path(path)) if path else ():
        labels = {"api": use.api.value, "pid": use.process_id, "program": use.program}
        objects.add(labels, use.objects_count)
        moved.add(labels, use.moved_bytes)
    return (objects, moved)
