"""Requests of a session: their results, and the errno of refused requests."""

from __future__ import annotations

import errno
import resource
from typing import TYPE_CHECKING

import pytest
from support.failing_calls import STRACE, fail_next_call
from support.processes import limit_open_files
from support.storage import run_storage_server

import gdrkit
from gdrkit.errors import ApiError
from gdrkit.harness.needs import host, needs, verbs
from gdrkit.storage import messages
from gdrkit.storage._native import engine
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request, parse_reply
from gdrkit.storage.requests import RequestHandler
from gdrkit.storage.store import FileStore
from gdrkit.storage.wire import FrameType
from gdrkit.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from support.storage import StorageServer

    from gdrkit.storage.client import StorageClient
    from gdrkit.storage.control import Request
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


def get_refused_errno(client: StorageClient, request: Request) -> int | None:
    """Return the errno with which the server refuses a request."""
    with pytest.raises(ApiError) as error_info:
        client.request(request, messages.Done)
    return error_info.value.errno


def get_error_of_first_request(server: StorageServer, request: Request) -> messages.ErrorReply:
    """Send a request as the first request of a new connection, and return the error in the reply."""
    connection = ControlConnection(ServerAddress.parse(server.address).connect(10))
    try:
        connection.send(FrameType.CONTROL_REQUEST, pack_request(request), sequence=3)
        reply_frame = connection.receive(FrameType.CONTROL_REPLY)
        assert reply_frame is not None
        payload, sequence = reply_frame
        reply = parse_reply(payload, messages.Done)
        assert isinstance(reply, messages.ErrorReply)
        assert sequence == 3
        return reply
    finally:
        connection.close()


def test_client_knows_the_limits_of_the_server(client: StorageClient) -> None:
    limits = client.limits
    assert (limits.outstanding_max, limits.length_bytes_max, limits.handles_max) == (1024, GIB, 4096)
    assert 0 < limits.checksum_given_bytes_max < GIB
    assert limits.reads_max >= 1
    assert client.chunk_bytes == 4096
    assert client.server_program == f"gdrkit {gdrkit.__version__}"


def test_first_request_must_begin_a_session(server: StorageServer) -> None:
    reply = get_error_of_first_request(server, messages.Statfs())
    assert (reply.errno, reply.message) == (errno.EPROTO, "the first request must be hello or attach")


def test_hello_of_another_version_is_refused(server: StorageServer) -> None:
    for version in (0, 2):
        reply = get_error_of_first_request(
            server, messages.StorageHello(version, "a", ({"qp_number": 1},), token=server.token())
        )
        assert reply.errno == errno.EPROTONOSUPPORT
        assert f"not {version}" in reply.message


def test_hello_with_an_invalid_name_is_einval(server: StorageServer) -> None:
    # In a text from a client, U+DC80 to U+DCFF stand for bytes that are not UTF-8, as in os.fsdecode(). U+D800 stands
    # for no byte, so the server refuses it.
    reply = get_error_of_first_request(
        server, messages.StorageHello(1, "\ud800", ({"qp_number": 1},), token=server.token())
    )
    assert reply.errno == errno.EINVAL
    assert "client" in reply.message
    # The server logs its own text about the cause, and no text that an unknown client has sent.
    server.process.terminate()
    assert server.process.wait(20) == 0
    assert "because the request has an invalid file name" in server.read_log()


def test_hello_and_attach_inside_a_session_are_refused(client: StorageClient) -> None:
    assert get_refused_errno(client, messages.Attach("0" * 64)) == errno.EPROTO
    assert get_refused_errno(client, messages.StorageHello(1, "a", ({"qp_number": 1},))) == errno.EPROTO
    assert client.list_folder() == ()


