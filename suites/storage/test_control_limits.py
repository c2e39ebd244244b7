"""Control messages of the storage server: the names of the operations, and the values at both sides of each limit."""

from __future__ import annotations

import errno
import json
import math
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api, Reason, UsageError
from gdrkit.storage import messages
from gdrkit.storage.control import (
    REQUESTS,
    operation_of,
    pack_error,
    pack_reply,
    pack_request,
    parse_reply,
    parse_request,
    storage_error,
)
from gdrkit.storage.wire import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from gdrkit.storage.control import Request

ENDPOINT: dict[str, int | str] = {"qp_number": 1}
# Limit of the length of a path and of an error message.
TEXT_CHARACTERS_MAX = 4096
# One example request of each operation.
REQUESTS_BY_OPERATION: dict[str, Request] = {
    "hello": messages.StorageHello(1, "client", (ENDPOINT,), token="secret", replaces="other"),  # noqa: S106 - not a password.
    "attach": messages.Attach("session"),
    "open": messages.Open("a", read=False, write=True, create=True, truncate=True, exclusive=True, mode=0o600),
    "adopt": messages.Adopt(read=False, write=True),
    "close": messages.Close(1),
    "stat": messages.Stat(handle=1),
    "list": messages.List("a", "b"),
    "mkdir": messages.Mkdir("a", 0o700),
    "rmdir": messages.Rmdir("a"),
    "unlink": messages.Unlink("a"),
    "rename": messages.Rename("a", "b", exclusive=True),
    "link": messages.HardLink("a", "b"),
    "symlink": messages.Symlink("a", "b"),
    "readlink": messages.Readlink("a"),
    "truncate": messages.Truncate(1, handle=1),
    "sync": messages.Sync(1, data_only=True),
    "punch_hole": messages.PunchHole(1, ((1, 1), (2, 3))),
    "statfs": messages.Statfs(),
    "chmod": messages.Chmod("a", 0o7777),
    "utimens": messages.Utimens("a", 1, -1),
    "chown": messages.Chown("a", 1, None),
    "user": messages.SetUser(1, 2, (3, 4)),
    "statistics": messages.ReadStatistics(),
}


def get_refusal_reason(payload: bytes) -> Reason | None:
    """Return the reason for which the payload of a request is refused."""
    with pytest.raises(UsageError) as error_info:
        parse_request(payload)
    return error_info.value.reason


@pytest.mark.parametrize("operation_name", sorted(REQUESTS_BY_OPERATION))
def test_operation_has_its_name_in_the_json(operation_name: str) -> None:
    request = REQUESTS_BY_OPERATION[operation_name]
    assert operation_of(request) == operation_name
    assert json.loads(pack_request(request))["op"] == operation_name
    assert parse_request(pack_request(request)) == request


@pytest.mark.parametrize(
    "invalid_request",
    [messages.SetUser((1 << 32) - 1, 0), messages.SetUser(0, 0, (1 << 32,)), messages.Chown("a", 1 << 32)],
)
def test_number_of_a_user_has_a_limit(invalid_request: Request) -> None:
    assert get_refusal_reason(pack_request(invalid_request)) is Reason.MALFORMED


def test_every_operation_is_listed() -> None:
    assert REQUESTS.keys() == REQUESTS_BY_OPERATION.keys()


@pytest.mark.parametrize(
    ("field", "length_max"),
    [("client", 256), ("token", messages.TOKEN_CHARACTERS_MAX), ("replaces", 64)],
)
def test_text_of_a_hello_has_a_limit(field: str, length_max: int) -> None:
    for length in (length_max, length_max + 1):
        fields = {"op": "hello", "version": 1, "client": "a", "lanes": [ENDPOINT], field: "x" * length}
        payload = json.dumps(fields).encode()
        if length == length_max:
            assert getattr(parse_request(payload), field) == "x" * length
        else:
            assert get_refusal_reason(payload) is Reason.MALFORMED


def test_session_and_path_have_limits() -> None:
    assert parse_request(pack_request(messages.Attach("x" * 64))) == messages.Attach("x" * 64)
    assert get_refusal_reason(pack_request(messages.Attach("x" * 65))) is Reason.MALFORMED
    assert parse_request(pack_request(messages.Stat("x" * TEXT_CHARACTERS_MAX))) == messages.Stat(
        "x" * TEXT_CHARACTERS_MAX
    )
    assert get_refusal_reason(pack_request(messages.Stat("x" * (TEXT_CHARACTERS_MAX + 1)))) is Reason.MALFORMED


