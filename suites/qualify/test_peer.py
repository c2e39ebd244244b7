"""Tests of peers (processes that execute operations for a case), and of the messages between a case and its peers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from typing import TYPE_CHECKING

import pytest
from support.tracer import trace_process

from gdrkit import evidence
from gdrkit.errors import (
    Api,
    ApiError,
    BrokenResource,
    ClosedResource,
    DataMismatch,
    GdrkitError,
    Reason,
    RegistrationFailed,
    SetupMissing,
    Unsupported,
    UsageError,
)
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.harness.peer import Peer
from gdrkit.harness.wire import Channel, error_from_json_data, error_to_json_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.verbs import Nic

API_ERROR_FIELDS = {
    "api": Api.VERBS,
    "operation": "ibv_reg_mr",
    "status": 14,
    "status_name": "EFAULT",
    "errno": 14,
    "arguments": {"length_bytes": 5},
    "reason": Reason.PEER_MEMORY_UNSUPPORTED,
    "what_to_do": "load a module",
    "detail": "detail",
}
ERRORS: list[GdrkitError] = [
    ApiError(**API_ERROR_FIELDS),  # type: ignore[arg-type]
    Unsupported(**API_ERROR_FIELDS),  # type: ignore[arg-type]
    SetupMissing(**API_ERROR_FIELDS),  # type: ignore[arg-type]
    UsageError("wrong", reason=Reason.NO_DEVICE, what_to_do="advice"),
    ClosedResource("queue pair"),
    BrokenResource("gone", reason=Reason.PEER_GONE),
    DataMismatch(first_offset_bytes=3, expected=b"\1", actual=b"\2", length_bytes=9),
    DataMismatch(first_offset_bytes=None, expected=b"1234", actual=b"4321", length_bytes=9),
    RegistrationFailed(
        "refused",
        causes=(Unsupported(**API_ERROR_FIELDS), UsageError("wrong")),  # type: ignore[arg-type]
        reason=Reason.NO_ROUTE,
    ),
    GdrkitError("plain", reason=Reason.OTHER),
]


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    """Yield two channels that are connected to each other."""
    sender, receiver = (Channel(connected_socket) for connected_socket in socket.socketpair())
    yield sender, receiver
    sender.close()
    receiver.close()


def collect_fields(error: BaseException) -> dict[str, object]:
    """Return the class, the text and the fields of an error, and the same for each of its causes."""
    causes = [collect_fields(cause) for cause in getattr(error, "causes", ())]
    return {**vars(error), "causes": causes, "class": type(error), "text": str(error)}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_keeps_its_class_and_its_fields(error: GdrkitError) -> None:
    error_with_note = error.clone()
    error_with_note.add_note("a note")
    for original_error in (error, error_with_note):
        restored_error = error_from_json_data(json.loads(json.dumps(error_to_json_data(original_error))))
        assert collect_fields(restored_error) == collect_fields(original_error)


def test_error_of_an_unknown_class_keeps_its_text() -> None:
    class PeerOnlyError(GdrkitError):
        """An error class that only the peer process knows."""

    restored_error = error_from_json_data(
        error_to_json_data(PeerOnlyError("gone", reason=Reason.TIMEOUT, what_to_do="wait"))
    )
    restored_fields = (type(restored_error), restored_error.message, restored_error.reason, restored_error.what_to_do)
    assert restored_fields == (GdrkitError, "gone", Reason.TIMEOUT, "wait")


def test_arguments_of_an_error_become_json_data() -> None:
    arguments = {"none": None, "flag": True, "count": 3, "share": 0.5, "name": "x", "bytes": b"\0", "list": [1]}
    json_data = error_to_json_data(
        ApiError(api=Api.VERBS, operation="f", status=None, status_name="none", arguments=arguments)
    )
    assert json.loads(json.dumps(json_data))["arguments"] == arguments | {"bytes": "b'\\x00'", "list": "[1]"}


def test_messages_that_arrive_together_are_received_in_order(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    for index in range(3):
        sender.send({"id": index})
    assert [receiver.receive(timeout_s=5) for _ in range(3)] == [{"id": 0}, {"id": 1}, {"id": 2}]


@pytest.mark.parametrize("message_bytes", [b"[]\n", b"7\n", b"null\n"])
def test_message_that_is_not_an_object_is_refused(message_bytes: bytes) -> None:
    sender, receiver_socket = socket.socketpair()
    with sender, contextlib.closing(Channel(receiver_socket)) as receiver:
        sender.sendall(message_bytes + b'{"id": 1}\n')
        with pytest.raises(UsageError) as error_info:
            receiver.receive(timeout_s=5)
        assert error_info.value.reason is Reason.MALFORMED
        assert receiver.receive(timeout_s=5) == {"id": 1}


@pytest.mark.parametrize("descriptor_count", [16, 17])
def test_message_has_at_most_sixteen_descriptors(channels: tuple[Channel, Channel], descriptor_count: int) -> None:
    sender, receiver = channels
    with tempfile.TemporaryFile() as file:
        sender.send({}, descriptors=(file.fileno(),) * descriptor_count)
        if descriptor_count == 16:
            assert receiver.receive(timeout_s=5) == {}
        else:
            with pytest.raises(UsageError) as error_info:
                receiver.receive(timeout_s=5)
            assert error_info.value.reason is Reason.MALFORMED
            return
        # A request for more descriptors than have arrived takes none of them.
        with pytest.raises(UsageError) as error_info:
            receiver.take_descriptors(descriptor_count + 1)
        assert error_info.value.reason is Reason.MALFORMED
        descriptors = receiver.take_descriptors(descriptor_count - 1)
        assert all(os.path.sameopenfile(descriptor, file.fileno()) for descriptor in descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        (last_descriptor,) = receiver.take_descriptors(1)
        os.close(last_descriptor)
        assert receiver.take_descriptors(0) == []


def test_descriptors_of_several_messages_keep_their_order(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    with tempfile.TemporaryFile() as first_file, tempfile.TemporaryFile() as second_file:
        sender.send({}, descriptors=(first_file.fileno(),))
        assert receiver.receive(timeout_s=5) == {}
        sender.send({}, descriptors=(second_file.fileno(),))
        assert receiver.receive(timeout_s=5) == {}
        for file in (first_file, second_file):
            (descriptor,) = receiver.take_descriptors(1)
            assert os.path.sameopenfile(descriptor, file.fileno())
            os.close(descriptor)


def test_close_closes_descriptors_that_were_not_taken(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    with tempfile.NamedTemporaryFile() as file:
        sender.send({}, descriptors=(file.fileno(),) * 3)
        assert receiver.receive(timeout_s=5) == {}
        # `file` has one descriptor, and the channel has received three more.
        assert list(evidence.descriptor_targets().values()).count(file.name) == 4
        receiver.close()
        assert list(evidence.descriptor_targets().values()).count(file.name) == 1
    assert receiver.fileno() == -1


def test_receive_after_a_close_with_unread_data_is_none(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    receiver.send({"id": 1})
    # If one end of a socket is closed with unread data, the kernel reports ECONNRESET at the other end.
    sender.close()
    assert receiver.receive(timeout_s=5) is None


def test_messages_and_descriptors_arrive_complete_and_in_order(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    pipe_ends = os.pipe()
    sender.send({"id": 1}, descriptors=pipe_ends)
    sender.send({"id": 2, "text": "x" * 100_000})
    assert receiver.receive(timeout_s=5) == {"id": 1}
    read_end, write_end = receiver.take_descriptors(2)
    os.write(write_end, b"message")
    assert os.read(pipe_ends[0], 7) == b"message"
    for descriptor in (*pipe_ends, read_end, write_end):
        os.close(descriptor)
    long_message = receiver.receive(timeout_s=5)
    assert long_message is not None
    assert len(long_message["text"]) == 100_000
    with pytest.raises(UsageError):
        receiver.take_descriptors(1)


def test_receive_from_a_closed_socket_is_none_and_else_times_out(channels: tuple[Channel, Channel]) -> None:
    sender, receiver = channels
    with pytest.raises(TimeoutError):
        receiver.receive(timeout_s=0.01)
    sender.close()
    assert receiver.receive(timeout_s=5) is None


def test_new_peer_is_another_process_without_api_libraries() -> None:
    with Peer("new") as peer:
        assert peer.process_id != os.getpid()
        assert not {"pyverbs", "cuda", "pytest", "numpy"} & peer.modules()
        assert peer.libraries() == ()


def test_killed_peer_is_broken_and_reports_the_signal(peer: Peer) -> None:
    peer.kill()
    with pytest.raises(BrokenResource, match="SIGKILL") as error_info:
        peer.modules()
    assert error_info.value.reason is Reason.PEER_GONE
    assert not peer.alive


def test_peer_can_exit_without_clean_up(peer: Peer) -> None:
    peer.exit(7)
    assert peer.exit_code == 7
    with pytest.raises(BrokenResource, match="exited with code 7"):
        peer.modules()


def test_peer_that_does_not_reply_is_killed(peer: Peer) -> None:
    peer.modules()
    peer.suspend()
    with pytest.raises(BrokenResource) as error_info:
        peer.request("modules", request_timeout_s=0.05)
    assert error_info.value.reason is Reason.TIMEOUT
    assert not peer.alive


def test_output_of_a_peer_is_in_the_error_when_it_ends(peer: Peer) -> None:
    with pytest.raises(BrokenResource) as error_info:
        peer.request("close", there_is_no_such_argument=1)
    assert "TypeError" in "\n".join(error_info.value.__notes__)


def test_unknown_operation_and_handle_are_usage_errors(peer: Peer) -> None:
    with pytest.raises(UsageError, match="no operation 'fly'"):
        peer.request("fly")
    with pytest.raises(UsageError, match="handle 5") as error_info:
        peer.request("close", number=5)
    assert "raised in peer" in error_info.value.__notes__[-1]


def test_peers_returns_another_peer_for_each_call(peers: Callable[[], Peer]) -> None:
    assert peers().process_id != peers().process_id


@needs(verbs_needs.nic())
def test_peer_finds_a_changed_byte_in_its_buffer(peer: Peer) -> None:
    buffer = peer.buffer(4096, seed=5)
    assert buffer.check(seed=5) == buffer.check(seed=5)  # The SHA-256 of the compared bytes.
    buffer.fill(seed=6, offset_bytes=100, length_bytes=1)
    with pytest.raises(DataMismatch) as error_info:
        buffer.check(seed=5)
    assert error_info.value.first_offset_bytes == 100
    assert len(buffer.contents(offset_bytes=4000)) == 96


@needs(verbs_needs.nic())
def test_two_processes_write_and_read_each_others_memory(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(1000)
    with (
        nic.register_host(data) as region,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as local_queue_pair,
    ):
        peer_queue_pair = peer.queue_pair()
        peer_queue_pair.connect_with(local_queue_pair)
        assert peer_queue_pair.state == "RTS"
        peer_queue_pair.write(region.remote(), seed=seed, local_offset_bytes=3, pattern_offset_bytes=17).expect()
        peer_queue_pair.read(region.remote(), seed=seed, pattern_offset_bytes=17).completion.expect()
        # Without pattern_offset_bytes, the peer compares the bytes with the pattern from offset 0 on.
        with pytest.raises(DataMismatch):
            peer_queue_pair.read(region.remote(), seed=seed)
        buffer = peer.buffer(1000)
        peer_queue_pair.receive(buffer)
        local_queue_pair.post_send(region, work_id=1, immediate=9)
        local_queue_pair.wait(5000).expect()
        assert peer_queue_pair.wait_received().expect().immediate == 9
        assert bytes(data) == buffer.contents()


@needs(cuda_needs.device())
def test_peer_with_a_cuda_device_has_not_loaded_verbs(seed: int) -> None:
    with Peer("new") as peer:
        memory = peer.device().allocate(4096)
        memory.write(seed=seed)
        memory.check(seed=seed)
        assert len(memory.contents(length_bytes=16)) == 16
        assert "cuda" in peer.modules()
        assert "pyverbs" not in peer.modules()


def test_peer_that_outlives_sigkill_is_broken() -> None:
    peer = Peer()
    peer.modules()
    # While a child process is traced, its parent cannot wait for its end, even after SIGKILL.
    with trace_process(peer.process_id):
        with pytest.raises(BrokenResource, match="was left behind") as error_info:
            peer.kill()
        assert error_info.value.reason is Reason.TIMEOUT
    peer.close()
    assert peer.exit_code == -9  # SIGKILL has the number 9.