def test_ended_session_refuses_requests(tmp_path: Path, nic: Nic) -> None:
    # If a session is replaced just after its thread has received a request, the request must not be executed.
    with (
        FileStore(tmp_path) as store,
        nic.completion_queue(depth=1) as completion_queue,
        nic.queue_pair(completion_queue, sends_max=1, receives_max=1) as queue_pair,
    ):
        endpoints, fabric = [queue_pair.endpoint().to_dict()], engine.Fabric([nic.name])
        native_session = engine.Session(store.native, fabric, endpoints, outstanding_max=1, length_bytes_max=4096)
        handler = RequestHandler(store, native_session, handles_max=1)
        try:
            handler.execute(messages.Mkdir("early", 0o700), [])
            handler.end()
            with pytest.raises(OSError, match="another session has replaced this one") as error_info:
                handler.execute(messages.Mkdir("late", 0o700), [])
        finally:
            handler.close()
    assert error_info.value.errno == errno.ESTALE
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gdrkit", "early"]


def test_open_needs_an_access_and_truncate_needs_write(server: StorageServer, client: StorageClient) -> None:
    (server.root / "file").write_bytes(b"content")
    assert get_refused_errno(client, messages.Open("file", read=False, write=False)) == errno.EINVAL
    assert get_refused_errno(client, messages.Open("file", truncate=True)) == errno.EINVAL
    assert (server.root / "file").read_bytes() == b"content"


def test_open_flags_are_those_of_the_request(server: StorageServer, client: StorageClient) -> None:
    assert get_refused_errno(client, messages.Open("file", write=True)) == errno.ENOENT
    # Without `create`, `exclusive` has no effect, so an existing file is not an error.
    assert get_refused_errno(client, messages.Open("file", write=True, exclusive=True)) == errno.ENOENT
    client.request(messages.Open("file", write=True, create=True), messages.OpenReply)
    client.request(messages.Open("file", write=True, exclusive=True), messages.OpenReply)
    assert get_refused_errno(client, messages.Open("file", write=True, create=True, exclusive=True)) == errno.EEXIST
    (server.root / "file").write_bytes(b"content")
    open_reply = client.request(messages.Open("file", write=True), messages.OpenReply)
    assert open_reply.stat.size_bytes == 7
    open_reply = client.request(messages.Open("file", write=True, truncate=True), messages.OpenReply)
    assert open_reply.stat.size_bytes == 0


def test_handles_are_counted_and_not_used_again(client: StorageClient) -> None:
    client.open("file", write=True, create=True).close()
    handles = [client.request(messages.Open("file"), messages.OpenReply).handle for _ in range(2)]
    client.request(messages.Close(handles[0]), messages.Done)
    handles.append(client.request(messages.Open("file"), messages.OpenReply).handle)
    # Handle 1 belonged to the first file.
    assert handles == [2, 3, 4]


def test_handle_that_is_not_open_is_ebadf(client: StorageClient) -> None:
    client.open("file", write=True, create=True).close()
    for handle in (0, 1, 2):
        for request in (
            messages.Close(handle),
            messages.Stat(handle=handle),
            messages.Truncate(1, handle=handle),
            messages.Sync(handle),
            messages.PunchHole(handle, ((0, 1),)),
        ):
            assert get_refused_errno(client, request) == errno.EBADF


def test_handle_for_reading_changes_nothing(server: StorageServer, client: StorageClient) -> None:
    (server.root / "file").write_bytes(b"content")
    handle = client.request(messages.Open("file"), messages.OpenReply).handle
    assert get_refused_errno(client, messages.Truncate(1, handle=handle)) == errno.EBADF
    assert get_refused_errno(client, messages.PunchHole(handle, ((0, 4),))) == errno.EBADF
    client.request(messages.Sync(handle), messages.Done)
    assert (server.root / "file").read_bytes() == b"content"