@pytest.mark.parametrize("field", ["server", "session"])
def test_text_of_a_hello_reply_has_a_limit(field: str) -> None:
    length_max = {"server": 256, "session": 64}[field]
    limits = messages.SessionLimits(1, 1, 1, 1, 1)
    for length in (length_max, length_max + 1):
        text_fields = {"server": "s", "session": "s", field: "x" * length}
        payload = pack_reply(
            messages.HelloReply(version=1, lanes=(ENDPOINT,), limits=limits, chunk_bytes=4096, **text_fields)
        )
        if length == length_max:
            reply = parse_reply(payload, messages.HelloReply)
            assert isinstance(reply, messages.HelloReply)
            assert getattr(reply, field) == "x" * length
        else:
            with pytest.raises(UsageError, match=f"{length} characters"):
                parse_reply(payload, messages.HelloReply)


def test_message_of_an_error_reply_has_a_limit() -> None:
    longest_reply = messages.ErrorReply(errno.EIO, "x" * TEXT_CHARACTERS_MAX)
    assert parse_reply(pack_error(longest_reply), messages.Done) == longest_reply
    with pytest.raises(UsageError):
        parse_reply(pack_error(messages.ErrorReply(errno.EIO, "x" * (TEXT_CHARACTERS_MAX + 1))), messages.Done)


def test_zero_character_is_refused_in_every_text() -> None:
    for request in (
        messages.Stat("a\0"),
        messages.Rename("a", "\0"),
        messages.Attach("\0"),
        messages.StorageHello(1, "a\0", (ENDPOINT,)),
    ):
        assert get_refusal_reason(pack_request(request)) is Reason.MALFORMED
    with pytest.raises(UsageError):
        parse_reply(pack_reply(messages.ReadlinkReply("a\0b")), messages.ReadlinkReply)


@pytest.mark.parametrize("lane_count", [0, 1, messages.LANES_MAX, messages.LANES_MAX + 1])
def test_hello_has_1_to_16_lanes(lane_count: int) -> None:
    payload = pack_request(messages.StorageHello(1, "a", (ENDPOINT,) * lane_count))
    if 1 <= lane_count <= 16:
        parse_request(payload)
    else:
        assert get_refusal_reason(payload) is Reason.MALFORMED


@pytest.mark.parametrize("range_count", [0, 1, 1024, 1025])
def test_punch_hole_has_1_to_1024_ranges(range_count: int) -> None:
    payload = pack_request(messages.PunchHole(1, ((0, 1),) * range_count))
    if 1 <= range_count <= 1024:
        parse_request(payload)
    else:
        assert get_refusal_reason(payload) is Reason.MALFORMED


@pytest.mark.parametrize("bounds", [(), (1,), (1, 2, 3), (2, 1)])
def test_range_without_begin_and_end_is_refused(bounds: tuple[int, ...]) -> None:
    assert get_refusal_reason(pack_request(messages.PunchHole(1, ((0, 1), bounds)))) is Reason.MALFORMED


@pytest.mark.parametrize("make_request", [messages.Stat, lambda **fields: messages.Truncate(1, **fields)])
def test_exactly_one_of_path_and_handle_is_given(make_request: type[messages.Stat]) -> None:
    for valid_fields in ({"path": "a"}, {"path": ""}, {"handle": 0}):
        request = make_request(**valid_fields)
        assert parse_request(pack_request(request)) == request
    for invalid_fields in ({}, {"path": "a", "handle": 1}):
        assert get_refusal_reason(pack_request(make_request(**invalid_fields))) is Reason.MALFORMED  # type: ignore[arg-type]


def test_rename_is_exclusive_or_an_exchange() -> None:
    for exclusive, exchange in ((False, False), (True, False), (False, True)):
        request = messages.Rename("a", "b", exclusive=exclusive, exchange=exchange)
        assert parse_request(pack_request(request)) == request
    assert (
        get_refusal_reason(pack_request(messages.Rename("a", "b", exclusive=True, exchange=True))) is Reason.MALFORMED
    )


