"""Objects that other objects use are not destroyed (EBUSY) and stay usable (ibv_dealloc_pd(3), ibv_destroy_cq(3)).

The cases call libibverbs by ctypes, because pyverbs would destroy the dependent objects first.
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
def ctypes_verbs(nic: Nic) -> Iterator[CtypesVerbs]:
    """Yield the ctypes binding of libibverbs with the NIC open."""
    with CtypesVerbs(nic.name) as verbs_of_nic:
        yield verbs_of_nic


def test_domain_with_a_region_is_not_destroyed(ctypes_verbs: CtypesVerbs) -> None:
    domain = ctypes_verbs.allocate_domain()
    region = ctypes_verbs.register(domain)
    assert ctypes_verbs.deallocate_domain(domain) == errno.EBUSY
    assert ctypes_verbs.deregister(region) == 0
    assert ctypes_verbs.deallocate_domain(domain) == 0


def test_domain_with_a_queue_pair_is_not_destroyed(ctypes_verbs: CtypesVerbs) -> None:
    domain, completion_queue = ctypes_verbs.allocate_domain(), ctypes_verbs.create_completion_queue()
    queue_pair = ctypes_verbs.create_queue_pair(domain, completion_queue)
    assert ctypes_verbs.deallocate_domain(domain) == errno.EBUSY
    assert ctypes_verbs.destroy_queue_pair(queue_pair) == 0
    assert ctypes_verbs.destroy_completion_queue(completion_queue) == 0
    assert ctypes_verbs.deallocate_domain(domain) == 0


def test_completion_queue_in_use_is_not_destroyed(ctypes_verbs: CtypesVerbs) -> None:
    domain, completion_queue = ctypes_verbs.allocate_domain(), ctypes_verbs.create_completion_queue()
    queue_pair = ctypes_verbs.create_queue_pair(domain, completion_queue)
    assert ctypes_verbs.destroy_completion_queue(completion_queue) == errno.EBUSY
    assert ctypes_verbs.destroy_queue_pair(queue_pair) == 0
    assert ctypes_verbs.destroy_completion_queue(completion_queue) == 0
    assert ctypes_verbs.deallocate_domain(domain) == 0


def test_completion_channel_in_use_is_not_destroyed(ctypes_verbs: CtypesVerbs) -> None:
    channel = ctypes_verbs.create_completion_channel()
    completion_queue = ctypes_verbs.create_completion_queue(channel)
    assert ctypes_verbs.destroy_completion_channel(channel) == errno.EBUSY
    assert ctypes_verbs.destroy_completion_queue(completion_queue) == 0
    assert ctypes_verbs.destroy_completion_channel(channel) == 0
