"""Objects in use are not destroyed (EBUSY) and stay usable; ibv_dealloc_pd(3), ibv_destroy_cq(3).

The cases call libibverbs by ctypes, because pyverbs would close the children first.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from support.plain_verbs import PlainVerbs

from gdrkit.harness.needs import needs, verbs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())


@pytest.fixture
def plain(nic: Nic) -> Iterator[PlainVerbs]:
    """Yield the ctypes binding of libibverbs with the NIC open."""
    with PlainVerbs(nic.name) as opened:
        yield opened


def test_domain_with_a_region_is_not_destroyed(plain: PlainVerbs) -> None:
    domain = plain.domain()
    region = plain.region(domain)
    assert plain.deallocate(domain) == errno.EBUSY
    assert plain.deregister(region) == 0
    assert plain.deallocate(domain) == 0


def test_domain_with_a_queue_pair_is_not_destroyed(plain: PlainVerbs) -> None:
    domain, queue = plain.domain(), plain.queue()
    pair = plain.pair(domain, queue)
    assert plain.deallocate(domain) == errno.EBUSY
    assert plain.destroy_pair(pair) == 0
    assert plain.destroy_queue(queue) == 0
    assert plain.deallocate(domain) == 0


def test_completion_queue_in_use_is_not_destroyed(plain: PlainVerbs) -> None:
    domain, queue = plain.domain(), plain.queue()
    pair = plain.pair(domain, queue)
    assert plain.destroy_queue(queue) == errno.EBUSY
    assert plain.destroy_pair(pair) == 0
    assert plain.destroy_queue(queue) == 0
    assert plain.deallocate(domain) == 0


def test_completion_channel_in_use_is_not_destroyed(plain: PlainVerbs) -> None:
    channel = plain.channel()
    queue = plain.queue(channel)
    assert plain.destroy_channel(channel) == errno.EBUSY
    assert plain.destroy_queue(queue) == 0
    assert plain.destroy_channel(channel) == 0
