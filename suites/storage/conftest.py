"""The fixtures of the storage cases: a server with an empty store, a client, and memory of the host or a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.storage import StorageMemoryKind, StorageServer, run_storage_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gdrkit.storage.client import StorageClient

__all__ = ["client", "memory", "server"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StorageServer]:
    """Run a storage server over TCP with an empty store, and yield it."""
    with run_storage_server(tmp_path / "store", tmp_path / "log", "--listen", "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def client(server: StorageServer) -> Iterator[StorageClient]:
    """Yield a client that uses all NICs."""
    with server.connect() as client:
        yield client


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> StorageMemoryKind:
    """Return the memory kind that the parameter of the case names, one of ``support.storage.MEMORY_KINDS``."""
    return StorageMemoryKind(device=request.getfixturevalue("device") if request.param == "device" else None)
