"""Objects in use are not destroyed (EBUSY) and stay usable; ibv_dealloc_pd(3), ibv_destroy_cq(3).

The cases call libibverbs by ctypes, because pyverbs would close the children first.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from contract.rdma.ctypes_verbs import CtypesVerbs

from gdrkit.harness.needs import needs, verbs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


@pytest.fixture
def raw(nic: Nic) -> Iterator[CtypesVerbs]:
    """Yield the ctypes binding of libibverbs with the NIC open."""
    with CtypesVerbs(nic.name) as opened:
        yield opened


def test_domain_with_a_region_is_not_destroyed(raw: CtypesVerbs) -> None:
    domain = raw.domain()
    region = raw.region(domain)
    assert raw.deallocate(domain) == errno.EBUSY
    assert raw.deregister(region) == 0
    assert raw.deallocate(domain) == 0


def test_domain_with_a_queue_pair_is_not_destroyed(raw: CtypesVerbs) -> None:
    domain, queue = raw.domain(), raw.queue()
    pair = raw.pair(domain, queue)
    assert raw.deallocate(domain) == errno.EBUSY
    assert raw.destroy_pair(pair) == 0
    assert raw.destroy_queue(queue) == 0
    assert raw.deallocate(domain) == 0


def test_completion_queue_in_use_is_not_destroyed(raw: CtypesVerbs) -> None:
    domain, queue = raw.domain(), raw.queue()
    pair = raw.pair(domain, queue)
    assert raw.destroy_queue(queue) == errno.EBUSY
    assert raw.destroy_pair(pair) == 0
    assert raw.destroy_queue(queue) == 0
    assert raw.deallocate(domain) == 0


def test_completion_channel_in_use_is_not_destroyed(raw: CtypesVerbs) -> None:
    channel = raw.channel()
    queue = raw.queue(channel)
    assert raw.destroy_channel(channel) == errno.EBUSY
    assert raw.destroy_queue(queue) == 0
    assert raw.destroy_channel(channel) == 0
