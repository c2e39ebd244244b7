"""A storage client is closed in a child process that was forked while the parent used the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.forked import get_lock, hold_in_another_thread, run_in_forked_child

from gdrkit.errors import ClosedResource
from gdrkit.host import HostAllocator
from gdrkit.storage.client import IORequest

if TYPE_CHECKING:
    from gdrkit.storage.client import StorageClient


def test_client_is_closed_in_a_forked_child(client: StorageClient) -> None:
    with (
        client.open("file", write=True, create=True) as file,
        client.allocate(HostAllocator(), 4096) as buffer,
    ):
        request = IORequest(file, 0, buffer)

        def check_closed_client() -> None:
            assert client.closed
            for refused_call in (
                lambda: client.batch_write([request]),
                lambda: client.allocate(HostAllocator(), 4096),
                lambda: client.stat("file"),
            ):
                with pytest.raises(ClosedResource):
                    refused_call()
            # In the child, close() changes nothing in the session of the parent.
            buffer.close()
            client.close()

        # During the fork, another thread holds the lock of the client, and no thread of the child can release it.
        with hold_in_another_thread(get_lock(client)):
            assert run_in_forked_child(check_closed_client) == 0
        # The session of the parent goes on, and its buffer is still registered.
        client.batch_write([request])
        assert client.stat("file").size_bytes == 4096
