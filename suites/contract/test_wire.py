"""Endpoints and remote memory ranges from peers are parsed strictly: a malformed value raises UsageError(MALFORMED)."""

from __future__ import annotations

import json

import pytest

from gdrkit.errors import Reason, UsageError
from gdrkit.verbs import Endpoint, RemoteRange

RANGE_FIELDS = {"address": 0x7F0000001001, "rkey": 0xFFFFFFFF, "length_bytes": 4095}
ENDPOINT_FIELDS = {
    "qp_number": 0xABCDEF,
    "psn": 0,
    "gid": "0000:0000:0000:0000:0000:ffff:0a09:0001",
    "lid": 0,
    "mtu_bytes": 4096,
}


@pytest.mark.parametrize(("value_class", "valid_fields"), [(RemoteRange, RANGE_FIELDS), (Endpoint, ENDPOINT_FIELDS)])
def test_wire_value_round_trips_through_json(
    value_class: type[RemoteRange | Endpoint], valid_fields: dict[str, int | str]
) -> None:
    value = value_class.from_dict(valid_fields)
    assert value_class.from_dict(json.loads(json.dumps(value.to_dict()))) == value
    assert value.to_dict() == valid_fields


@pytest.mark.parametrize(("value_class", "valid_fields"), [(RemoteRange, RANGE_FIELDS), (Endpoint, ENDPOINT_FIELDS)])
@pytest.mark.parametrize("invalid_value", [None, [], "text", 7, {}])
def test_wrong_json_object_is_malformed(
    value_class: type[RemoteRange | Endpoint], valid_fields: dict[str, int | str], invalid_value: object
) -> None:
    _assert_malformed(value_class, invalid_value)
    _assert_malformed(value_class, valid_fields | {"more": 1})
    for name in valid_fields:
        _assert_malformed(value_class, {key: value for key, value in valid_fields.items() if key != name})


@pytest.mark.parametrize(
    "invalid_field",
    [
        {"address": -1},
        {"address": 1 << 64},
        {"address": "0x10"},
        {"address": 1.0},
        {"rkey": 1 << 32},
        {"rkey": True},
        {"rkey": None},
        {"length_bytes": -1},
        {"length_bytes": (1 << 63) + 1},
    ],
)
def test_remote_range_out_of_limits_is_malformed(invalid_field: dict[str, object]) -> None:
    _assert_malformed(RemoteRange, RANGE_FIELDS | invalid_field)


@pytest.mark.parametrize(
    "invalid_field",
    [
        {"qp_number": 1 << 24},
        {"psn": -1},
        {"psn": False},
        {"lid": 1 << 16},
        {"mtu_bytes": 1500},
        {"mtu_bytes": 0},
        {"gid": "fe80::1"},
        {"gid": 7},
        {"gid": "FE80:0000:0000:0000:0000:0000:0000:0001"},
        {"gid": "fe80:0000:0000:0000:0000:0000:0000:0001\n"},
    ],
)
def test_endpoint_out_of_limits_is_malformed(invalid_field: dict[str, object]) -> None:
    _assert_malformed(Endpoint, ENDPOINT_FIELDS | invalid_field)


@pytest.mark.parametrize(
    ("value_class", "valid_fields", "limits"),
    [
        (RemoteRange, RANGE_FIELDS, {"address": (1 << 64) - 1, "rkey": (1 << 32) - 1, "length_bytes": 1 << 63}),
        (Endpoint, ENDPOINT_FIELDS, {"qp_number": (1 << 24) - 1, "psn": (1 << 24) - 1, "lid": (1 << 16) - 1}),
    ],
)
def test_numbers_are_allowed_up_to_their_limits(
    value_class: type[RemoteRange | Endpoint], valid_fields: dict[str, int | str], limits: dict[str, int]
) -> None:
    for name, limit in limits.items():
        for value in (0, limit):
            assert getattr(value_class.from_dict(valid_fields | {name: value}), name) == value
        for invalid_value in (-1, limit + 1, True, 1.0, "1", None):
            _assert_malformed(value_class, valid_fields | {name: invalid_value})


@pytest.mark.parametrize("mtu_bytes", [256, 512, 1024, 2048, 4096])
def test_mtu_is_one_of_the_five_of_infiniband(mtu_bytes: int) -> None:
    assert Endpoint.from_dict(ENDPOINT_FIELDS | {"mtu_bytes": mtu_bytes}).mtu_bytes == mtu_bytes
    for invalid_value in (mtu_bytes - 1, mtu_bytes + 1, 2 * mtu_bytes + 1, 8192, 128, float(mtu_bytes)):
        _assert_malformed(Endpoint, ENDPOINT_FIELDS | {"mtu_bytes": invalid_value})


def test_refusal_names_the_missing_and_the_unknown_keys() -> None:
    invalid_fields = {key: value for key, value in RANGE_FIELDS.items() if key != "rkey"} | {"b": 1, "a": 2}
    with pytest.raises(UsageError, match=r"RemoteRange lacks \['rkey'\], has unknown \['a', 'b'\]"):
        RemoteRange.from_dict(invalid_fields)


def test_part_of_a_remote_range_stays_inside() -> None:
    whole_range = RemoteRange.from_dict(RANGE_FIELDS)
    part_range = whole_range.part(offset_bytes=4000, length_bytes=95)
    assert (part_range.address, part_range.rkey, part_range.length_bytes) == (
        whole_range.address + 4000,
        whole_range.rkey,
        95,
    )
    with pytest.raises(UsageError):
        whole_range.part(offset_bytes=4000, length_bytes=96)


def _assert_malformed(value_class: type[RemoteRange | Endpoint], json_value: object) -> None:
    with pytest.raises(UsageError) as error_info:
        value_class.from_dict(json_value)
    assert error_info.value.reason is Reason.MALFORMED
