"""An error of accept() that the storage server does not expect: the server logs it and serves the next client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.failing_calls import STRACE, fail_next_call
from support.storage import run_storage_server

from gdrkit.harness.needs import needs, verbs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs(STRACE, verbs.nic())


def test_server_accepts_again_after_an_unexpected_error(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "file").write_bytes(b"x")
    log = tmp_path / "log"
    with run_storage_server(tmp_path / "store", log, "--listen", "127.0.0.1:0") as server:
        with fail_next_call(server.process.pid, "accept4", "EPROTO"), server.connect() as client:
            assert client.list_folder()[0].name == "file"
        with server.connect() as client:
            assert client.list_folder()[0].name == "file"
    assert "accept: Protocol error" in log.read_text()
