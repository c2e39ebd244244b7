"""Access rights of keys, queue pairs and protection domains (ibv_reg_mr(3), ibv_modify_qp(3), ibv_alloc_pd(3))."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import READ_WRITE_ACCESS, WAIT_MS, connect_queue_pairs

from gdrkit import verbs as rdma
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import Access, ScatterGatherElement, Status

if TYPE_CHECKING:
    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

# If the queue pair does not allow a request, the responder may report an access error or an invalid request.
NOT_ALLOWED_STATUSES = frozenset({Status.REM_ACCESS_ERR, Status.REM_INV_REQ_ERR})
# If the NIC cannot write to the memory of a receive, the InfiniBand specification requires a protection error. rxe
# reports a QP operation error.
UNWRITABLE_RECEIVE_STATUSES = frozenset({Status.LOC_PROT_ERR, Status.LOC_QP_OP_ERR})

# By the InfiniBand specification (10.10.5), an unknown local key or a local key of another domain causes a protection
# error. rxe reports a QP operation error.
WRONG_LOCAL_KEY_STATUSES = frozenset({Status.LOC_PROT_ERR, Status.LOC_QP_OP_ERR})
# Bits to flip in a key, so that the key belongs to no region.
FLIPPED_KEY_BITS = 0x0100_0001


def test_write_needs_remote_write_access(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes, access=Access.LOCAL_WRITE | Access.REMOTE_READ) as remote_region,
    ):
        requester.post_write(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert remote_bytes == bytes(KIB)


def test_read_needs_remote_read_access(nic: Nic) -> None:
    local_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(bytearray(b"\xa5" * KIB), access=Access.LOCAL_WRITE | Access.REMOTE_WRITE) as remote_region,
    ):
        requester.post_read(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert local_bytes == bytes(KIB)


def test_write_needs_access_of_the_queue_pair(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic, responder_access=Access.REMOTE_READ) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        requester.post_write(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status in NOT_ALLOWED_STATUSES
    assert remote_bytes == bytes(KIB)


def test_read_needs_access_of_the_queue_pair(nic: Nic) -> None:
    local_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic, responder_access=Access.REMOTE_WRITE) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(bytearray(b"\xa5" * KIB)) as remote_region,
    ):
        requester.post_read(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status in NOT_ALLOWED_STATUSES
    assert local_bytes == bytes(KIB)


@pytest.mark.parametrize("flipped_bits", [0x0000_0001, 0x0000_0100, 0x8000_0000, 0xFFFF_FFFF])
def test_key_with_a_flipped_bit_is_refused(nic: Nic, flipped_bits: int) -> None:
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        # The changed key must differ from the key of the local region.
        range_with_wrong_key = replace(remote_region.remote(), rkey=remote_region.rkey ^ flipped_bits)
        assert range_with_wrong_key.rkey not in {local_region.rkey, remote_region.rkey}
        requester.post_write(local_region, range_with_wrong_key, work_id=1)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert remote_bytes == bytes(KIB)


def test_send_with_a_wrong_local_key_fails_at_the_requester(nic: Nic) -> None:
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(KIB)) as local_region:
        element = local_region.element()
        requester.post_send([replace(element, lkey=element.lkey ^ FLIPPED_KEY_BITS)], work_id=1)
        assert requester.wait(WAIT_MS).status in WRONG_LOCAL_KEY_STATUSES


def test_read_into_read_only_memory_fails_at_the_requester(nic: Nic) -> None:
    local_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes, access=Access.REMOTE_READ) as local_region,
        nic.register_host(bytearray(b"\xa5" * KIB)) as remote_region,
    ):
        requester.post_read(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.LOC_PROT_ERR
    assert local_bytes == bytes(KIB)


def test_receive_into_read_only_memory_fails_on_both_sides(nic: Nic) -> None:
    receive_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, responder),
        nic.register_host(bytearray(b"\xa5" * KIB)) as send_region,
        nic.register_host(receive_bytes, access=Access.REMOTE_READ) as receive_region,
    ):
        responder.post_receive(receive_region, work_id=1)
        requester.post_send(send_region, work_id=2)
        assert requester.wait(WAIT_MS).status is Status.REM_OP_ERR
        assert responder.wait_received(WAIT_MS).status in UNWRITABLE_RECEIVE_STATUSES
    assert receive_bytes == bytes(KIB)


def test_remote_key_of_another_domain_is_refused(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with (
        rdma.Nic.open(nic.name, port=nic.port.number, gid_index=nic.gid_index) as other_nic,
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(bytearray(b"\xa5" * KIB)) as local_region,
        other_nic.register_host(remote_bytes, access=READ_WRITE_ACCESS) as remote_region,
    ):
        requester.post_write(local_region, remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
    assert remote_bytes == bytes(KIB)


def test_local_key_of_another_domain_is_refused(nic: Nic) -> None:
    with (
        rdma.Nic.open(nic.name, port=nic.port.number, gid_index=nic.gid_index) as other_nic,
        connect_queue_pairs(nic) as (requester, _),
        other_nic.register_host(bytearray(KIB)) as foreign_region,
        nic.register_host(bytearray(KIB)) as remote_region,
    ):
        element: ScatterGatherElement = foreign_region.element()
        requester.post_write([element], remote_region.remote(), work_id=1)
        assert requester.wait(WAIT_MS).status in WRONG_LOCAL_KEY_STATUSES
