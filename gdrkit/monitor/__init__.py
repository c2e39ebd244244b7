"""Metrics for Prometheus: RDMA objects and dma-bufs of all processes of a machine, and the work of gdrkit in a process.

`gdrkit monitor` serves the metrics of the machine. A program that uses gdrkit serves its own metrics
with :func:`serve_metrics`; the agent and the storage server do so with `--metrics`.
"""

from __future__ import annotations

from gdrkit.monitor.machine import MachineReader, machine_metrics
from gdrkit.monitor.metrics import Metric
from gdrkit.monitor.process import process_metrics, watch
from gdrkit.monitor.server import MetricsServer, export_statistics, parse_address, serve_metrics

__all__ = [
    "MachineReader",
    "Metric",
    "MetricsServer",
    "export_statistics",
    "machine_metrics",
    "parse_address",
    "process_metrics",
    "serve_metrics",
    "watch",
]