@pytest.mark.parametrize("request_type", [messages.Open, messages.Mkdir, messages.Chmod])
def test_mode_has_at_most_12_bits(request_type: type[messages.Chmod]) -> None:
    request = request_type("a", mode=0o7777)
    assert parse_request(pack_request(request)) == request
    assert get_refusal_reason(pack_request(request_type("a", mode=0o10000))) is Reason.MALFORMED


@pytest.mark.parametrize("field", ["access_time_ns", "modification_time_ns"])
def test_times_of_a_file_may_be_negative(field: str) -> None:
    time_min_ns = -((1 << 63) - 1)
    payload = json.dumps({"op": "utimens", "path": "a", field: time_min_ns}).encode()
    assert getattr(parse_request(payload), field) == time_min_ns
    assert (
        get_refusal_reason(json.dumps({"op": "utimens", "path": "a", field: time_min_ns - 1}).encode())
        is Reason.MALFORMED
    )


def test_other_numbers_are_not_negative() -> None:
    assert parse_request(pack_request(messages.Close(0))) == messages.Close(0)
    assert get_refusal_reason(pack_request(messages.Close(-1))) is Reason.MALFORMED
    with pytest.raises(UsageError):
        parse_reply(b'{"ok":{"counters":{"a":-1}}}', messages.StatisticsReply)


def test_change_time_of_a_reply_may_be_negative() -> None:
    # The last three fields are times in nanoseconds since 1970.
    file_stat = messages.FileStat(1, 1, 1, 1, 1, 1, 1, -1, -2, -3)
    assert parse_reply(pack_reply(file_stat), messages.FileStat) == file_stat


def test_operation_name_that_is_not_a_string_is_refused() -> None:
    for payload in (b'{"op":1}', b'{"op":["statfs"]}', b'{"path":"a"}'):
        assert get_refusal_reason(payload) is Reason.MALFORMED


def test_largest_control_message_is_64_kib() -> None:
    envelope_bytes = len(pack_reply(messages.ReadlinkReply("")))
    assert (
        len(pack_reply(messages.ReadlinkReply("x" * (CONTROL_BYTES_MAX - envelope_bytes))))
        == CONTROL_BYTES_MAX
        == 65536
    )
    with pytest.raises(UsageError, match=f"at most 65536 bytes, not {CONTROL_BYTES_MAX + 1}"):
        pack_reply(messages.ReadlinkReply("x" * (CONTROL_BYTES_MAX - envelope_bytes + 1)))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_number_that_json_lacks_is_not_packed(number: float) -> None:
    # json.dumps() writes these numbers by default, but parse_request() and parse_reply() refuse them.
    with pytest.raises(ValueError, match="not JSON compliant"):
        pack_request(messages.StorageHello(1, "client", ({"qp_number": number},)))  # type: ignore[dict-item]


def test_control_messages_are_ascii_without_blanks() -> None:
    payload = pack_request(messages.Symlink("ä", "\udcff"))
    assert payload == b'{"op":"symlink","path":"\\u00e4","target":"\\udcff"}'
    assert pack_reply(messages.Done()) == b'{"ok":{}}'
    assert pack_error(messages.ErrorReply(5, "no")) == b'{"error":{"errno":5,"message":"no"}}'


@pytest.mark.parametrize(
    ("error_number", "expected_reason"),
    [
        (errno.EREMOTEIO, Reason.PEER_GONE),
        (errno.EACCES, Reason.NO_PERMISSION),
        (errno.EPERM, Reason.NO_PERMISSION),
        (errno.EINVAL, Reason.BAD_ARGUMENT),
        (errno.EBADF, Reason.BAD_DESCRIPTOR),
        (errno.ETIMEDOUT, Reason.TIMEOUT),
        (errno.ENOENT, Reason.OTHER),
    ],
)
def test_error_of_the_service_keeps_its_errno(error_number: int, expected_reason: Reason) -> None:
    error = storage_error("open", error_number, detail="why", path="a")
    assert (error.api, error.operation, error.status, error.errno) == (Api.STORAGE, "open", error_number, error_number)
    assert (error.status_name, error.reason, error.detail) == (errno.errorcode[error_number], expected_reason, "why")
    assert dict(error.arguments) == {"path": "a"}
