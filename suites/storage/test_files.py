"""What a client may ask about files, how it is confined to the store, and who may come at all."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from support.storage import serving

from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages as ask
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request, parse_reply
from gdrkit.storage.store import FileStore
from gdrkit.storage.wire import FrameType

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import Service

    from gdrkit.storage.client import StorageClient
    from gdrkit.storage.control import Request


def refusal(client: StorageClient, request: Request) -> int | None:
    """The errno of the answer."""
    with pytest.raises(ApiError) as refused:
        client.request(request, ask.Done)
    return refused.value.errno


@needs(verbs.nic())
def test_files_and_folders(service: Service, client: StorageClient) -> None:
    assert stat.S_ISDIR(client.request(ask.Mkdir("a", 0o750), ask.FileStat).mode)
    client.open("a/one", write=True, create=True, mode=0o640).close()
    assert client.stat("a/one").mode == stat.S_IFREG | 0o640
    assert refusal(client, ask.Open("a/one", write=True, create=True, exclusive=True)) == errno.EEXIST
    assert client.request(ask.HardLink("a/one", "a/two"), ask.FileStat).links == 2
    client.request(ask.Symlink("a/three", "../somewhere"), ask.FileStat)
    assert client.request(ask.Readlink("a/three"), ask.ReadlinkReply).target == "../somewhere"
    assert [each.name for each in client.list_folder("a")] == ["one", "three", "two"]
    client.request(ask.Rename("a/two", "b"), ask.Done)
    assert refusal(client, ask.Rename("b", "a/one", exclusive=True)) == errno.EEXIST
    client.request(ask.Rename("b", "a", exchange=True), ask.Done)
    assert stat.S_ISREG((service.root / "a").stat().st_mode)
    assert refusal(client, ask.Rmdir("b")) == errno.ENOTEMPTY
    assert client.request(ask.Chmod("a", 0o400), ask.FileStat).mode == stat.S_IFREG | 0o400
    changed = client.request(ask.Utimens("b", access_time_ns=1, modification_time_ns=-5), ask.FileStat)
    assert (changed.access_time_ns, changed.modification_time_ns) == (1, -5)
    assert client.request(ask.Truncate(7, path="a"), ask.FileStat).size_bytes == 7
    for path in ("a", "b/one", "b/three"):
        client.request(ask.Unlink(path), ask.Done)
    client.request(ask.Rmdir("b"), ask.Done)
    assert client.list_folder() == ()
    assert client.request(ask.Statfs(), ask.StatfsReply).blocks > 0
    assert not [each for each in (service.root / ".gdrkit" / "sums").rglob("*") if each.is_file()]


@needs(verbs.nic())
def test_a_large_folder_comes_in_pages_and_with_every_name(service: Service, client: StorageClient) -> None:
    names = sorted([f"{'long-name' * 12}-{index:04}".encode() for index in range(700)] + [b"\xff\xfe not utf-8"])
    for name in names:
        (service.root / os.fsdecode(name)).touch()
    assert [os.fsencode(each.name) for each in client.list_folder()] == names
    assert client.stat(os.fsdecode(b"\xff\xfe not utf-8")).size_bytes == 0


@needs(verbs.nic())
def test_folder_of_names_with_long_escapes_is_listed(service: Service, client: StorageClient) -> None:
    # An emoji has 4 bytes in a name, and 12 in JSON.
    names = sorted(f"{index:02}{chr(0x1F600) * 62}" for index in range(90))
    for name in names:
        (service.root / name).touch()
    assert [each.name for each in client.list_folder()] == names


@needs(verbs.nic())
def test_own_folders_of_a_store_are_hidden(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service, service.connect(token="") as client:
        (service.root / "3fs-virt").mkdir()
        (service.root / "3fs-virt" / "file").touch()
        (service.root / "folder" / "3fs-virt").mkdir(parents=True)
        for path in ("", ".", "./", "./."):
            assert [each.name for each in client.list_folder(path)] == ["folder"]
        # Only in the root have these names a meaning.
        assert [each.name for each in client.list_folder("folder")] == ["3fs-virt"]
        for path in ("3fs-virt", "./3fs-virt", "3fs-virt/file", ".gdrkit", ".gdrkit/token"):
            assert refusal(client, ask.Stat(path)) == errno.ENOENT
            assert refusal(client, ask.Open(path)) == errno.ENOENT
            assert refusal(client, ask.List(path)) == errno.ENOENT
        for path in ("3fs-virt/file", ".gdrkit/token"):
            with (service.root / path).open("rb") as plain, pytest.raises(ApiError) as refused:
                client.request(ask.Adopt(), ask.OpenReply, descriptor=plain.fileno())
            assert refused.value.errno == errno.EXDEV


@needs(verbs.nic())
def test_modes_from_clients_are_masked_to_0777(service: Service, client: StorageClient) -> None:
    client.open("file", write=True, create=True, mode=0o6755).close()
    client.request(ask.Mkdir("folder", 0o7755), ask.FileStat)
    for name in ("file", "folder"):
        assert stat.S_IMODE((service.root / name).stat().st_mode) == 0o755
        assert stat.S_IMODE(client.request(ask.Chmod(name, 0o7711), ask.FileStat).mode) == 0o711
        assert stat.S_IMODE((service.root / name).stat().st_mode) == 0o711


@needs(verbs.nic())
def test_lone_surrogate_is_answered_with_an_error(service: Service, client: StorageClient) -> None:
    with pytest.raises(ApiError) as refused:
        service.connect(token="\ud800")  # noqa: S106 - not a password.
    assert refused.value.errno == errno.EACCES
    for request in (
        ask.Stat("\ud800"),
        ask.Open("a\udfff", write=True, create=True),
        ask.Symlink("link", "\ud800"),
        ask.Rename("\ud83d", "b"),
        ask.List("", "\udc00"),
    ):
        assert refusal(client, request) == errno.EINVAL
    # The session goes on, and a pair of surrogates is a character.
    client.open("\U0001f600", write=True, create=True).close()
    assert [each.name for each in client.list_folder()] == ["\U0001f600"]
    assert "Traceback" not in service.said()


@needs(verbs.nic())
def test_close_of_a_file_that_failed_can_be_repeated(service: Service) -> None:
    with service.connect(timeout_ms=500) as client:
        file = client.open("file", write=True, create=True)
        service.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises(ApiError) as refused:
                    file.close()
                assert refused.value.errno == errno.EREMOTEIO
        finally:
            service.process.send_signal(signal.SIGCONT)
    file.close()


def test_listening_leaves_the_umask_of_other_threads(tmp_path: Path) -> None:
    before, stopping = os.umask(0), threading.Event()
    modes: set[int] = set()

    def make() -> None:
        while not stopping.is_set():
            (tmp_path / "file").touch()
            modes.add(stat.S_IMODE((tmp_path / "file").stat().st_mode))
            (tmp_path / "file").unlink()

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for index in range(2000):
            place = ServerAddress(path=tmp_path / f"socket{index}")
            place.listen().close()
            assert place.path is not None
            assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
            place.path.unlink()
    finally:
        stopping.set()
        thread.join()
        os.umask(before)
    assert modes == {0o666}


@needs(verbs.nic())
def test_nothing_outside_of_the_store_is_reached(service: Service, client: StorageClient, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (service.root / "out").symlink_to(tmp_path)
    (service.root / "file").symlink_to(tmp_path / "secret")
    (service.root / "own").symlink_to(".gdrkit")
    for path in ("/etc/passwd", "../secret", "a/../../secret", "a/.."):
        assert refusal(client, ask.Open(path)) == errno.EXDEV
    for path in ("out/secret", "file", "own/token"):
        assert refusal(client, ask.Open(path)) == errno.ELOOP
    for path in (".gdrkit/token", ".gdrkit", "./.gdrkit/token", "3fs-virt/agent.sock", "//.gdrkit/token"):
        assert refusal(client, ask.Open(path)) in {errno.ENOENT, errno.EXDEV}
        assert refusal(client, ask.Stat(path)) in {errno.ENOENT, errno.EXDEV}
    assert refusal(client, ask.Rename("out", ".gdrkit/x")) == errno.ENOENT
    assert refusal(client, ask.Unlink("out/secret")) == errno.ELOOP
    assert refusal(client, ask.Chmod("file", 0o777)) == errno.ELOOP
    os.mkfifo(service.root / "fifo")
    assert refusal(client, ask.Open("fifo")) == errno.EINVAL
    assert refusal(client, ask.Open("fifo", write=True)) == errno.EINVAL
    assert [each.name for each in client.list_folder()] == ["fifo", "file", "out", "own"]


@needs(verbs.nic())
def test_what_a_file_was_not_opened_for_is_refused(client: StorageClient) -> None:
    with client.open("file", write=True, create=True), client.register(bytearray(8)) as buffer:
        with client.open("file") as reading, pytest.raises(ApiError) as refused:
            reading.write(buffer, offset_bytes=0)
        assert refused.value.errno == errno.EBADF
        with client.open("file", read=False, write=True) as writing, pytest.raises(ApiError) as refused:
            writing.read(buffer, offset_bytes=0)
        assert refused.value.errno == errno.EBADF
        with pytest.raises(ApiError) as refused:
            writing.write(buffer, offset_bytes=0)
        assert refused.value.errno == errno.EBADF


@needs(verbs.nic())
def test_without_the_token_nobody_comes_in(service: Service) -> None:
    for token in ("", "0" * 64, "é"):
        with pytest.raises(ApiError) as refused:
            service.connect(token=token)
        assert (refused.value.errno, refused.value.reason) == (errno.EACCES, Reason.NO_PERMISSION)
    for name in ("token", "store.json"):
        assert stat.S_IMODE((service.root / ".gdrkit" / name).stat().st_mode) == 0o600
    with service.connect() as client:
        assert client.list_folder() == ()


@needs(verbs.nic())
def test_a_unix_socket_is_private_and_takes_descriptors(tmp_path: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        place = ServerAddress.parse(service.address)
        assert place.path is not None
        assert stat.S_IMODE(place.path.stat().st_mode) == 0o600
        (service.root / "file").write_bytes(b"content")
        with service.connect(token="") as client:
            with (service.root / "file").open("rb") as plain:
                (service.root / "file").unlink()
                opened = client.request(ask.Adopt(), ask.OpenReply, descriptor=plain.fileno())
                assert opened.stat.size_bytes == 7
                with pytest.raises(ApiError) as refused:
                    client.request(ask.Adopt(write=True), ask.OpenReply, descriptor=plain.fileno())
                assert refused.value.errno == errno.EACCES
            with (service.root / "second").open("wb") as plain, pytest.raises(ApiError) as refused:
                client.request(ask.Adopt(read=True), ask.OpenReply, descriptor=plain.fileno())
            assert refused.value.errno == errno.EACCES
            with (tmp_path / "log").open("rb") as other, pytest.raises(ApiError) as refused:
                client.request(ask.Adopt(), ask.OpenReply, descriptor=other.fileno())
            assert refused.value.errno == errno.EXDEV
    assert not place.path.exists()


@needs(verbs.nic())
def test_one_server_a_store(service: Service) -> None:
    with pytest.raises(BlockingIOError):
        FileStore(service.root)


@needs(verbs.nic())
def test_whoever_does_not_speak_the_protocol_is_sent_away(service: Service) -> None:
    place = ServerAddress.parse(service.address)
    for sent in (b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b"\0" * 32, os.urandom(4096)):
        with place.connect(10) as raw:
            raw.sendall(sent)
            # A reset: what the server had not read was thrown away with the connection.
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(1) == b""
    connection = ControlConnection(place.connect(10))
    try:
        connection.send(FrameType.CONTROL_REQUEST, pack_request(ask.Attach("0" * 64)), sequence=7)
        received = connection.receive(FrameType.CONTROL_REPLY)
        assert received is not None
        answer = parse_reply(received[0], ask.Done)
        assert isinstance(answer, ask.ErrorReply)
        assert (answer.errno, received[1]) == (errno.ESTALE, 7)
        with contextlib.suppress(ConnectionResetError):
            assert connection.receive(FrameType.CONTROL_REPLY) is None
    finally:
        connection.close()
    with service.connect() as client:
        assert client.list_folder() == ()


@needs(verbs.nic())
def test_a_session_leaves_nothing_behind(service: Service) -> None:
    use(service)  # What the server's libraries open once and keep is open then.
    before = at_rest(service)
    for _ in range(3):
        use(service)
    assert at_rest(service) == before


def use(service: Service) -> None:
    """A session by all NICs with a file that it leaves open."""
    with service.connect() as client, client.register(bytearray(100)) as buffer:
        file = client.open("file", write=True, create=True)
        for _ in client.nics:
            file.write(buffer, offset_bytes=0)


def at_rest(service: Service) -> Counter[str]:
    """What the server has open, by kind, once that has stayed the same for a while: nobody says when it is done."""
    found, same = kinds_open(service), 0
    while same < 5:
        with contextlib.suppress(subprocess.TimeoutExpired):
            service.process.wait(0.05)
        now = kinds_open(service)
        found, same = now, same + 1 if now == found else 0
    return found


def kinds_open(service: Service) -> Counter[str]:
    return Counter(each.partition(":")[0] for each in service.descriptors())
