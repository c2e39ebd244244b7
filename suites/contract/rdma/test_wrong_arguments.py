"""Ports, GID indexes and devices that do not exist are refused (ibv_query_port(3), ibv_query_gid(3))."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import require_errno

from gdrkit import verbs as rdma
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import needs, verbs
from gdrkit.verbs import _pyverbs

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


@pytest.mark.parametrize("port_number", [0, 200])
def test_missing_port_is_refused(nic: Nic, port_number: int) -> None:
    with require_errno(errno.EINVAL):
        _pyverbs.call("ibv_query_port", nic.context.query_port, port_number)  # type: ignore[attr-defined]


def test_open_with_a_missing_port_or_gid_is_refused(nic: Nic) -> None:
    for options in ({"port": 200}, {"port": nic.port.number, "gid_index": 1 << 20}):
        with pytest.raises(UsageError):
            rdma.Nic.open(nic.name, **options)


def test_open_of_a_missing_device_lists_the_present_ones(nic: Nic) -> None:
    with pytest.raises(UsageError, match=nic.name) as error_info:
        rdma.Nic.open("no_such_device")
    assert error_info.value.reason is Reason.NO_DEVICE


def test_port_attributes_are_the_same_at_each_query(nic: Nic) -> None:
    (nic_info,) = [nic_info for nic_info in rdma.list_nics() if nic_info.name == nic.name]
    assert nic_info.error is None
    assert nic.port == nic_info.ports[nic.port.number - 1]
