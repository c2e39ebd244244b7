"""The storage server of an agent as a child process: its start, its end, and the errors of a failed start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until

from gdrkit.errors import BrokenResource, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages
from gdrkit.usrbio.agent.agent_error import AgentError
from gdrkit.usrbio.agent.files import PathAccess, open_at_server
from gdrkit.usrbio.agent.memory import Nics
from gdrkit.usrbio.agent.mount import AgentMount
from gdrkit.usrbio.agent.server import EmbeddedServer, RemoteServer
from gdrkit.usrbio.agent.session import AgentSession

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs(verbs.nic())


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[AgentMount]:
    with AgentMount(tmp_path) as agent_mount:
        yield agent_mount


@pytest.fixture
def server(mount: AgentMount, tmp_path: Path) -> Iterator[EmbeddedServer]:
    (tmp_path / "store").mkdir()
    embedded_server = EmbeddedServer(tmp_path / "store", mount)
    yield embedded_server
    embedded_server.close()


def is_running(process_id: int | None) -> bool:
    return process_id is not None and Path(f"/proc/{process_id}").exists()


def test_server_starts_once_and_ends_with_close(server: EmbeddedServer, mount: AgentMount) -> None:
    assert server.process_id is None
    server.prepare()
    process_id = server.process_id
    server.prepare()
    assert server.process_id == process_id
    assert stat.S_ISSOCK((mount.virtual_folder / "server.sock").stat().st_mode)
    with server.connect() as connection:
        assert connection.gettimeout() == 30
    server.close()
    server.close()
    assert not is_running(process_id)
    assert not (mount.virtual_folder / "server.sock").exists()


def test_server_has_a_process_group_of_its_own(server: EmbeddedServer) -> None:
    server.prepare()
    assert server.process_id is not None
    assert os.getpgid(server.process_id) == server.process_id


def test_server_that_was_given_up_is_started_again(server: EmbeddedServer) -> None:
    server.kill_if_child()
    server.prepare()
    first_process_id = server.process_id
    server.kill_if_child()
    server.kill_if_child()
    server.prepare()
    assert server.process_id != first_process_id
    assert not is_running(first_process_id)
    second_process_id = server.process_id
    server.prepare()
    assert server.process_id == second_process_id
    server.connect().close()


def test_stopped_server_that_was_given_up_is_killed_at_once(server: EmbeddedServer) -> None:
    server.prepare()
    process_id = server.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    server.kill_if_child()
    wait_options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    wait_until(lambda: os.waitid(os.P_PID, process_id, wait_options) is not None, "the server is killed")


def test_connection_to_a_server_that_does_not_run_fails(server: EmbeddedServer) -> None:
    with pytest.raises(FileNotFoundError):
        server.connect()


def test_server_that_was_killed_is_started_again(server: EmbeddedServer) -> None:
    server.prepare()
    first_process_id = server.process_id
    assert first_process_id is not None
    os.kill(first_process_id, signal.SIGKILL)
    os.waitid(os.P_PID, first_process_id, os.WEXITED | os.WNOWAIT)
    server.prepare()
    assert server.process_id != first_process_id


def test_failed_start_of_a_server_has_its_exit_code(mount: AgentMount, tmp_path: Path) -> None:
    embedded_server = EmbeddedServer(tmp_path / "missing", mount)
    with pytest.raises(BrokenResource, match=r"ended with exit code [1-9]\d* before it was ready") as error_info:
        embedded_server.prepare()
    assert error_info.value.reason is Reason.PEER_GONE
    assert embedded_server.process_id is None
    embedded_server.close()


@contextlib.contextmanager
def hold_server_lock(mount: AgentMount) -> Iterator[int]:
    """Hold the lock of the storage server until the block ends, as the server of an earlier agent would do.

    Yield the descriptor of the lock file.
    """
    lock_fd = mount.open("server.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield lock_fd
    finally:
        os.close(lock_fd)


def test_server_waits_for_the_end_of_an_earlier_one(server: EmbeddedServer, mount: AgentMount) -> None:
    with hold_server_lock(mount) as lock_fd:
        unlock_timer = threading.Timer(0.5, fcntl.flock, [lock_fd, fcntl.LOCK_UN])
        unlock_timer.start()
        server.prepare()
        unlock_timer.join()
    assert is_running(server.process_id)


def test_running_server_holds_the_lock(server: EmbeddedServer, mount: AgentMount) -> None:
    lock_fd = mount.open("server.lock", os.O_RDWR | os.O_CREAT)
    try:
        server.prepare()
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        server.close()
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock_fd)


def test_earlier_server_that_does_not_end_is_reported(server: EmbeddedServer, mount: AgentMount) -> None:
    """The case takes 20 s, because an agent waits so long for the end of an earlier server."""
    with hold_server_lock(mount):
        descriptors_before = set(Path("/proc/self/fd").iterdir())
        with pytest.raises(BrokenResource, match="the storage server of an earlier agent does not end") as error_info:
            server.prepare()
        assert set(Path("/proc/self/fd").iterdir()) == descriptors_before
    assert error_info.value.reason is Reason.BUSY
    assert server.process_id is None
    # The agent tries again later, and succeeds after the end of the earlier server.
    server.prepare()
    assert is_running(server.process_id)


def test_server_whose_start_hangs_is_killed_and_reported(
    server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case takes 30 s, because an agent waits so long for the start of its server."""
    # Python imports this module at the start of the child, which therefore hangs.
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(300)\n")
    with monkeypatch.context() as environment:
        environment.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(BrokenResource, match="not ready within 30 s") as error_info:
            server.prepare()
    assert error_info.value.reason is Reason.TIMEOUT
    assert server.process_id is None
    server.prepare()
    assert is_running(server.process_id)


