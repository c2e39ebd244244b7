"""Requests about files and folders, their confinement to the store, and the admission of clients."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.processes import wait_until
from support.storage import run_storage_server

from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request, parse_reply
from gdrkit.storage.store import FileStore
from gdrkit.storage.wire import FrameType

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import StorageServer

    from gdrkit.storage.client import StorageClient
    from gdrkit.storage.control import Request


def get_refused_errno(client: StorageClient, request: Request) -> int | None:
    """Return the errno with which the server refuses a request."""
    with pytest.raises(ApiError) as error_info:
        client.request(request, messages.Done)
    return error_info.value.errno


@needs(verbs.nic())
def test_requests_create_change_and_remove_files(server: StorageServer, client: StorageClient) -> None:
    assert stat.S_ISDIR(client.request(messages.Mkdir("a", 0o750), messages.FileStat).mode)
    client.open("a/one", write=True, create=True, mode=0o640).close()
    assert client.stat("a/one").mode == stat.S_IFREG | 0o640
    assert get_refused_errno(client, messages.Open("a/one", write=True, create=True, exclusive=True)) == errno.EEXIST
    assert client.request(messages.HardLink("a/one", "a/two"), messages.FileStat).links == 2
    client.request(messages.Symlink("a/three", "../somewhere"), messages.FileStat)
    assert client.request(messages.Readlink("a/three"), messages.ReadlinkReply).target == "../somewhere"
    assert [entry.name for entry in client.list_folder("a")] == ["one", "three", "two"]
    client.request(messages.Rename("a/two", "b"), messages.Done)
    assert get_refused_errno(client, messages.Rename("b", "a/one", exclusive=True)) == errno.EEXIST
    client.request(messages.Rename("b", "a", exchange=True), messages.Done)
    assert stat.S_ISREG((server.root / "a").stat().st_mode)
    assert get_refused_errno(client, messages.Rmdir("b")) == errno.ENOTEMPTY
    assert client.request(messages.Chmod("a", 0o400), messages.FileStat).mode == stat.S_IFREG | 0o400
    changed_status = client.request(messages.Utimens("b", access_time_ns=1, modification_time_ns=-5), messages.FileStat)
    assert (changed_status.access_time_ns, changed_status.modification_time_ns) == (1, -5)
    assert client.request(messages.Truncate(7, path="a"), messages.FileStat).size_bytes == 7
    for path in ("a", "b/one", "b/three"):
        client.request(messages.Unlink(path), messages.Done)
    client.request(messages.Rmdir("b"), messages.Done)
    assert client.list_folder() == ()
    assert client.request(messages.Statfs(), messages.StatfsReply).blocks > 0
    # The store keeps no checksums of the removed files.
    assert not [path for path in (server.root / ".gdrkit" / "sums").rglob("*") if path.is_file()]


@needs(verbs.nic())
def test_large_folder_is_listed_completely(server: StorageServer, client: StorageClient) -> None:
    names = sorted([f"{'long-name' * 12}-{index:04}".encode() for index in range(700)] + [b"\xff\xfe not utf-8"])
    for name in names:
        (server.root / os.fsdecode(name)).touch()
    assert [os.fsencode(entry.name) for entry in client.list_folder()] == names
    assert client.stat(os.fsdecode(b"\xff\xfe not utf-8")).size_bytes == 0


@needs(verbs.nic())
def test_folder_of_names_with_long_escapes_is_listed(server: StorageServer, client: StorageClient) -> None:
    # An emoji has 4 bytes in a name, and 12 in JSON. So these names do not fit into one reply of 64 KiB.
    names = sorted(f"{index:02}{chr(0x1F600) * 62}" for index in range(90))
    for name in names:
        (server.root / name).touch()
    assert [entry.name for entry in client.list_folder()] == names


@needs(verbs.nic())
def test_own_folders_of_a_store_are_hidden(tmp_path: Path) -> None:
    with run_storage_server(tmp_path / "store", tmp_path / "log") as server, server.connect(token="") as client:
        (server.root / "3fs-virt").mkdir()
        (server.root / "3fs-virt" / "file").touch()
        (server.root / "folder" / "3fs-virt").mkdir(parents=True)
        for path in ("", ".", "./", "./."):
            assert [entry.name for entry in client.list_folder(path)] == ["folder"]
        # These names are hidden only in the root of the store.
        assert [entry.name for entry in client.list_folder("folder")] == ["3fs-virt"]
        for path in ("3fs-virt", "./3fs-virt", "3fs-virt/file", ".gdrkit", ".gdrkit/token"):
            assert get_refused_errno(client, messages.Stat(path)) == errno.ENOENT
            assert get_refused_errno(client, messages.Open(path)) == errno.ENOENT
            assert get_refused_errno(client, messages.List(path)) == errno.ENOENT
        for path in ("3fs-virt/file", ".gdrkit/token"):
            with (server.root / path).open("rb") as local_file, pytest.raises(ApiError) as error_info:
                client.request(messages.Adopt(), messages.OpenReply, descriptor=local_file.fileno())
            assert error_info.value.errno == errno.EXDEV


@needs(verbs.nic())
def test_modes_from_clients_are_masked_to_0777(server: StorageServer, client: StorageClient) -> None:
    client.open("file", write=True, create=True, mode=0o6755).close()
    client.request(messages.Mkdir("folder", 0o7755), messages.FileStat)
    for name in ("file", "folder"):
        assert stat.S_IMODE((server.root / name).stat().st_mode) == 0o755
        assert stat.S_IMODE(client.request(messages.Chmod(name, 0o7711), messages.FileStat).mode) == 0o711
        assert stat.S_IMODE((server.root / name).stat().st_mode) == 0o711


@needs(verbs.nic())
def test_lone_surrogate_fails_with_an_errno(server: StorageServer, client: StorageClient) -> None:
    with pytest.raises(ApiError) as error_info:
        server.connect(token="\ud800")  # noqa: S106 - not a password.
    assert error_info.value.errno == errno.EACCES
    for request in (
        messages.Stat("\ud800"),
        messages.Open("a\udfff", write=True, create=True),
        messages.Symlink("link", "\ud800"),
        messages.Rename("\ud83d", "b"),
        messages.List("", "\udc00"),
    ):
        assert get_refused_errno(client, request) == errno.EINVAL
    # The session continues. A pair of surrogates in JSON is a valid character.
    client.open("\U0001f600", write=True, create=True).close()
    assert [entry.name for entry in client.list_folder()] == ["\U0001f600"]
    assert "Traceback" not in server.read_log()


@needs(verbs.nic())
def test_failed_close_of_a_file_can_be_repeated(server: StorageServer) -> None:
    with server.connect(timeout_ms=500) as client:
        file = client.open("file", write=True, create=True)
        with server.suspend():
            for _ in range(2):
                with pytest.raises(ApiError) as error_info:
                    file.close()
                assert error_info.value.errno == errno.EREMOTEIO
    # The client is closed, so close() sends no request.
    file.close()


def test_listen_does_not_change_the_umask(tmp_path: Path) -> None:
    old_umask, stop_event = os.umask(0), threading.Event()
    file_modes: set[int] = set()

    def create_files() -> None:
        while not stop_event.is_set():
            (tmp_path / "file").touch()
            file_modes.add(stat.S_IMODE((tmp_path / "file").stat().st_mode))
            (tmp_path / "file").unlink()

    thread = threading.Thread(target=create_files)
    thread.start()
    try:
        for index in range(2000):
            address = ServerAddress(path=tmp_path / f"socket{index}")
            address.listen().close()
            assert address.path is not None
            assert stat.S_IMODE(address.path.stat().st_mode) == 0o600
            address.path.unlink()
    finally:
        stop_event.set()
        thread.join()
        os.umask(old_umask)
    assert file_modes == {0o666}


@needs(verbs.nic())
def test_paths_out_of_the_store_are_refused(server: StorageServer, client: StorageClient, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (server.root / "out").symlink_to(tmp_path)
    (server.root / "file").symlink_to(tmp_path / "secret")
    (server.root / "own").symlink_to(".gdrkit")
    for path in ("/etc/passwd", "../secret", "a/../../secret", "a/.."):
        assert get_refused_errno(client, messages.Open(path)) == errno.EXDEV
    for path in ("out/secret", "file", "own/token"):
        assert get_refused_errno(client, messages.Open(path)) == errno.ELOOP
    for path in (".gdrkit/token", ".gdrkit", "./.gdrkit/token", "3fs-virt/agent.sock", "//.gdrkit/token"):
        assert get_refused_errno(client, messages.Open(path)) in {errno.ENOENT, errno.EXDEV}
        assert get_refused_errno(client, messages.Stat(path)) in {errno.ENOENT, errno.EXDEV}
    assert get_refused_errno(client, messages.Rename("out", ".gdrkit/x")) == errno.ENOENT
    assert get_refused_errno(client, messages.Unlink("out/secret")) == errno.ELOOP
    assert get_refused_errno(client, messages.Chmod("file", 0o777)) == errno.ELOOP
    os.mkfifo(server.root / "fifo")
    assert get_refused_errno(client, messages.Open("fifo")) == errno.EINVAL
    assert get_refused_errno(client, messages.Open("fifo", write=True)) == errno.EINVAL
    assert [entry.name for entry in client.list_folder()] == ["fifo", "file", "out", "own"]


@needs(verbs.nic())
def test_transfer_against_the_open_mode_fails_with_ebadf(client: StorageClient) -> None:
    with client.open("file", write=True, create=True), client.register(bytearray(8)) as buffer:
        with client.open("file") as read_only_file, pytest.raises(ApiError) as error_info:
            read_only_file.write(buffer, offset_bytes=0)
        assert error_info.value.errno == errno.EBADF
        with client.open("file", read=False, write=True) as write_only_file, pytest.raises(ApiError) as error_info:
            write_only_file.read(buffer, offset_bytes=0)
        assert error_info.value.errno == errno.EBADF
        # The with statement has closed `write_only_file`.
        with pytest.raises(ApiError) as error_info:
            write_only_file.write(buffer, offset_bytes=0)
        assert error_info.value.errno == errno.EBADF


@needs(verbs.nic())
def test_wrong_token_is_refused(server: StorageServer) -> None:
    for token in ("", "0" * 64, "é"):
        with pytest.raises(ApiError) as error_info:
            server.connect(token=token)
        assert (error_info.value.errno, error_info.value.reason) == (errno.EACCES, Reason.NO_PERMISSION)
    for name in ("token", "store.json"):
        assert stat.S_IMODE((server.root / ".gdrkit" / name).stat().st_mode) == 0o600
    with server.connect() as client:
        assert client.list_folder() == ()


@needs(verbs.nic())
def test_unix_socket_is_private_and_accepts_descriptors(tmp_path: Path) -> None:
    with run_storage_server(tmp_path / "store", tmp_path / "log") as server:
        address = ServerAddress.parse(server.address)
        assert address.path is not None
        assert stat.S_IMODE(address.path.stat().st_mode) == 0o600
        (server.root / "file").write_bytes(b"content")
        with server.connect(token="") as client:
            with (server.root / "file").open("rb") as local_file:
                (server.root / "file").unlink()
                open_reply = client.request(messages.Adopt(), messages.OpenReply, descriptor=local_file.fileno())
                assert open_reply.stat.size_bytes == 7
                with pytest.raises(ApiError) as error_info:
                    client.request(messages.Adopt(write=True), messages.OpenReply, descriptor=local_file.fileno())
                assert error_info.value.errno == errno.EACCES
            with (server.root / "second").open("wb") as local_file, pytest.raises(ApiError) as error_info:
                client.request(messages.Adopt(read=True), messages.OpenReply, descriptor=local_file.fileno())
            assert error_info.value.errno == errno.EACCES
            with (tmp_path / "log").open("rb") as outside_file, pytest.raises(ApiError) as error_info:
                client.request(messages.Adopt(), messages.OpenReply, descriptor=outside_file.fileno())
            assert error_info.value.errno == errno.EXDEV
    assert not address.path.exists()


@needs(verbs.nic())
def test_second_server_of_a_store_is_refused(server: StorageServer) -> None:
    with pytest.raises(BlockingIOError):
        FileStore(server.root)


@needs(verbs.nic())
def test_connection_with_an_invalid_first_request_is_closed(server: StorageServer) -> None:
    address = ServerAddress.parse(server.address)
    for invalid_bytes in (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b"\0" * 32, os.urandom(4096)):
        with address.connect(10) as connected_socket:
            connected_socket.sendall(invalid_bytes)
            # If the server closes the connection before reading all bytes, the kernel resets the connection.
            with contextlib.suppress(ConnectionResetError):
                assert connected_socket.recv(1) == b""
    connection = ControlConnection(address.connect(10))
    try:
        connection.send(FrameType.CONTROL_REQUEST, pack_request(messages.Attach("0" * 64)), sequence=7)
        reply_frame = connection.receive(FrameType.CONTROL_REPLY)
        assert reply_frame is not None
        payload, sequence = reply_frame
        reply = parse_reply(payload, messages.Done)
        assert isinstance(reply, messages.ErrorReply)
        assert (reply.errno, sequence) == (errno.ESTALE, 7)
        with contextlib.suppress(ConnectionResetError):
            assert connection.receive(FrameType.CONTROL_REPLY) is None
    finally:
        connection.close()
    with server.connect() as client:
        assert client.list_folder() == ()


@needs(verbs.nic())
def test_session_leaves_no_open_descriptors(server: StorageServer) -> None:
    run_session(server)  # In the first session, the libraries of the server open some descriptors that stay open.
    counts_before = wait_for_descriptor_counts(server)
    for _ in range(3):
        run_session(server)
    wait_until(lambda: not count_descriptors(server) - counts_before, "the server has no more descriptors than before")


def run_session(server: StorageServer) -> None:
    """Begin a session with all NICs, and end the session while a file is open."""
    with server.connect() as client, client.register(bytearray(100)) as buffer:
        file = client.open("file", write=True, create=True)
        for _ in client.nics:
            file.write(buffer, offset_bytes=0)


def wait_for_descriptor_counts(server: StorageServer) -> Counter[str]:
    """Poll the counts of the server's open descriptors until they have not changed in five polls, and return them."""
    last_counts, equal_poll_count = count_descriptors(server), 0
    while equal_poll_count < 5:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(0.05)
        counts = count_descriptors(server)
        last_counts, equal_poll_count = counts, equal_poll_count + 1 if counts == last_counts else 0
    return last_counts


def count_descriptors(server: StorageServer) -> Counter[str]:
    """Count the open descriptors of the server by type, such as socket or pipe."""
    return Counter(descriptor.partition(":")[0] for descriptor in server.list_open_files())
