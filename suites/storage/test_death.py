"""Whoever dies or misbehaves, the other side gets an error in time, and the server serves on."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import needs, verbs
from gdrkit.storage import messages as ask
from gdrkit.storage.connection import ControlConnection, Place
from gdrkit.storage.control import pack_request, parse_reply
from gdrkit.storage.store import read_token
from gdrkit.storage.transfers import Transfers
from gdrkit.storage.wire import FrameType, Opcode, Operation, OperationFlag, pack_operations
from gdrkit.units import MIB

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from support.storage import Service

    from gdrkit.storage.client import StorageClient
    from gdrkit.verbs import Nic

__all__ = ["session"]


class Session:
    """A session whose data connection says whatever a case wants."""

    def __init__(self, service: Service, nic: Nic, *, replaces: str | None = None) -> None:
        place = Place.parse(service.place)
        self.queue = nic.completion_queue(depth=1)
        self.pair = nic.queue_pair(self.queue)
        self.control = ControlConnection(place.connect(10))
        lanes = (self.pair.endpoint().to_dict(),)
        hello = ask.Hello(ask.PROTOCOL_VERSION, "a case", lanes, read_token(service.root), replaces)
        answer = self.ask(self.control, hello, ask.HelloReply)
        assert isinstance(answer, ask.HelloReply)
        from gdrkit.verbs import Endpoint

        self.pair.connect(Endpoint.from_dict(answer.lanes[0]), reads_max=answer.limits.reads_max)
        data = ControlConnection(place.connect(10))
        self.ask(data, ask.Attach(answer.session), ask.Done)
        self.data: socket.socket = data.take()
        self.data.settimeout(10)
        self.limits, self.secret = answer.limits, answer.session

    @staticmethod
    def ask(connection: ControlConnection, request: object, kind: type[object]) -> object:
        connection.send(FrameType.CONTROL_REQUEST, pack_request(request), sequence=1)  # type: ignore[arg-type]
        received = connection.receive(FrameType.CONTROL_REPLY)
        assert received is not None
        return parse_reply(received[0], kind)

    def close(self) -> None:
        self.data.close()
        self.control.close()
        self.pair.close()
        self.queue.close()


@pytest.fixture
def session(service: Service, nic: Nic) -> Iterator[Session]:
    """A session that a case speaks for."""
    made = Session(service, nic)
    yield made
    made.close()


@needs(verbs.nic())
def test_a_server_that_was_killed_is_an_error_and_no_hang(service: Service) -> None:
    with service.connect() as client, client.register(bytearray(MIB)) as buffer:
        file = client.open("file", write=True, create=True)
        file.write(buffer, offset_bytes=0)
        service.kill()
        for _ in range(2):
            with pytest.raises(ApiError) as refused:
                file.read(buffer, offset_bytes=0)
            assert (refused.value.errno, refused.value.reason) == (errno.EREMOTEIO, Reason.PEER_GONE)
            with pytest.raises(ApiError) as refused:
                client.stat("file")
            assert refused.value.errno == errno.EREMOTEIO
    with pytest.raises(ApiError) as refused:
        service.connect()
    assert refused.value.errno == errno.EREMOTEIO
    assert service.root.joinpath("file").stat().st_size == MIB


@needs(verbs.nic())
def test_a_server_that_hangs_reaches_nothing_after_it_was_given_up(service: Service) -> None:
    (service.root / "file").write_bytes(os.urandom(MIB))
    with service.connect(timeout_ms=1000) as client, client.register(bytearray(MIB)) as buffer:
        file = client.open("file")
        service.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(ApiError) as refused:
                file.read(buffer, offset_bytes=0)
            assert refused.value.errno == errno.ETIMEDOUT
            buffer.data()[:] = b"\xee" * MIB
        finally:
            service.process.send_signal(signal.SIGCONT)
        with service.connect() as other:
            while any(each.endswith("/store/file") for each in service.descriptors()):
                other.stat("file")
        assert buffer.data() == b"\xee" * MIB


@needs(verbs.nic())
def test_a_session_that_was_given_up_has_ended_before_its_successor_begins(
    service: Service, session: Session, nic: Nic
) -> None:
    (service.root / "file").write_bytes(bytes(MIB))
    opened = session.ask(session.control, ask.Open("file", write=True), ask.OpenReply)
    assert isinstance(opened, ask.OpenReply)
    with contextlib.closing(Session(service, nic, replaces=session.secret)):
        readable, _, _ = select.select([session.data], [], [], 0)
        assert readable, "its successor was let in while its operations could still happen"
        assert session.data.recv(1) == b""
    # A secret that nobody has is that of a session that has ended long ago.
    Session(service, nic, replaces="0" * 64).close()


@needs(verbs.nic())
def test_a_key_that_was_taken_back_ends_the_session_and_no_other(service: Service, nic: Nic) -> None:
    (service.root / "file").write_bytes(os.urandom(MIB))
    with service.connect(nic) as other, service.connect(nic) as client:
        file = client.open("file")
        with client.register(bytearray(MIB)) as buffer:
            stale = buffer.remote(nic)
        operation = Operation(0, file.handle, 0, MIB, stale.address, stale.rkey, 0, Opcode.READ)
        transfers: Transfers = client._transfers  # noqa: SLF001 - a client never sends a stale key by itself.
        for _ in range(2):
            with pytest.raises(ApiError) as refused:
                transfers.run([operation] * 3, timeout_s=20)
            assert refused.value.errno == errno.EREMOTEIO
        with other.open("file") as mine, other.register(bytearray(MIB)) as buffer:
            assert mine.read(buffer, offset_bytes=0).length_bytes == MIB
        assert other.statistics()["rdma_errors"] == 1


@needs(verbs.nic())
def test_operations_that_cannot_be_are_answered_one_by_one(service: Service, session: Session) -> None:
    (service.root / "file").write_bytes(bytes(MIB))
    opened = session.ask(session.control, ask.Open("file", write=True), ask.OpenReply)
    assert isinstance(opened, ask.OpenReply)
    most, handle = (1 << 64) - 1, opened.handle
    expected = {
        Operation(1, handle + 1, 0, 1, 0, 0, 0, Opcode.READ): errno.EBADF,
        Operation(2, handle, 0, 1, 0, 0, 1, Opcode.READ): errno.EINVAL,
        Operation(3, handle, 0, 1, 0, 0, 65535, Opcode.WRITE): errno.EINVAL,
        Operation(4, handle, most, 1, 0, 0, 0, Opcode.READ): errno.EINVAL,
        Operation(5, handle, (1 << 63) - 1, 2, 0, 0, 0, Opcode.WRITE): errno.EFBIG,
        Operation(6, handle, 0, most, 0, 0, 0, Opcode.READ): errno.EINVAL,
        Operation(7, handle, 0, 2, most, 0, 0, Opcode.READ): errno.EINVAL,
        Operation(8, handle, 0, MIB, 0, 0, 0, Opcode.WRITE, OperationFlag.CHECKSUM_GIVEN): errno.EMSGSIZE,
        Operation(9, handle, 0, 0, 0, 0, 0, Opcode.READ): 0,
        Operation(10, handle, MIB, 1, 0, 0, 0, Opcode.READ): 0,
        # The last offset of a file is that of loff_t, 2^63 - 1.
        Operation(11, handle, 1 << 63, 0, 0, 0, 0, Opcode.READ): errno.EINVAL,
        Operation(12, handle, 1 << 63, 1, 0, 0, 0, Opcode.WRITE): errno.EINVAL,
        Operation(13, handle, (1 << 63) - 1, 1, 0, 0, 0, Opcode.READ): errno.EINVAL,
        Operation(14, handle, (1 << 63) - 1, 1, 0, 0, 0, Opcode.WRITE): errno.EFBIG,
        Operation(15, handle, (1 << 63) - 1, 0, 0, 0, 0, Opcode.READ): 0,
    }
    transfers = Transfers(session.data, outstanding_max=100)
    results = transfers.run(list(expected), timeout_s=20)
    assert [-each.result for each in results] == list(expected.values())


@needs(verbs.nic())
def test_a_write_with_another_checksum_changes_nothing(service: Service, client: StorageClient) -> None:
    with client.open("file", write=True, create=True) as file, client.register(bytearray(b"x" * 9000)) as buffer:
        file.write(buffer, offset_bytes=0)
        remote = buffer.remote(client.nics[0])
        buffer.data()[:] = b"y" * 9000
        flags = OperationFlag.CHECKSUM_GIVEN
        operation = Operation(0, file.handle, 0, 9000, remote.address, remote.rkey, 0, Opcode.WRITE, flags, 12345)
        (result,) = client._transfers.run([operation], timeout_s=20)  # noqa: SLF001 - a client gives the right one.
        assert result.result == -errno.EBADMSG
        assert (service.root / "file").read_bytes() == b"x" * 9000


@needs(verbs.nic())
@pytest.mark.parametrize("how", ["garbage", "truncated", "changed", "control"])
def test_a_frame_that_is_none_ends_the_session(service: Service, session: Session, how: str, seed: int) -> None:
    right = pack_operations([Operation(1, 1, 0, 4096, 0, 0, 0, Opcode.READ)] * 4, sequence=1)
    changed = bytearray(right)
    changed[random.Random(seed).randrange(len(right))] ^= 0x10
    control = ControlConnection(session.data.dup())
    if how == "control":
        control.send(FrameType.CONTROL_REQUEST, pack_request(ask.Statfs()), sequence=1)
    else:
        session.data.sendall({"garbage": os.urandom(999), "truncated": right[:-1], "changed": bytes(changed)}[how])
    control.close()
    if how == "truncated":
        session.data.shutdown(1)
    # A reset: what the server had not read was thrown away with the connection.
    with contextlib.suppress(ConnectionResetError):
        assert session.data.recv(1) == b""
    # The control connection ends with it.
    assert session.control.receive(FrameType.CONTROL_REPLY) is None
    with service.connect() as client:
        assert client.statistics()["refused_frames"] == (0 if how == "truncated" else 1)


@needs(verbs.nic())
def test_a_full_disk_is_said_and_nothing_is_half_acknowledged(service: Service, client: StorageClient) -> None:
    import resource

    with client.open("file", write=True, create=True) as file, client.register(bytearray(b"x" * MIB)) as buffer:
        file.write(buffer, offset_bytes=0)
        limit = 2 * MIB + 1000
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(ApiError) as refused:
            file.write(buffer, offset_bytes=2 * MIB)
        assert refused.value.errno == errno.EFBIG
        # What is there can still be read, and is what it should be.
        assert file.read(buffer, offset_bytes=0).length_bytes == MIB
        assert client.statistics()["corruptions"] == 0
