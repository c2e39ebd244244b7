"""If a server or a client dies, hangs or sends invalid bytes, its peer gets an error before the timeout."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages
from gdrkit.storage.address import ServerAddress
from gdrkit.storage.connection import ControlConnection
from gdrkit.storage.control import pack_request, parse_reply
from gdrkit.storage.session import StorageSession
from gdrkit.storage.transfers import Transfers
from gdrkit.storage.wire import FrameType, IoOpcode, Operation, OperationFlag, pack_operations
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.storage import StorageServer

    from gdrkit.storage.client import StorageClient
    from gdrkit.storage.file import StorageFile
    from gdrkit.verbs import Nic, RemoteRange

__all__ = ["session"]


def begin_session(server: StorageServer, nic: Nic, *, replaces: str | None = None) -> StorageSession:
    """Begin a session whose data connection the case itself uses."""
    address = ServerAddress.parse(server.address)
    session = StorageSession(
        lambda: address.connect(10),
        [nic],
        client="a case",
        token=server.token(),
        timeout_ms=10_000,
        replaces=replaces,
    )
    session.data_socket.settimeout(10)
    return session


def make_operation(
    file: StorageFile,
    memory_range: RemoteRange,
    opcode: IoOpcode,
    *,
    length_bytes: int = MIB,
    checksum: int | None = None,
) -> Operation:
    """Return an operation that moves the first bytes of a file to or from a range of client memory.

    If `checksum` is set, the client states that the bytes of a write have this checksum.
    """
    return Operation(
        tag=0,
        handle=file.handle,
        file_offset=0,
        length=length_bytes,
        remote_address=memory_range.address,
        rkey=memory_range.rkey,
        queue_pair=0,
        opcode=opcode,
        flags=OperationFlag(0) if checksum is None else OperationFlag.CHECKSUM_GIVEN,
        checksum=checksum or 0,
    )


@pytest.fixture
def session(server: StorageServer, nic: Nic) -> Iterator[StorageSession]:
    """Yield a session of :func:`begin_session`."""
    with begin_session(server, nic) as session:
        yield session


@needs(verbs.nic())
def test_call_after_server_was_killed_fails_with_eremoteio(server: StorageServer) -> None:
    with server.connect() as client, client.register(bytearray(MIB)) as buffer:
        file = client.open("file", write=True, create=True)
        file.write(buffer, offset_bytes=0)
        server.kill()
        for _ in range(2):
            with pytest.raises(ApiError) as error_info:
                file.read(buffer, offset_bytes=0)
            assert (error_info.value.errno, error_info.value.reason) == (errno.EREMOTEIO, Reason.PEER_GONE)
            with pytest.raises(ApiError) as error_info:
                client.stat("file")
            assert error_info.value.errno == errno.EREMOTEIO
    with pytest.raises(ApiError) as error_info:
        server.connect()
    assert error_info.value.errno == errno.EREMOTEIO
    assert server.root.joinpath("file").stat().st_size == MIB


@needs(verbs.nic())
def test_hanging_server_cannot_write_after_the_timeout(server: StorageServer) -> None:
    (server.root / "file").write_bytes(os.urandom(MIB))
    with server.connect(timeout_ms=1000) as client, client.register(bytearray(MIB)) as buffer:
        file = client.open("file")
        with server.suspend():
            with pytest.raises(ApiError) as error_info:
                file.read(buffer, offset_bytes=0)
            assert error_info.value.errno == errno.ETIMEDOUT
            buffer.data()[:] = b"\xee" * MIB
        # After the server has ended the session, it closes the file.
        with server.connect() as other_client:
            while any(path.endswith("/store/file") for path in server.list_open_files()):
                other_client.stat("file")
        assert buffer.data() == b"\xee" * MIB


@needs(verbs.nic())
def test_replaced_session_ends_before_the_new_one_begins(
    server: StorageServer, session: StorageSession, nic: Nic
) -> None:
    (server.root / "file").write_bytes(bytes(MIB))
    session.request(messages.Open("file", write=True), messages.OpenReply)
    with begin_session(server, nic, replaces=session.secret):
        readable, _, _ = select.select([session.data_socket], [], [], 0)
        assert readable, "the new session began before the data connection of the replaced session ended"
        assert session.data_socket.recv(1) == b""
    # An unknown secret is not an error: its session may have ended long ago.
    begin_session(server, nic, replaces="0" * 64).close()


@needs(verbs.nic())
def test_second_data_connection_of_a_session_is_refused(server: StorageServer, session: StorageSession) -> None:
    connection = ControlConnection(ServerAddress.parse(server.address).connect(10))
    try:
        connection.send(FrameType.CONTROL_REQUEST, pack_request(messages.Attach(session.secret)), sequence=1)
        reply_frame = connection.receive(FrameType.CONTROL_REPLY)
        assert reply_frame is not None
        reply = parse_reply(reply_frame[0], messages.Done)
        assert isinstance(reply, messages.ErrorReply)
        assert reply.errno == errno.ESTALE
    finally:
        connection.close()
    # The session and its first data connection continue.
    assert session.request(messages.Stat(""), messages.FileStat).links >= 1
    assert select.select([session.data_socket], [], [], 0)[0] == []


@needs(verbs.nic())
@pytest.mark.parametrize("may_write", [False, True])
def test_write_needs_a_handle_that_is_open_for_writing(server: StorageServer, nic: Nic, may_write: bool) -> None:  # noqa: FBT001
    content = os.urandom(MIB)
    (server.root / "file").write_bytes(content)
    with server.connect(nic) as client, client.register(bytearray(MIB)) as buffer:
        file = client.open("file", write=may_write)
        operation = make_operation(file, buffer.remote(nic), IoOpcode.WRITE)
        (result,) = client._transfers.run([operation], timeout_s=20)  # noqa: SLF001 - the client itself refuses this.
        assert result.result == (MIB if may_write else -errno.EBADF)
    assert (server.root / "file").read_bytes() == (bytes(MIB) if may_write else content)


@needs(verbs.nic())
def test_write_by_a_read_only_handle_reads_no_client_memory(server: StorageServer, nic: Nic) -> None:
    (server.root / "file").write_bytes(bytes(MIB))
    with server.connect(nic) as client:
        file = client.open("file")
        with client.register(bytearray(MIB)) as buffer:
            stale_range = buffer.remote(nic)
        # An RDMA READ of this range would fail and end the session.
        operation = make_operation(file, stale_range, IoOpcode.WRITE)
        (result,) = client._transfers.run([operation], timeout_s=20)  # noqa: SLF001 - the client itself refuses this.
        assert result.result == -errno.EBADF
        assert client.statistics()["rdma_errors"] == 0


@needs(verbs.nic())
def test_stale_rkey_ends_only_the_session_that_used_it(server: StorageServer, nic: Nic) -> None:
    (server.root / "file").write_bytes(os.urandom(MIB))
    with server.connect(nic) as other_client, server.connect(nic) as client:
        file = client.open("file")
        with client.register(bytearray(MIB)) as buffer:
            stale_range = buffer.remote(nic)
        operation = make_operation(file, stale_range, IoOpcode.READ)
        transfers: Transfers = client._transfers  # noqa: SLF001 - the client itself never sends a stale key.
        for _ in range(2):
            with pytest.raises(ApiError) as error_info:
                transfers.run([operation] * 3, timeout_s=20)
            assert error_info.value.errno == errno.EREMOTEIO
        with other_client.open("file") as other_file, other_client.register(bytearray(MIB)) as buffer:
            assert other_file.read(buffer, offset_bytes=0).length_bytes == MIB
        assert other_client.statistics()["rdma_errors"] == 1


@needs(verbs.nic())
def test_each_invalid_operation_gets_its_own_errno(server: StorageServer, session: StorageSession) -> None:
    (server.root / "file").write_bytes(bytes(MIB))
    open_reply = session.request(messages.Open("file", write=True), messages.OpenReply)
    u64_max, handle = (1 << 64) - 1, open_reply.handle
    # The arguments are tag, handle, file offset, length, remote address, rkey, index of the queue pair, and opcode.
    errno_by_operation = {
        Operation(1, handle + 1, 0, 1, 0, 0, 0, IoOpcode.READ): errno.EBADF,  # The handle is unknown.
        Operation(2, handle, 0, 1, 0, 0, 1, IoOpcode.READ): errno.EINVAL,  # The session has only queue pair 0.
        Operation(3, handle, 0, 1, 0, 0, 65535, IoOpcode.WRITE): errno.EINVAL,
        Operation(4, handle, u64_max, 1, 0, 0, 0, IoOpcode.READ): errno.EINVAL,
        Operation(5, handle, (1 << 63) - 1, 2, 0, 0, 0, IoOpcode.WRITE): errno.EFBIG,  # The range ends above 2^63 - 1.
        Operation(6, handle, 0, u64_max, 0, 0, 0, IoOpcode.READ): errno.EINVAL,
        Operation(7, handle, 0, 2, u64_max, 0, 0, IoOpcode.READ): errno.EINVAL,  # The memory range ends above 2^64.
        # A write with a given checksum has at most `checksum_given_bytes_max` bytes, which is less than 1 MiB.
        Operation(8, handle, 0, MIB, 0, 0, 0, IoOpcode.WRITE, OperationFlag.CHECKSUM_GIVEN): errno.EMSGSIZE,
        Operation(9, handle, 0, 0, 0, 0, 0, IoOpcode.READ): 0,
        Operation(10, handle, MIB, 1, 0, 0, 0, IoOpcode.READ): 0,  # The range begins at the end of the file.
        # The largest offset in a file is the largest loff_t, 2^63 - 1.
        Operation(11, handle, 1 << 63, 0, 0, 0, 0, IoOpcode.READ): errno.EINVAL,
        Operation(12, handle, 1 << 63, 1, 0, 0, 0, IoOpcode.WRITE): errno.EINVAL,
        Operation(13, handle, (1 << 63) - 1, 1, 0, 0, 0, IoOpcode.READ): errno.EINVAL,
        Operation(14, handle, (1 << 63) - 1, 1, 0, 0, 0, IoOpcode.WRITE): errno.EFBIG,
        Operation(15, handle, (1 << 63) - 1, 0, 0, 0, 0, IoOpcode.READ): 0,
    }
    transfers = Transfers(session.data_socket, outstanding_max=100)
    results = transfers.run(list(errno_by_operation), timeout_s=20)
    assert [-result.result for result in results] == list(errno_by_operation.values())


@needs(verbs.nic())
def test_write_with_wrong_checksum_changes_nothing(server: StorageServer, client: StorageClient) -> None:
    with client.open("file", write=True, create=True) as file, client.register(bytearray(b"x" * 9000)) as buffer:
        file.write(buffer, offset_bytes=0)
        buffer.data()[:] = b"y" * 9000
        operation = make_operation(
            file,
            buffer.remote(client.nics[0]),
            IoOpcode.WRITE,
            length_bytes=9000,
            checksum=12345,
        )
        (result,) = client._transfers.run([operation], timeout_s=20)  # noqa: SLF001 - the client itself sends the correct checksum.
        assert result.result == -errno.EBADMSG
        assert (server.root / "file").read_bytes() == b"x" * 9000


@needs(verbs.nic())
@pytest.mark.parametrize("fault", ["garbage", "truncated", "changed", "control"])
def test_invalid_frame_ends_the_session(server: StorageServer, session: StorageSession, fault: str, seed: int) -> None:
    valid_frame = pack_operations([Operation(1, 1, 0, 4096, 0, 0, 0, IoOpcode.READ)] * 4, sequence=1)
    changed_frame = bytearray(valid_frame)
    changed_frame[random.Random(seed).randrange(len(valid_frame))] ^= 0x10
    # The fault "control" is a frame of the control connection on the data connection.
    data_connection = ControlConnection(session.data_socket.dup())
    if fault == "control":
        data_connection.send(FrameType.CONTROL_REQUEST, pack_request(messages.Statfs()), sequence=1)
    else:
        session.data_socket.sendall(
            {"garbage": os.urandom(999), "truncated": valid_frame[:-1], "changed": bytes(changed_frame)}[fault]
        )
    data_connection.close()
    if fault == "truncated":
        session.data_socket.shutdown(socket.SHUT_WR)
    # If the server closes the connection before reading all bytes, the kernel resets the connection.
    with contextlib.suppress(ConnectionResetError):
        assert session.data_socket.recv(1) == b""
    # The server closes the control connection after the data connection.
    readable, _, _ = select.select([session._control], [], [], 20)  # noqa: SLF001 - the session has no event for its end.
    assert readable
    with pytest.raises(ApiError) as error_info:
        session.request(messages.Statfs(), messages.StatfsReply)
    assert error_info.value.errno == errno.EREMOTEIO
    with server.connect() as client:
        assert client.statistics()["refused_frames"] == (0 if fault == "truncated" else 1)


@needs(verbs.nic())
def test_write_beyond_the_file_size_limit_fails_as_a_whole(server: StorageServer, client: StorageClient) -> None:
    import resource

    with client.open("file", write=True, create=True) as file, client.register(bytearray(b"x" * MIB)) as buffer:
        file.write(buffer, offset_bytes=0)
        limit_bytes = 2 * MIB + 1000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        with pytest.raises(ApiError) as error_info:
            file.write(buffer, offset_bytes=2 * MIB)
        assert error_info.value.errno == errno.EFBIG
        # The bytes of the earlier write can still be read, and their checksums match.
        assert file.read(buffer, offset_bytes=0).length_bytes == MIB
        assert client.statistics()["corruptions"] == 0
