"""Peers: spawned, asked with a time limit, never waited for in vain; and how they talk."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
from support.tracer import traced

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
from gdrkit.harness.wire import Channel, error_from_plain, error_to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.verbs import Nic

FIELDS = {
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
    ApiError(**FIELDS),  # type: ignore[arg-type]
    Unsupported(**FIELDS),  # type: ignore[arg-type]
    SetupMissing(**FIELDS),  # type: ignore[arg-type]
    UsageError("wrong", reason=Reason.NO_DEVICE, what_to_do="right"),
    ClosedResource("queue pair"),
    BrokenResource("gone", reason=Reason.PEER_GONE),
    DataMismatch(first_offset_bytes=3, expected=b"\1", actual=b"\2", length_bytes=9),
    RegistrationFailed(
        "no way",
        causes=(Unsupported(**FIELDS), UsageError("wrong")),  # type: ignore[arg-type]
        reason=Reason.NO_ROUTE,
    ),
    GdrkitError("plain", reason=Reason.OTHER),
]


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = (Channel(end) for end in socket.socketpair())
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_with_its_class_and_its_fields(error: GdrkitError) -> None:
    error.add_note("a note")
    again = error_from_plain(error_to_plain(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.reason is error.reason
    assert again.__notes__ == ["a note"]
    if isinstance(error, ApiError) and isinstance(again, ApiError):
        assert (again.status, again.errno, again.arguments) == (error.status, error.errno, error.arguments)


def test_messages_keep_their_bounds_and_descriptors_their_order(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    ends = os.pipe()
    left.send({"id": 1}, descriptors=ends)
    left.send({"id": 2, "text": "x" * 100_000})
    assert right.receive(timeout_s=5) == {"id": 1}
    read_end, write_end = right.take_descriptors(2)
    os.write(write_end, b"through")
    assert os.read(ends[0], 7) == b"through"
    for descriptor in (*ends, read_end, write_end):
        os.close(descriptor)
    answer = right.receive(timeout_s=5)
    assert answer is not None
    assert len(answer["text"]) == 100_000
    with pytest.raises(UsageError):
        right.take_descriptors(1)


def test_a_closed_end_is_none_and_a_silent_one_a_timeout(channels: tuple[Channel, Channel]) -> None:
    left, right = channels
    with pytest.raises(TimeoutError):
        right.receive(timeout_s=0.01)
    left.close()
    assert right.receive(timeout_s=5) is None


def test_a_new_peer_is_another_process_without_any_api() -> None:
    with Peer("new") as peer:
        assert peer.process_id != os.getpid()
        assert not {"pyverbs", "cuda", "pytest", "numpy"} & peer.modules()
        assert peer.libraries() == ()


def test_a_killed_peer_is_broken_and_says_how(peer: Peer) -> None:
    peer.kill()
    with pytest.raises(BrokenResource, match="SIGKILL") as caught:
        peer.modules()
    assert caught.value.reason is Reason.PEER_GONE
    assert not peer.alive


def test_a_peer_can_end_without_any_clean_up(peer: Peer) -> None:
    peer.exit(7)
    assert peer.exit_code == 7
    with pytest.raises(BrokenResource, match="ended with 7"):
        peer.modules()


def test_a_peer_that_does_not_answer_is_killed(peer: Peer) -> None:
    peer.modules()
    peer.stop()
    with pytest.raises(BrokenResource) as caught:
        peer.request("modules", request_timeout_s=0.05)
    assert caught.value.reason is Reason.TIMEOUT
    assert not peer.alive


def test_what_a_peer_prints_is_shown_when_it_breaks(peer: Peer) -> None:
    with pytest.raises(BrokenResource) as caught:
        peer.request("close", there_is_no_such_argument=1)
    assert "TypeError" in "\n".join(caught.value.__notes__)


def test_an_unknown_operation_and_a_wrong_handle_are_wrong_usage(peer: Peer) -> None:
    with pytest.raises(UsageError, match="no operation 'fly'"):
        peer.request("fly")
    with pytest.raises(UsageError, match="handle 5") as caught:
        peer.request("close", number=5)
    assert "raised in peer" in caught.value.__notes__[-1]


def test_each_call_gives_another_peer(peers: Callable[[], Peer]) -> None:
    assert peers().process_id != peers().process_id


@needs(verbs_needs.nic())
def test_a_peer_fills_checks_and_finds_a_wrong_byte(peer: Peer) -> None:
    buffer = peer.buffer(4096, seed=5)
    assert buffer.check(seed=5) == buffer.check(seed=5)
    buffer.fill(seed=6, offset_bytes=100, length_bytes=1)
    with pytest.raises(DataMismatch) as caught:
        buffer.check(seed=5)
    assert caught.value.first_offset_bytes == 100
    assert len(buffer.contents(offset_bytes=4000)) == 96


@needs(verbs_needs.nic())
def test_two_processes_exchange_bytes_both_ways(nic: Nic, peer: Peer, seed: int) -> None:
    data = bytearray(1000)
    with (
        nic.register_host(data) as region,
        nic.completion_queue() as queue,
        nic.queue_pair(queue) as ours,
    ):
        theirs = peer.queue_pair()
        theirs.join(ours)
        assert theirs.state == "RTS"
        theirs.write(region.remote(), seed=seed, local_offset_bytes=3, stream_offset_bytes=17).expect()
        theirs.read(region.remote(), seed=seed, stream_offset_bytes=17).completion.expect()
        with pytest.raises(DataMismatch):
            theirs.read(region.remote(), seed=seed)
        buffer = peer.buffer(1000)
        theirs.receive(buffer)
        ours.post_send(region, work_id=1, immediate=9)
        ours.wait(5000).expect()
        assert theirs.wait_received().expect().immediate == 9
        assert bytes(data) == buffer.contents()


@needs(cuda_needs.device())
def test_a_peer_that_is_asked_for_a_device_has_cuda_and_no_verbs(seed: int) -> None:
    with Peer("new") as peer:
        memory = peer.device().allocate(4096)
        memory.write(seed=seed)
        memory.check(seed=seed)
        assert len(memory.contents(length_bytes=16)) == 16
        assert "cuda" in peer.modules()
        assert "pyverbs" not in peer.modules()


def test_peer_that_outlives_sigkill_is_broken() -> None:
    held = Peer()
    held.modules()
    with traced(held.process_id):
        with pytest.raises(BrokenResource, match="was left behind") as raised:
            held.kill()
        assert raised.value.reason is Reason.TIMEOUT
    held.close()
    assert held.exit_code == -9
