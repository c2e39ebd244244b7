"""Tests of a server whose file system hangs: timeout of close(), and limit of connections that wait for a session."""

from __future__ import annotations

import contextlib
import select
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faulty_fuse import FaultyMount

from gdrkit.errors import ApiError, BrokenResource, Reason
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage import messages
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.client import StorageClient
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request
from gdrkit.storage.server import StorageServer
from gdrkit.storage.session import StorageSession
from gdrkit.storage.store import FileStore
from gdrkit.storage.wire import FrameType

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.verbs import Nic


@needs(verbs.nic(), host.fuse)
def test_close_of_a_server_with_a_hanging_store_times_out(tmp_path: Path) -> None:
    with FaultyMount(tmp_path / "fuse") as fuse, FileStore(fuse.mount) as store:
        server = StorageServer(store, ServerAddress.parse("127.0.0.1:0"))
        client = StorageClient(f"127.0.0.1:{server.address.port}", token=store.token)
        with ThreadPoolExecutor(1) as executor, fuse.paused():
            # The request hangs in the paused file system.
            pending_request = executor.submit(client.stat, "no-such-file")
            with pytest.raises(TimeoutError):
                pending_request.result(1)
            # Within 3 s, the thread that accepts connections ends even on a busy machine. The thread of the session
            # waits for the file system, so the error names only this thread.
            with pytest.raises(BrokenResource, match=r"did not end within 3 s: gdrkit-session") as error_info:
                server.close(timeout_s=3)
        assert error_info.value.reason is Reason.TIMEOUT
        with contextlib.suppress(ApiError, BrokenResource):
            client.close()
        server.close()
        server.close()


@needs(verbs.nic(), host.fuse)
def test_connection_limit_is_256(tmp_path: Path, nic: Nic) -> None:
    with (
        FaultyMount(tmp_path / "fuse") as fuse,
        FileStore(fuse.mount) as store,
        StorageServer(store, ServerAddress.parse("127.0.0.1:0")) as server,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(1) as executor,
        StorageSession(
            lambda: server.address.connect(10), [nic], client="a case", token=store.token, timeout_ms=60_000
        ) as session,
        fuse.paused(),
    ):
        # The request hangs in the paused file system.
        pending_request = executor.submit(session.request, messages.Stat("no-such-file"), messages.FileStat)
        with pytest.raises(TimeoutError):
            pending_request.result(1)
        # Each hello waits until the session that it replaces has executed the hanging request.
        hello_payload = pack_request(
            messages.StorageHello(1, "a case", ({"qp_number": 1},), token=store.token, replaces=session.secret)
        )
        connections = []
        for _ in range(256):
            connection = ControlConnection(server.address.connect(10))
            stack.callback(connection.close)
            connection.send(FrameType.CONTROL_REQUEST, hello_payload, sequence=1)
            connections.append(connection)
        # The session uses one of the 256 connections that the server allows, so the server closes the
        # connection of the last hello.
        assert connections.pop().receive(FrameType.CONTROL_REPLY) is None
        assert select.select(connections, (), (), 0)[0] == []
