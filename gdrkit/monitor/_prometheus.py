"""The only file that imports prometheus_client, which formats metrics and serves them over HTTP."""

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


def start_server(host: str, port: int, metrics: Callable[[], Iterable[Metric]]) -> tuple[WSGIServer, Thread]:
    """Serve the metrics at /metrics by a thread, and return the HTTP server and the thread.

    Raises
    ------
    SetupMissing
        prometheus_client is not installed.
    OSError
        The address cannot be used.
    """
    try:
        library = importlib.import_module("prometheus_client")
        core = importlib.import_module("prometheus_client.core")
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
            for metric in metrics():
                family_type = core.CounterMetricFamily if metric.is_counter else core.GaugeMetricFamily
                names = [name for name, _ in next(iter(metric.values), ())]
                family = family_type(metric.name, metric.help, labels=names)
                for labels, value in metric.values.items():
                    family.add_metric([label for _, label in labels], value)
                yield family

    registry = library.CollectorRegistry()
    registry.register(Collector())
    # The threads of the server inherit the signal mask and so receive no signals. If one of them received a signal for
    # which another thread waits by sigwait(), the default action would end the process.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        server, thread = library.start_http_server(port, host, registry)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    return server, thread
