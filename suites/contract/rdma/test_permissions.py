"""Access rights of keys, queue pairs and protection domains; ibv_reg_mr(3), ibv_modify_qp(3), ibv_alloc_pd(3)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import ALL_ACCESS, WAIT_MS, connected

from gdrkit import verbs as rdma
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import Access, ScatterGatherElement, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

# A responder may report a request that the queue pair does not allow as an access error or as an invalid request.
NOT_ALLOWED = frozenset({Status.REM_ACCESS_ERR, Status.REM_INV_REQ_ERR})
# A receive that cannot be filled is a protection error in the specification, and a QP operation error in rxe.
NOT_FILLED = frozenset({Status.LOC_PROT_ERR, Status.LOC_QP_OP_ERR})

# An unknown local key, or one of another domain, is a protection error in the specification (10.10.5), and a QP
# operation error in rxe.
NO_SUCH_KEY = frozenset({Status.LOC_PROT_ERR, Status.LOC_QP_OP_ERR})


def test_write_needs_remote_write_access(nic: Nic) -> None:
    data = bytearray(KIB)
    with (
        connected(nic) as (ours, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(data, access=Access.LOCAL_WRITE | Access.REMOTE_READ) as target_region,
    ):
        ours.post_write(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert data == bytes(KIB)


def test_read_needs_remote_read_access(nic: Nic) -> None:
    own = bytearray(KIB)
    with (
        connected(nic) as (ours, _),
        nic.register_host(own) as local,
        nic.register_host(bytearray(b"\xa5" * KIB), access=Access.LOCAL_WRITE | Access.REMOTE_WRITE) as target_region,
    ):
        ours.post_read(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert own == bytes(KIB)


def test_write_needs_access_of_the_queue_pair(nic: Nic) -> None:
    data = bytearray(KIB)
    with (
        connected(nic, access=Access.REMOTE_READ) as (ours, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(data) as target_region,
    ):
        ours.post_write(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status in NOT_ALLOWED
    assert data == bytes(KIB)


def test_read_needs_access_of_the_queue_pair(nic: Nic) -> None:
    own = bytearray(KIB)
    with (
        connected(nic, access=Access.REMOTE_WRITE) as (ours, _),
        nic.register_host(own) as local,
        nic.register_host(bytearray(b"\xa5" * KIB)) as target_region,
    ):
        ours.post_read(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status in NOT_ALLOWED
    assert own == bytes(KIB)


@pytest.mark.parametrize("flipped", [0x0000_0001, 0x0000_0100, 0x8000_0000, 0xFFFF_FFFF])
def test_key_with_a_flipped_bit_is_refused(nic: Nic, flipped: int) -> None:
    data = bytearray(KIB)
    with (
        connected(nic) as (ours, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        nic.register_host(data) as target_region,
    ):
        # The flipped key must not be the key of the local region.
        inelement = replace(target_region.remote(), rkey=target_region.rkey ^ flipped)
        assert inelement.rkey not in {local.rkey, target_region.rkey}
        ours.post_write(local, inelement, work_id=1)
        assert ours.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert data == bytes(KIB)


def test_send_with_a_wrong_local_key_fails_at_the_requester(nic: Nic) -> None:
    with connected(nic) as (ours, _), nic.register_host(bytearray(KIB)) as local:
        element = local.element()
        ours.post_send([replace(element, lkey=element.lkey ^ 0x0100_0001)], work_id=1)
        assert ours.wait(WAIT_MS).status in NO_SUCH_KEY


def test_read_into_read_only_memory_fails_at_the_requester(nic: Nic) -> None:
    own = bytearray(KIB)
    with (
        connected(nic) as (ours, _),
        nic.register_host(own, access=Access.REMOTE_READ) as local,
        nic.register_host(bytearray(b"\xa5" * KIB)) as target_region,
    ):
        ours.post_read(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status is Status.LOC_PROT_ERR
    assert own == bytes(KIB)


def test_receive_into_read_only_memory_fails_on_both_sides(nic: Nic) -> None:
    own = bytearray(KIB)
    with (
        connected(nic) as (ours, theirs),
        nic.register_host(bytearray(b"\xa5" * KIB)) as source,
        nic.register_host(own, access=Access.REMOTE_READ) as target,
    ):
        theirs.post_receive(target, work_id=1)
        ours.post_send(source, work_id=2)
        assert ours.wait(WAIT_MS).status is Status.REM_OP_ERR
        assert theirs.wait_received(WAIT_MS).status in NOT_FILLED
    assert own == bytes(KIB)


def test_remote_key_of_another_domain_is_refused(nic: Nic) -> None:
    data = bytearray(KIB)
    with (
        rdma.Nic.open(nic.name, port=nic.port.number, gid_index=nic.gid_index) as other_nic,
        connected(nic) as (ours, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local,
        other_nic.register_host(data, access=ALL_ACCESS) as target_region,
    ):
        ours.post_write(local, target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert data == bytes(KIB)


def test_local_key_of_another_domain_is_refused(nic: Nic) -> None:
    with (
        rdma.Nic.open(nic.name, port=nic.port.number, gid_index=nic.gid_index) as other_nic,
        connected(nic) as (ours, _),
        other_nic.register_host(bytearray(KIB)) as foreign,
        nic.register_host(bytearray(KIB)) as target_region,
    ):
        element: ScatterGatherElement = foreign.element()
        ours.post_write([element], target_region.remote(), work_id=1)
        assert ours.wait(WAIT_MS).status in NO_SUCH_KEY
