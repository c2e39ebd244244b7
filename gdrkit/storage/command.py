"""The command `gdrkit serve`, which runs a storage server until SIGTERM or SIGINT."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

from gdrkit.errors import Api, ApiError, GdrkitError, Reason, errno_name
from gdrkit.host import drop_write_capabilities, raise_open_files_limit
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.server import StorageServer
from gdrkit.storage.store import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["serve"]

_ADVICE_BY_ERRNO = {
    errno.EWOULDBLOCK: "another server has this store open; stop it first",
    errno.EADDRINUSE: "choose another address with --listen, or stop the process that listens there",
    errno.ENODEV: "name an RDMA device of this machine (gdrkit facts lists them)",
    errno.EACCES: "give this user read and write permission for the folder and /dev/infiniband",
}


def serve(
    root: Path,
    *,
    listen: str | None,
    nic_names: Sequence[str],
    chunk_bytes: int | None,
    sums_generation_fd: int = -1,
    export: Callable[[Callable[[], dict[str, int]]], AbstractContextManager[object]] = contextlib.nullcontext,
) -> int:
    """Serve a store until SIGTERM or SIGINT, and return the exit code.

    The server listens on the address `listen`, or on the default socket of the store if it is None. `export` gets a
    function that returns the counters of the server, and returns a context manager, such as an exporter of metrics. The
    context is open while the server runs. For `sums_generation_fd`, see :class:`~gdrkit.storage.store.FileStore`.
    """
    logging.basicConfig(level=logging.INFO, format="gdrkit serve: %(message)s", stream=sys.stderr)
    raise_open_files_limit()
    # A server that runs as root also executes requests that an agent sends for other users. Their writes must obey
    # quotas and clear the set-user-ID bits of files. So the server gives up the capabilities with which it would not.
    drop_write_capabilities()
    # sigwait() below receives the signals. Threads that start from here on inherit the mask and never get them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        with FileStore(root, chunk_bytes=chunk_bytes, sums_generation_fd=sums_generation_fd) as store:
            address = ServerAddress(path=store.default_socket()) if listen is None else ServerAddress.parse(listen)
            with StorageServer(store, address, nic_names=nic_names) as server:
                sys.stdout.write(f"gdrkit serve: {root} at {server.address} by {', '.join(server.nics)}\n")
                sys.stdout.flush()
                with export(lambda: dict(store.native.counters())):
                    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    except GdrkitError:
        raise
    except OSError as error:
        raise ApiError(
            api=Api.KERNEL if error.filename or error.errno != errno.ENODEV else Api.VERBS,
            operation="serve",
            status=error.errno,
            status_name=errno_name(error.errno),
            errno=error.errno,
            arguments={"store": os.fspath(root), "listen": listen, "nics": list(nic_names)},
            reason=Reason.BUSY if error.errno == errno.EWOULDBLOCK else Reason.OTHER,
            what_to_do=_ADVICE_BY_ERRNO.get(error.errno or 0, ""),
            detail=str(error.strerror or error),
        ) from error
    return 0
