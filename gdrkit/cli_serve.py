# ruff: noqa: FBT001, PLR0917 - click calls commands by the names of their options.
"""The commands ``gdrkit serve`` and ``gdrkit agent``, which serve files until they get a signal.

:mod:`gdrkit.cli` adds them to its command line, and turns their errors into messages and exit codes.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gdrkit.errors import UsageError
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = ["COMMANDS"]


_metrics_option = click.option(
    "--metrics",
    metavar="HOST:PORT",
    help="Serve metrics for Prometheus at http://HOST:PORT/metrics. Needs prometheus_client.",
)


def _make_exporter(
    process_type: str, metrics_address: str | None
) -> Callable[[Callable[[], dict[str, int]]], AbstractContextManager[object]]:
    """Return the function that exports the counters of the command. Without --metrics, that function does nothing."""
    if metrics_address is None:
        return contextlib.nullcontext
    from gdrkit.monitor import export_statistics, parse_address

    return partial(export_statistics, process_type, parse_address(metrics_address))


@click.command(
    epilog=(
        "\b\nExamples:\n  gdrkit serve --store /data\n  gdrkit serve --store /data --listen 192.0.2.7:7001 --nic mlx5_0"
    )
)
@click.option(
    "--store",
    "root",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The folder whose files are served. gdrkit keeps their checksums in DIR/.gdrkit.",
)
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="HOST:PORT or unix:PATH. A TCP client needs the token in DIR/.gdrkit/token. "
    "Default: unix:DIR/.gdrkit/server.sock.",
)
@click.option(
    "--nic", "nics", multiple=True, metavar="NAME", help="A NIC to use. The option can be repeated. Default: all NICs."
)
@click.option(
    "--chunk-bytes",
    type=int,
    metavar="N",
    help="Bytes of a file that one checksum covers, in a new store: 4096 to 65536. Default: 4096.",
)
@_metrics_option
def serve(root: Path, listen: str | None, nics: tuple[str, ...], chunk_bytes: int | None, metrics: str | None) -> int:
    """Serve the files of a folder over RDMA, until SIGTERM or SIGINT.

    The server is one node without replication. It prints its address as soon as clients can connect.
    """
    from gdrkit.storage.command import serve as serve_store

    export = _make_exporter("server", metrics)
    return serve_store(root, listen=listen, nic_names=nics, chunk_bytes=chunk_bytes, export=export)


@click.command(
    epilog=(
        "\b\nExamples:\n"
        "  gdrkit agent /data --store /data\n"
        "  gdrkit agent /mnt/files --server 192.0.2.7:7001 --token-file token"
    )
)
@click.argument("mount", type=click.Path(path_type=Path))
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Serve the files of this folder. Without --fuse, DIR must be the folder MOUNT.",
)
@click.option("--server", metavar="HOST:PORT", help="Serve the files of this storage server by a FUSE mount.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", help="A file with the token of --server."
)
@click.option("--fuse", is_flag=True, help="With --store: make a FUSE mount on MOUNT, which must be an empty folder.")
@click.option(
    "--spin-us",
    type=click.IntRange(0, 10_000_000),
    default=50,
    show_default=True,
    metavar="US",
    help="Microseconds that the agent polls for new operations before it sleeps.",
)
@click.option(
    "--silence-ms",
    type=click.IntRange(1, 86_400_000),
    default=60_000,
    show_default=True,
    metavar="MS",
    help="If the storage server returns no result for this many milliseconds, the operations that wait for it fail.",
)
@_metrics_option
@click.option(
    "--shared",
    is_flag=True,
    help="Serve all users of this machine, each with that user's own access rights. Needs root.",
)
@click.option(
    "--user-memory-mib",
    type=click.IntRange(1),
    metavar="MIB",
    help="With --shared: the most host memory that the programs of one user may publish. Default: no limit.",
)
@click.option(
    "--local-reads/--no-local-reads",
    default=True,
    show_default=True,
    help="With --store: the agent reads cached bytes of files into host memory itself, without the server and a NIC.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready message and the counters as JSON.")
def agent(
    mount: Path,
    store: Path | None,
    server: str | None,
    token_file: Path | None,
    fuse: bool,
    spin_us: int,
    silence_ms: int,
    metrics: str | None,
    shared: bool,
    user_memory_mib: int | None,
    local_reads: bool,
    as_json: bool,
) -> int:
    """Serve USRBIO, the hf3fs interface of 3FS, below MOUNT, until SIGTERM or SIGINT.

    The agent registers the memory of applications with every active NIC. A storage server moves the bytes: the server
    of --server, or with --store a server that the agent starts. With --store, the agent itself reads cached bytes into
    host memory. The agent prints a line as soon as applications can connect.
    """
    from gdrkit.host import raise_open_files_limit
    from gdrkit.usrbio.agent._agent_loop import limit_arenas
    from gdrkit.usrbio.agent.agent import block_signals, plain_agent, serve_until_signalled

    if (store is None) == (server is None):
        message = "gdrkit agent needs either --store DIR or --server HOST:PORT"
        raise UsageError(message)
    if user_memory_mib is not None and not shared:
        message = "--user-memory-mib needs --shared"
        raise UsageError(message)
    user_memory_quota_bytes = None if user_memory_mib is None else user_memory_mib * MIB
    export = _make_exporter("agent", metrics)
    # These calls come before the agent starts threads: the threads inherit the blocked signals, and use the two arenas
    # to which limit_arenas() limits malloc.
    block_signals()
    limit_arenas()
    raise_open_files_limit()
    if store is not None and not fuse:
        running_agent = plain_agent(
            mount,
            store,
            spin_us=spin_us,
            server_timeout_ms=silence_ms,
            is_shared=shared,
            user_memory_quota_bytes=user_memory_quota_bytes,
            may_read_locally=local_reads,
        )
        serve_until_signalled(running_agent, as_json=as_json, export=export)
        return 0
    from gdrkit.storage.token import read_token_file
    from gdrkit.usrbio.fuse.agent import fuse_agent

    token = None if token_file is None else read_token_file(token_file)
    fuse_mount_agent = fuse_agent(
        mount,
        store=store,
        server=server,
        token=token,
        spin_us=spin_us,
        server_timeout_ms=silence_ms,
        is_shared=shared,
        user_memory_quota_bytes=user_memory_quota_bytes,
        may_read_locally=local_reads,
    )
    serve_until_signalled(fuse_mount_agent, as_json=as_json, export=export)
    return 0


COMMANDS = (serve, agent)
