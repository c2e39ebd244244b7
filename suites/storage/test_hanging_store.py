"""A server whose file system hangs: its close fails in time, and succeeds when the file system answers again."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faulty_fuse import FaultyMount

from gdrkit.errors import ApiError, BrokenResource, Reason
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.client import StorageClient
from gdrkit.storage.server import StorageServer
from gdrkit.storage.store import FileStore

if TYPE_CHECKING:
    from pathlib import Path


@needs(verbs.nic(), host.fuse)
def test_close_of_a_server_with_a_hanging_store_times_out(tmp_path: Path) -> None:
    with FaultyMount(tmp_path / "fuse") as fuse, FileStore(fuse.mount) as store:
        server = StorageServer(store, ServerAddress.parse("127.0.0.1:0"))
        with (
            contextlib.suppress(ApiError, BrokenResource),
            ThreadPoolExecutor(1) as pool,
            StorageClient(f"127.0.0.1:{server.address.port}", token=store.token) as client,
            fuse.paused(),
        ):
            request = pool.submit(client.stat, "no-such-file")
            with pytest.raises(TimeoutError):
                request.result(1)
            with pytest.raises(BrokenResource, match=r"did not end within 0\.5 s: gdrkit-session") as raised:
                server.close(timeout_s=0.5)
        assert raised.value.reason is Reason.TIMEOUT
        server.close()
        server.close()
