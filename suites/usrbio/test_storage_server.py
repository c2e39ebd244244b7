"""The storage server of an agent as a child process: its start, its end, and the errors of a failed start."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import BrokenResource, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.usrbio.agent.mount import AgentMount
from gdrkit.usrbio.agent.server import EmbeddedServer, RemoteServer

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(verbs.nic())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AgentMount]:
    with AgentMount(tmp_path) as opened:
        yield opened


@pytest.fixture
def server(mount: AgentMount, tmp_path: Path) -> Iterator[EmbeddedServer]:
    (tmp_path / "store").mkdir()
    embedded = EmbeddedServer(tmp_path / "store", mount)
    yield embedded
    embedded.close()


def is_running(process_id: int | None) -> bool:
    return process_id is not None and Path(f"/proc/{process_id}").exists()


def test_server_starts_once_and_ends_with_close(server: EmbeddedServer, mount: AgentMount) -> None:
    assert server.process_id is None
    server.prepare()
    first = server.process_id
    server.prepare()
    assert server.process_id == first
    assert stat.S_ISSOCK((mount.virtual_folder / "server.sock").stat().st_mode)
    with server.connect() as connection:
        assert connection.gettimeout() == 30
    server.close()
    server.close()
    assert not is_running(first)
    assert not (mount.virtual_folder / "server.sock").exists()


def test_server_has_a_process_group_of_its_own(server: EmbeddedServer) -> None:
    server.prepare()
    assert server.process_id is not None
    assert os.getpgid(server.process_id) == server.process_id


def test_server_that_was_given_up_is_started_again(server: EmbeddedServer) -> None:
    server.give_up()
    server.prepare()
    first = server.process_id
    server.give_up()
    server.give_up()
    server.prepare()
    assert server.process_id != first
    assert not is_running(first)
    server.connect().close()


def test_server_that_was_killed_is_started_again(server: EmbeddedServer) -> None:
    server.prepare()
    first = server.process_id
    assert first is not None
    os.kill(first, 9)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    server.prepare()
    assert server.process_id != first


def test_failed_start_of_a_server_has_its_exit_code(mount: AgentMount, tmp_path: Path) -> None:
    embedded = EmbeddedServer(tmp_path / "missing", mount)
    with pytest.raises(BrokenResource, match=r"ended with [1-9]\d* before it was ready") as error:
        embedded.prepare()
    assert error.value.reason is Reason.PEER_GONE
    assert embedded.process_id is None
    embedded.close()


def test_only_an_embedded_server_takes_descriptors(server: EmbeddedServer) -> None:
    assert server.takes_descriptors
    assert server.token is None
    assert not RemoteServer("localhost", 1, None).takes_descriptors


def test_connection_to_a_remote_server_has_no_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = RemoteServer("127.0.0.1", listener.getsockname()[1], "token")
        remote.prepare()
        with remote.connect() as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.gettimeout() == 30
        remote.give_up()
        remote.close()
        assert remote.token == "token"  # noqa: S105 - not a password.
