"""Ports, indexes and devices that are not there: ibv_query_port(3), ibv_query_gid(3), ibv_query_pkey(3)."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from support.loop import refused

from gdrkit import verbs as rdma
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import needs, verbs
from gdrkit.verbs import _pyverbs

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


@pytest.mark.parametrize("port", [0, 200])
def test_a_port_that_is_not_there_is_refused(nic: Nic, port: int) -> None:
    with refused(errno.EINVAL):
        _pyverbs.call("ibv_query_port", nic.context.query_port, port)  # type: ignore[attr-defined]


def test_a_port_or_a_gid_that_is_not_there_cannot_be_opened(nic: Nic) -> None:
    for other in ({"port": 200}, {"port": nic.port.number, "gid_index": 1 << 20}):
        with pytest.raises(UsageError):
            rdma.Nic.open(nic.name, **other)


def test_a_device_that_is_not_there_is_named_with_those_that_are(nic: Nic) -> None:
    with pytest.raises(UsageError, match=nic.name) as raised:
        rdma.Nic.open("no_such_device")
    assert raised.value.reason is Reason.NO_DEVICE


def test_what_the_port_says_of_itself_is_what_it_says_again(nic: Nic) -> None:
    (info,) = [info for info in rdma.list_nics() if info.name == nic.name]
    assert info.error is None
    assert nic.port == info.ports[nic.port.number - 1]
