"""Which way device memory is registered: dma-buf, else peer memory, else one error with both causes.

All NICs or none, and nothing is left when it fails.
"""

from __future__ import annotations

import errno
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import faults
from support.reach import DMABUF, joined, registered, registering

from gdrkit import handles
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, UsageError
from gdrkit.harness.needs import cuda, needs, software, verbs
from gdrkit.host import HostAllocator
from gdrkit.registration import BufferPool, RegionCache, RegistrationRoute, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Nic, Status

if TYPE_CHECKING:
    from support.reach import Space

    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer

NO_DMABUF = "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"
NO_PEER_MEMORY = "ibv_reg_mr call=* errno=EFAULT"


@pytest.mark.qualify
@DMABUF
def test_dmabuf_is_taken_where_every_nic_takes_it(device: Device, nics: tuple[Nic, ...]) -> None:
    with device.allocate(64 * KIB) as memory, register(memory, nics) as registration:
        assert registration.route is RegistrationRoute.DMABUF
        assert registration.nics == nics
        assert not registration.refusals


@DMABUF
@needs(software(Api.VERBS), verbs.peer_memory)
def test_peer_memory_is_taken_where_a_nic_has_no_dmabuf_and_the_reason_is_kept(
    device: Device, nics: tuple[Nic, ...], seed: int, peer: Peer
) -> None:
    with device.allocate(64 * KIB) as memory, faults(Api.VERBS, NO_DMABUF), register(memory, nics) as registration:
        assert registration.route is RegistrationRoute.PEER_MEMORY
        (refusal,) = registration.refusals
        assert isinstance(refusal, ApiError)
        assert (refusal.operation, refusal.errno) == ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
        with joined(nics[0], peer) as theirs:
            theirs.write(registration.remote(nics[0]), seed=seed).expect(Status.SUCCESS)


@pytest.mark.qualify
@DMABUF
@needs(software(Api.VERBS))
def test_without_any_way_one_error_has_both_causes_and_nothing_is_left(device: Device, nics: tuple[Nic, ...]) -> None:
    with device.allocate(64 * KIB) as memory, faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY):
        before = handles.live()
        with pytest.raises(RegistrationFailed) as raised:
            register(memory, nics)
        assert handles.live() == before
    assert raised.value.reason is Reason.NO_ROUTE
    causes = [cause for cause in raised.value.causes if isinstance(cause, ApiError)]
    assert [(cause.operation, cause.errno) for cause in causes] == [
        ("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP),
        ("ibv_reg_mr", errno.EFAULT),
    ]
    assert all(cause.what_to_do for cause in causes)


@DMABUF
@needs(software(Api.VERBS))
def test_failed_registrations_keep_no_memory_alive(device: Device, nics: tuple[Nic, ...]) -> None:
    # Issue 15 B: the stored refusal of a NIC was raised again each time, and its traceback kept every caller's memory.
    kept: list[weakref.ref[object]] = []
    lengths = set()

    def fail() -> None:
        with device.allocate(64 * KIB) as memory:
            kept.append(weakref.ref(memory))
            with pytest.raises(RegistrationFailed) as raised:
                register(memory, nics)
            lengths.add(len(raised.traceback))

    with faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY):
        for _ in range(50):
            fail()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 50
    assert len(lengths) == 1


@DMABUF
@needs(software(Api.VERBS))
def test_transient_probe_error_is_asked_again(nic: Nic) -> None:
    with Nic.open(nic.name) as other:
        with faults(Api.VERBS, "ibv_reg_dmabuf_mr call=* errno=ENOMEM"):
            refusal = other.dmabuf_error()
            assert refusal is not None
            assert refusal.errno == errno.ENOMEM
        assert other.dmabuf_error() is None


@DMABUF
@needs(software(Api.VERBS))
def test_refusal_of_a_nic_is_a_new_error_each_time(nic: Nic) -> None:
    with Nic.open(nic.name) as other:
        with faults(Api.VERBS, NO_DMABUF):
            first = other.dmabuf_error()
        second = other.dmabuf_error()
        assert first is not None
        assert second is not None
        assert first is not second
        assert str(first) == str(second)
        assert second.__traceback__ is None


@needs(software(Api.VERBS), verbs.nic(count_min=2))
def test_when_the_second_nic_fails_the_first_one_is_undone(space: Space, nics: tuple[Nic, ...]) -> None:
    for nic in nics:
        assert nic.supports_dmabuf()  # asked once and remembered, so that the plan below counts regions alone
    with space.allocate(64 * KIB) as memory, faults(Api.VERBS, f"{registering(space)} call=2 errno=ENOMEM"):
        before = handles.live()
        with pytest.raises(ApiError) as raised:
            register(memory, nics)
        assert handles.live() == before
        # Out of memory says nothing about the way: another one is not tried behind the caller's back.
        assert (raised.value.operation, raised.value.errno) == (registering(space), errno.ENOMEM)
        register(memory, nics).close()


@DMABUF
def test_a_way_that_is_asked_for_is_not_replaced(device: Device, nic: Nic) -> None:
    with device.allocate(64 * KIB) as memory, registered(memory, [nic], route=RegistrationRoute.DMABUF) as registration:
        assert registration.route is RegistrationRoute.DMABUF
    with device.allocate(64 * KIB) as memory, pytest.raises(UsageError):
        register(memory, [nic, nic])
    with device.allocate(64 * KIB) as memory, pytest.raises(UsageError):
        register(memory, [])


@needs(verbs.nic())
@pytest.mark.parametrize("memory", [bytearray(4096), 4096, None, "memory"], ids=lambda memory: type(memory).__name__)
def test_memory_of_a_wrong_type_is_named(nic: Nic, memory: Any) -> None:  # noqa: ANN401 - that is the point.
    # Issue 15 B: it was an AttributeError.
    with pytest.raises(UsageError, match=f"DeviceBuffer.*not {type(memory).__name__}"):
        register(memory, [nic])
    with RegionCache([nic]) as cache, pytest.raises(UsageError, match=f"not {type(memory).__name__}"):
        cache.lease(memory)


@needs(verbs.nic())
def test_nics_of_a_wrong_type_are_named(nic: Nic) -> None:
    # Issue 15 B: a single NIC was a TypeError.
    wrong: list[tuple[Any, str]] = [(nic, "Nic"), (None, "NoneType"), (7, "int"), ([nic.name], "str"), ("", "at least")]
    space = HostAllocator()
    with space.allocate(64 * KIB) as memory:
        before = handles.live()
        for nics, named in wrong:
            with pytest.raises(UsageError, match=f"nics must .*{named}"):
                register(memory, nics)
            with pytest.raises(UsageError, match=f"nics must .*{named}"):
                RegionCache(nics)
            with pytest.raises(UsageError, match=f"nics must .*{named}"):
                BufferPool(space, nics, buffer_bytes=4096, count=1)
        assert handles.live() == before


@DMABUF
@needs(cuda.vmm)
def test_vmm_memory_of_several_chunks_is_one_region(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory,
        register(memory, [nic]) as registration,
        joined(nic, peer) as theirs,
    ):
        assert len(memory.allocation_key()) == 3
        # From the first chunk into the third.
        remote = registration.remote(nic, offset_bytes=2 * MIB - 7, length_bytes=2 * MIB + 99)
        theirs.write(remote, seed=seed).expect(Status.SUCCESS)
        theirs.read(remote, seed=seed).completion.expect(Status.SUCCESS)