def test_stat_and_truncate_work_by_path_and_by_handle(server: StorageServer, client: StorageClient) -> None:
    (server.root / "file").write_bytes(b"content")
    handle = client.request(messages.Open("file", write=True), messages.OpenReply).handle
    status_by_handle = client.request(messages.Stat(handle=handle), messages.FileStat)
    assert status_by_handle == client.request(messages.Stat("file"), messages.FileStat)
    assert (status_by_handle.size_bytes, status_by_handle.inode) == (7, (server.root / "file").stat().st_ino)
    assert client.request(messages.Truncate(3, handle=handle), messages.FileStat).size_bytes == 3
    assert client.request(messages.Truncate(5, path="file"), messages.FileStat).size_bytes == 5
    assert (server.root / "file").read_bytes() == b"con\0\0"
    # An empty path is the root of the store.
    assert client.request(messages.Stat(""), messages.FileStat).inode == server.root.stat().st_ino
    assert get_refused_errno(client, messages.Truncate(0, path="")) == errno.EISDIR


def test_punched_ranges_read_as_zeros(server: StorageServer, client: StorageClient) -> None:
    (server.root / "file").write_bytes(b"x" * 16384)
    handle = client.request(messages.Open("file", write=True), messages.OpenReply).handle
    client.request(messages.PunchHole(handle, ((1, 3), (4096, 8192), (16000, 20000))), messages.Done)
    expected_data = bytearray(b"x" * 16384)
    for begin, end in ((1, 3), (4096, 8192), (16000, 16384)):
        expected_data[begin:end] = bytes(end - begin)
    assert (server.root / "file").read_bytes() == expected_data


def test_server_raises_its_limit_of_open_files(tmp_path: Path) -> None:
    _soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with limit_open_files(512), run_storage_server(tmp_path / "store", tmp_path / "log") as server:
        # The server raises its soft limit to its hard limit, but at most to 1,048,576.
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (min(hard_limit, 1 << 20), hard_limit)


# The server needs a descriptor for each of the 4096 open files, and further descriptors.
@needs(host.open_files(5000))
def test_session_has_at_most_4096_open_files(server: StorageServer, client: StorageClient) -> None:
    (server.root / "file").touch()
    handles = [client.request(messages.Open("file"), messages.OpenReply).handle for _ in range(4096)]
    with pytest.raises(ApiError, match="a session has at most 4096 open files") as error_info:
        client.request(messages.Open("file"), messages.OpenReply)
    assert error_info.value.errno == errno.EMFILE
    client.request(messages.Close(handles[0]), messages.Done)
    client.request(messages.Open("file"), messages.OpenReply)


@needs(STRACE)
@pytest.mark.parametrize(("data_only", "call_name"), [(False, "fsync"), (True, "fdatasync")])
def test_sync_reports_the_error_of_its_call(
    server: StorageServer, client: StorageClient, call_name: str, *, data_only: bool
) -> None:
    handle = client.request(messages.Open("file", write=True, create=True), messages.OpenReply).handle
    with fail_next_call(server.process.pid, call_name, "EIO"):
        assert get_refused_errno(client, messages.Sync(handle, data_only=data_only)) == errno.EIO
    client.request(messages.Sync(handle, data_only=data_only), messages.Done)


@pytest.mark.parametrize("data_only", [False, True])
def test_sync_of_a_handle_succeeds(client: StorageClient, *, data_only: bool) -> None:
    handle = client.request(messages.Open("file", write=True, create=True), messages.OpenReply).handle
    client.request(messages.Sync(handle, data_only=data_only), messages.Done)


def test_adopt_over_tcp_is_ebadf(server: StorageServer, client: StorageClient) -> None:
    # The request Adopt needs exactly one descriptor, and TCP cannot transport descriptors.
    assert get_refused_errno(client, messages.Adopt()) == errno.EBADF
    assert client.list_folder() == ()
    assert [entry.name for entry in server.root.iterdir()] == [".gdrkit"]


def test_error_reply_names_the_cause(client: StorageClient) -> None:
    with pytest.raises(ApiError, match="No such file or directory") as error_info:
        client.request(messages.Stat("missing"), messages.FileStat)
    assert (error_info.value.errno, error_info.value.operation) == (errno.ENOENT, "stat")