def test_only_an_embedded_server_takes_descriptors(server: EmbeddedServer) -> None:
    assert server.takes_descriptors
    assert server.token is None
    assert not RemoteServer("localhost", 1, None).takes_descriptors


def test_connection_to_a_remote_server_has_no_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote_server = RemoteServer("127.0.0.1", listener.getsockname()[1], "token")
        remote_server.prepare()
        with remote_server.connect() as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.gettimeout() == 30
        remote_server.kill_if_child()
        remote_server.close()
        assert remote_server.token == "token"  # noqa: S105 - not a password.


def test_local_descriptor_is_of_the_file_of_the_handle(server: EmbeddedServer, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name in ("folder", "other"):
        (store / name).mkdir()
        (store / name / "file").write_text(name)
    server.prepare()
    with Nics() as nics, contextlib.ExitStack() as stack:
        session = AgentSession(server.connect, nics, token=None, timeout_ms=30_000)
        stack.callback(session.close)
        inode = (store / "folder" / "file").stat().st_ino
        access = PathAccess("folder/file", inode=inode, readable=True, writable=False, user=None)
        handle = open_at_server(access, session)
        descriptor = access.open_local(store, session, handle)
        assert os.read(descriptor, 100) == b"folder"
        os.close(descriptor)
        # Another user replaces the folder after the server has opened the file: by another folder, or by a link.
        (store / "folder").rename(store / "moved")
        (store / "other").rename(store / "folder")
        with pytest.raises(AgentError, match="the path now belongs to another file"):
            access.open_local(store, session, handle)
        (store / "folder").rename(store / "other")
        (store / "folder").symlink_to(store / "moved")
        with pytest.raises(OSError, match="open") as link_refusal:
            access.open_local(store, session, handle)
        assert link_refusal.value.errno == errno.ELOOP
        # After the server has closed its handle, the inode number may belong to a new file.
        (store / "folder").unlink()
        (store / "moved").rename(store / "folder")
        session.call(messages.Close(handle=handle), messages.Done)
        with pytest.raises(AgentError) as refusal:
            access.open_local(store, session, handle)
        assert refusal.value.errno == errno.EBADF
