"""A server of metrics for Prometheus."""

from __future__ import annotations

import contextlib
import errno
import sys
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, Reason, UsageError, errno_name
from gdrkit.handles import Closeable
from gdrkit.monitor import _prometheus
from gdrkit.monitor.process import process_metrics, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from gdrkit.monitor.metrics import Metric

__all__ = ["MetricsServer", "export_statistics", "parse_address", "serve_metrics"]

_PORT_MAX = 65535


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT or [IPv6]:PORT. Port 0 stands for any free port.

    Raises
    ------
    UsageError
        The text is not an address.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdecimal() and int(port) <= _PORT_MAX):
        message = f"the address of the metrics must be HOST:PORT with a port of 0 to 65535, not {text!r}"
        raise UsageError(message)
    return host, int(port)


class MetricsServer(Closeable):
    """An HTTP server of metrics, which runs in a thread until :meth:`close` or the end of the ``with`` block.

    Attributes
    ----------
    address : str
        URL of the metrics, with the port in use.
    """

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        host, port = map(str, server.server_address[:2])
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def close(self) -> None:
        """Stop the server, and wait for the request in progress."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(host: str, port: int, *, metrics: Callable[[], Iterable[Metric]] = process_metrics) -> MetricsServer:
    """Serve metrics to Prometheus. By default they describe this process; see :func:`watch`.

    Raises
    ------
    SetupMissing
        prometheus_client is not installed.
    ApiError
        EADDRINUSE: another process listens at this address. EADDRNOTAVAIL: the host has no such address.
    """
    try:
        return MetricsServer(*_prometheus.start_server(host, port, metrics))
    except OSError as error:
        raise ApiError(
            api=Api.KERNEL,
            operation="bind",
            status=error.errno,
            status_name=errno_name(error.errno),
            errno=error.errno,
            arguments={"host": host, "port": port},
            reason=Reason.BUSY if error.errno == errno.EADDRINUSE else Reason.OTHER,
            what_to_do="choose an address of this machine and a free port",
            detail=str(error.strerror or error),
        ) from error


@contextlib.contextmanager
def export_statistics(kind: str, address: tuple[str, int], statistics: Callable[[], dict[str, int]]) -> Iterator[None]:
    """Serve the metrics of this process while the context is open, and add the statistics of an agent or a server.

    See :func:`watch` for `kind` and `statistics`. `address` is the host and the port of the metrics. The URL of the
    metrics is written to standard error.
    """
    with watch(kind, statistics), serve_metrics(*address) as server:
        sys.stderr.write(f"gdrkit: metrics at {server.address}\n")
        yield
