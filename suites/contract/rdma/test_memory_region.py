"""Memory that can be registered, and the keys of its regions (ibv_reg_mr(3))."""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING

import pytest
from contract.rdma.connected_pair import READ_WRITE_ACCESS, WAIT_MS, connect_queue_pairs, require_errno
from contract.rdma.raw_queue_pair import register

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import HOST_PAGE_BYTES, KIB, MIB
from gdrkit.verbs import Access, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.verbs import Nic

pytestmark = needs(verbs.nic())

# No access flag has this bit. A library may ignore only the optional flags, bits 20 to 29.
UNKNOWN_ACCESS_FLAG = 1 << 19


@pytest.fixture
def pages_address() -> Iterator[int]:
    """Yield the address of four pages. The last page is unmapped."""
    from contract.rdma.mapped_pages import map_pages

    with map_pages(4, unmapped_from=3) as address:
        yield address


@pytest.mark.parametrize("length_bytes", [1, 4095, HOST_PAGE_BYTES, 64 * KIB + 1, MIB + 3])
def test_any_length_at_any_address_can_be_registered(nic: Nic, length_bytes: int) -> None:
    misaligned_buffer = memoryview(bytearray(length_bytes + 7))[7:]
    with nic.register_host(misaligned_buffer) as region:
        assert region.length_bytes == length_bytes
        assert region.remote().length_bytes == length_bytes


def test_regions_of_one_buffer_have_separate_keys(nic: Nic) -> None:
    buffer = bytearray(HOST_PAGE_BYTES)
    regions = [nic.register_host(buffer) for _ in range(16)]
    assert len({region.rkey for region in regions}) == 16
    assert len({region.lkey for region in regions}) == 16
    for region in regions:
        region.close()


def test_region_survives_deregistration_of_an_overlapping_one(nic: Nic, seed: int) -> None:
    remote_bytes = bytearray(HOST_PAGE_BYTES)
    local_bytes = bytearray(pattern.payload(HOST_PAGE_BYTES, seed=seed))
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes) as local_region,
        nic.register_host(remote_bytes) as remaining_region,
    ):
        nic.register_host(remote_bytes).close()
        requester.post_write(local_region, remaining_region.remote(), work_id=1)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
        pattern.check(remote_bytes, seed=seed)


def test_read_only_memory_is_registered_only_for_reading(nic: Nic) -> None:
    from contract.rdma.mapped_pages import map_pages

    with map_pages(1, writable=False) as address:
        with register(nic, address, length_bytes=HOST_PAGE_BYTES, access=int(Access.REMOTE_READ)):
            pass
        with (
            require_errno(errno.EFAULT),
            register(nic, address, length_bytes=HOST_PAGE_BYTES, access=int(READ_WRITE_ACCESS)),
        ):
            pass


def test_unmapped_memory_is_refused(nic: Nic, pages_address: int) -> None:
    address = pages_address + 3 * HOST_PAGE_BYTES
    with require_errno(errno.EFAULT), register(nic, address, length_bytes=16, access=int(READ_WRITE_ACCESS)):
        pass


def test_partly_unmapped_range_is_refused(nic: Nic, pages_address: int) -> None:
    with register(nic, pages_address, length_bytes=3 * HOST_PAGE_BYTES, access=int(READ_WRITE_ACCESS)):
        pass
    with (
        require_errno(errno.EFAULT),
        register(nic, pages_address, length_bytes=3 * HOST_PAGE_BYTES + 1, access=int(READ_WRITE_ACCESS)),
    ):
        pass


@pytest.mark.parametrize(
    "access", [Access.REMOTE_WRITE, Access.REMOTE_ATOMIC, Access.REMOTE_WRITE | Access.REMOTE_READ]
)
def test_remote_write_access_needs_local_write(nic: Nic, pages_address: int, access: Access) -> None:
    with require_errno(errno.EINVAL), register(nic, pages_address, length_bytes=16, access=int(access)):
        pass


def test_unknown_access_flag_is_refused(nic: Nic, pages_address: int) -> None:
    # The driver refuses the flag as invalid (EINVAL) or as unsupported (EOPNOTSUPP).
    access = int(READ_WRITE_ACCESS) | UNKNOWN_ACCESS_FLAG
    with require_errno(errno.EINVAL, errno.EOPNOTSUPP), register(nic, pages_address, length_bytes=16, access=access):
        pass


def test_optional_access_flag_is_never_refused(nic: Nic, pages_address: int) -> None:
    with register(nic, pages_address, length_bytes=16, access=int(READ_WRITE_ACCESS | Access.RELAXED_ORDERING)):
        pass


def test_local_read_needs_no_access_flag(nic: Nic, seed: int) -> None:
    local_bytes = bytearray(pattern.payload(KIB, seed=seed))
    remote_bytes = bytearray(KIB)
    with (
        connect_queue_pairs(nic) as (requester, _),
        nic.register_host(local_bytes, access=Access(0)) as local_region,
        nic.register_host(remote_bytes) as remote_region,
    ):
        requester.post_write(local_region, remote_region.remote(), work_id=1)
        requester.wait(WAIT_MS).expect(Status.SUCCESS)
    pattern.check(remote_bytes, seed=seed)


@pytest.mark.parametrize(
    "length_bytes", [pytest.param(0, id="zero"), pytest.param(2**64 - HOST_PAGE_BYTES, id="past-the-last-address")]
)
def test_invalid_length_is_refused(nic: Nic, pages_address: int, length_bytes: int) -> None:
    with (
        require_errno(errno.EINVAL),
        register(nic, pages_address, length_bytes=length_bytes, access=int(READ_WRITE_ACCESS)),
    ):
        pass


def test_shared_memory_can_be_registered(nic: Nic, seed: int) -> None:
    with mmap.mmap(-1, 64 * KIB) as shared_memory:
        local_bytes = bytearray(pattern.payload(64 * KIB, seed=seed))
        with (
            connect_queue_pairs(nic) as (requester, _),
            nic.register_host(local_bytes) as local_region,
            nic.register_host(shared_memory) as remote_region,
        ):
            requester.post_write(local_region, remote_region.remote(), work_id=1)
            requester.wait(WAIT_MS).expect(Status.SUCCESS)
        pattern.check(shared_memory[:], seed=seed)


def test_key_is_refused_after_deregistration(nic: Nic) -> None:
    remote_bytes = bytearray(KIB)
    with connect_queue_pairs(nic) as (requester, _), nic.register_host(bytearray(KIB)) as local_region:
        with nic.register_host(remote_bytes) as remote_region:
            remote_range = remote_region.remote()
        requester.post_write(local_region, remote_range, work_id=1)
        assert requester.wait(WAIT_MS).status is Status.REM_ACCESS_ERR
