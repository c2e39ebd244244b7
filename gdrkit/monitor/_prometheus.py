"""The HTTP server of the metrics. Only this file imports prometheus_client, which formats and serves them."""

from __future__ import annotations

import errno
import importlib
import signal
from typing import TYPE_CHECKING

from gdrkit import loader
from gdrkit.remedies import pip_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from gdrkit.monitor.metrics import Metric

__all__ = ["start_server"]


def start_server(host: str, port: int, read_metrics: Callable[[], Iterable[Metric]]) -> tuple[WSGIServer, Thread]:
    """Serve the metrics at /metrics in a new thread, and return the HTTP server and the thread.

    `read_metrics` is called for each request.

    Raises
    ------
    SetupMissing
        prometheus_client is not installed.
    OSError
        The address cannot be used.
    """
    try:
        client_module = importlib.import_module("prometheus_client")
        core_module = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        raise loader.setup_missing(
            operation="import prometheus_client",
            text=str(error),
            what_to_do=pip_install("monitor"),
            default_errno=errno.ENOENT,
        ) from error

    class Collector:
        """An adapter: prometheus_client calls collect() for each request."""

        @staticmethod
        def describe() -> list[object]:
            """Return nothing, so that registering the collector does not read the metrics."""
            return []

        @staticmethod
        def collect() -> Iterator[object]:
            """Yield the metrics as objects of prometheus_client."""
            for metric in read_metrics():
                family_type = core_module.CounterMetricFamily if metric.is_counter else core_module.GaugeMetricFamily
                label_names = [name for name, _ in next(iter(metric.values), ())]
                family = family_type(metric.name, metric.help, labels=label_names)
                for labels, value in metric.values.items():
                    family.add_metric([label_value for _, label_value in labels], value)
                yield family

    registry = client_module.CollectorRegistry()
    registry.register(Collector())
    # The threads of the server inherit the signal mask and so receive no signals. If one of them received a signal for
    # which another thread waits by sigwait(), the default action would end the process.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        server, thread = client_module.start_http_server(port, host, registry)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return server, thread
